"""Encoded images -> one uint8 tensor [n, channels, height, width]."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO

import numpy as np

from fedloom.core import DataError

Size = tuple[int, int]
Blob = Callable[[], bytes]  # reads one encoded image, so that files are opened only while they are decoded

GREY, COLOUR = ("1", "L", "LA"), ("P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr")


def to_size(value: int | Sequence[int] | None) -> Size | None:
    """(height, width) of `data.image_size`: one number for squares, two otherwise."""
    if value is None:
        return None
    size = (value, value) if isinstance(value, int) else tuple(value)
    if len(size) != 2 or not all(isinstance(v, int) and v > 0 for v in size):
        raise DataError(f"data.image_size must be a positive integer or [height, width], got {value}")
    return size


def channels_of(blobs: Sequence[Blob], where: Callable[[int], str]) -> int:
    """1 when every image is grey, 3 otherwise. Reads headers only."""
    from PIL import Image

    for i, blob in enumerate(blobs):
        try:
            with Image.open(BytesIO(blob())) as image:
                mode = image.mode
        except (OSError, ValueError) as error:
            raise DataError(f"{where(i)} is not a readable image ({error}); replace or remove it") from error
        if mode in COLOUR:
            return 3
        if mode not in GREY:
            raise DataError(f"{where(i)} has pixel mode '{mode}'; convert it to 8-bit grey or RGB")
    return 1


def decode(blobs: Sequence[Blob], channels: int, size: Size | None, where: Callable[[int], str]) -> np.ndarray:
    """Decode every image to `channels` (grey is repeated in RGB) and, where `size` is given, to that size.

    where: position -> words that name the image in an error. Without `size`, all images must agree with the first.
    Raises `DataError` for an unreadable image or another size.
    """
    first = _decode_one(blobs[0], channels, size, where(0))
    out = np.empty((len(blobs), *first.shape), np.uint8)

    def fill(i: int) -> None:
        array = _decode_one(blobs[i], channels, size, where(i))
        if array.shape != first.shape:
            found, want = (f"{s[2]}x{s[1]}" for s in (array.shape, first.shape))
            raise DataError(
                f"{where(i)} is {found} (width x height) but the first image is {want}; "
                "set data.image_size to resize all images"
            )
        out[i] = array

    # Decoding releases the interpreter lock; each thread writes rows of its own.
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for _ in pool.map(fill, range(len(blobs))):
            pass
    return out


def _decode_one(blob: Blob, channels: int, size: Size | None, where: str) -> np.ndarray:
    from PIL import Image

    try:
        with Image.open(BytesIO(blob())) as image:
            if channels == 1 and image.mode not in GREY:
                raise DataError(f"{where} has colours among grey images; convert all to one kind")
            flat = image.convert("L" if channels == 1 else "RGB")
    except DataError:
        raise
    except (OSError, ValueError, SyntaxError) as error:  # Pillow raises SyntaxError for a broken PNG
        raise DataError(f"{where} is not a readable image ({error}); replace or remove it") from error
    if size is not None and flat.size != (size[1], size[0]):
        flat = flat.resize((size[1], size[0]), Image.Resampling.BILINEAR)
    array = np.asarray(flat, np.uint8)
    return array[None] if channels == 1 else array.transpose(2, 0, 1)
