"""The bundled digits in several renderings: domains that need no download.

Every rendering is whole-number arithmetic on 8-bit images, so the bytes are the same on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from fedloom.core.seeds import seed_for

NOISE = 160  # brightest value of the noisy background, of 255
BINOMIAL = (1, 4, 6, 4, 1)  # sums to 16


def rotated(x: np.ndarray) -> np.ndarray:
    """Turned by a quarter to the left, which needs no interpolation."""
    return np.rot90(x, axes=(2, 3))


def inverted(x: np.ndarray) -> np.ndarray:
    """Dark strokes on white."""
    return 255 - x


def noisy(x: np.ndarray) -> np.ndarray:
    """On a background of uniform noise in 0 .. `NOISE`, drawn per pixel from a seed of its own."""
    noise = np.random.default_rng(seed_for(0, "noisy-digits")).integers(0, NOISE + 1, x.shape, dtype=np.uint8)
    return np.maximum(x, noise)


def blurred(x: np.ndarray) -> np.ndarray:
    """Smoothed by the binomial filter of width 5 along both sides, with black beyond the border."""
    wide = np.pad(x.astype(np.int64), ((0, 0), (0, 0), (2, 2), (2, 2)))
    height, width = x.shape[2:]
    rows = sum(weight * wide[:, :, k : k + height] for k, weight in enumerate(BINOMIAL))
    both = sum(weight * rows[..., k : k + width] for k, weight in enumerate(BINOMIAL))
    return ((both + 128) // 256).astype(np.uint8)


RENDERINGS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = MappingProxyType(
    {f.__name__: f for f in (rotated, inverted, noisy, blurred)}
)


def rendered(x: np.ndarray, y: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Inputs, class ids and domain ids of the chosen `rows` in every rendering, one rendering after another.

    x: uint8 [n, 1, height, width], all images, so that an image looks the same whichever rows are chosen.
    """
    xs = np.concatenate([render(x)[rows] for render in RENDERINGS.values()])
    count = len(y[rows])
    return xs, np.tile(y[rows], len(RENDERINGS)), np.repeat(np.arange(len(RENDERINGS)), count)
