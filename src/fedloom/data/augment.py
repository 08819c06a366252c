"""Stored inputs -> model inputs: augmentation of a whole batch, then scaling and normalisation."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.core import ConfigError
from fedloom.core.batches import Inputs
from fedloom.core.errors import unknown

PADDING = 4
AUGMENTATIONS = ("none", "flip", "crop_flip")


def flip(x: Tensor, rng: torch.Generator) -> Tensor:
    """Mirror each image left to right with probability 1/2. x: [batch, channels, height, width]."""
    flip_mask = torch.rand(len(x), generator=rng) < 0.5
    return torch.where(flip_mask[:, None, None, None].to(x.device), x.flip(3), x)


def crop(x: Tensor, rng: torch.Generator) -> Tensor:
    """Pad by 4 zero pixels and cut each image out at a random place. x: [batch, channels, height, width]."""
    places = torch.randint(0, 2 * PADDING + 1, (2, len(x)), generator=rng)
    padded = torch.nn.functional.pad(x, (PADDING,) * 4)
    windows = padded.unfold(2, x.shape[2], 1).unfold(3, x.shape[3], 1)
    return windows[torch.arange(len(x)), :, places[0], places[1]]


@dataclass(frozen=True)
class Prepare:
    """uint8 in 0..255 -> (x / 255 - mean) / std per channel; float inputs pass unless mean is given.

    mean, std: per channel, or one number for inputs without channels; empty: no normalisation.
    Augmentation is drawn only where a generator is given.
    """

    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    augment: str = "none"

    def __post_init__(self) -> None:
        if self.augment not in AUGMENTATIONS:
            raise ConfigError(unknown("data.augment", self.augment, AUGMENTATIONS))
        if len(self.mean) != len(self.std) or any(s <= 0 for s in self.std):
            raise ConfigError(f"std must be positive and as long as mean, got mean {self.mean} and std {self.std}")

    def __call__(self, x: Inputs, rng: torch.Generator | None = None) -> Inputs:
        """Model inputs, float32."""
        if isinstance(x, Mapping):
            return x
        if rng is not None and self.augment != "none":
            x = flip(crop(x, rng) if self.augment == "crop_flip" else x, rng)
        scale = 255.0 if x.dtype == torch.uint8 else 1.0
        if x.is_floating_point():
            x = x.to(torch.float32)
        if not self.mean:
            return x / scale if scale != 1.0 else x.to(torch.float32)
        mean, std = _moments(self.mean, self.std, scale, x.dim(), x.device)
        return (x - mean).div_(std)


@functools.lru_cache(maxsize=32)
def _moments(
    mean: tuple[float, ...], std: tuple[float, ...], scale: float, dims: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Mean and deviation per channel in stored units; kept, for making them costs more than using them."""
    shape = (1, -1, 1, 1) if dims == 4 else (1,) * dims
    first, second = (torch.tensor(v, dtype=torch.float32, device=device).view(shape) for v in (mean, std))
    return scale * first, scale * second
