"""Files that `predict` reads: arrays, tables and images."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.core.errors import DataError

IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")


def read_inputs(
    path: Path, meta: Mapping[str, Any], note: Callable[[str], None] = lambda text: None
) -> tuple[list[str], np.ndarray]:
    """(label, stored input) of everything in a file or a folder of images. `DataError` says what is wrong.

    meta: the model's `input_shape`, `stored` and so on; images are brought to its channels and size, and `note`
    gets a sentence about that.
    """
    if not _exists(path):
        raise DataError(f"--input '{str(path)[:200]}' does not exist")
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.suffix.lower() in IMAGES and not p.is_dir())
        if not files:
            raise DataError(f"--input '{path}' holds no images ({', '.join(IMAGES)})")
        return [str(p.relative_to(path)) for p in files], _images(files, meta, note)
    suffix = path.suffix.lower()
    if suffix in IMAGES:
        return [path.name], _images([path], meta, note)
    if suffix not in (".npy", ".npz", ".csv"):
        raise DataError(f"--input '{path}' must end in .npy, .npz, .csv or one of {', '.join(IMAGES)}")
    x = _shaped(_table(path) if suffix == ".csv" else _array(path), meta, path)
    return [f"{path.name}[{k}]" for k in range(len(x))], x


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # too long a name, a null byte
        return False


def _array(path: Path) -> np.ndarray:
    try:
        with open(path, "rb") as file:  # NumPy leaves a file open that it cannot read
            found = np.load(file, allow_pickle=False)
            if isinstance(found, np.ndarray):
                return found
            if not found.files:
                raise DataError(f"--input '{path}' holds no array")
            return np.asarray(found["x" if "x" in found.files else found.files[0]])
    except DataError:
        raise
    except OSError as error:
        raise DataError(f"--input '{path}' cannot be read: {error.strerror or error}") from error
    except Exception as error:  # NumPy, its zip reader and its parser raise many kinds, and advise to unpickle
        kind = "it holds Python objects" if "Object arrays" in str(error) else "it is damaged or none"
        raise DataError(
            f"--input '{path}' cannot be read as an array: {kind}; write numbers with numpy.save or numpy.savez"
        ) from error


def _table(path: Path) -> np.ndarray:
    """Rows of numbers; a first row that holds words is a header."""
    import csv

    try:
        with open(path, newline="", encoding="utf-8") as file:
            rows = [row for row in csv.reader(file) if row]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--input '{path}' cannot be read ({error})") from error
    if rows and not all(_is_number(cell) for cell in rows[0]):
        rows = rows[1:]
    bad = next((k for k, row in enumerate(rows) if len(row) != len(rows[0]) or not all(map(_is_number, row))), None)
    if bad is not None:
        raise DataError(f"--input '{path}': data row {bad} is not {len(rows[0])} numbers")
    whole = all(cell.strip().lstrip("+-").isdecimal() for row in rows for cell in row)
    return np.array([[float(cell) for cell in row] for row in rows], np.int64 if whole else np.float64)


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _shaped(x: np.ndarray, meta: Mapping[str, Any], path: Path) -> np.ndarray:
    """Add the batch dimension to a single input, fold flat rows into the model's shape."""
    shape = tuple(meta["input_shape"])
    if x.ndim == 0:
        raise DataError(f"--input '{path}' holds a single number; the model needs inputs of shape {list(shape)}")
    if x.dtype.kind not in "fiub":
        raise DataError(f"--input '{path}' must hold numbers, got dtype {x.dtype}")
    if x.ndim == 2 and len(shape) > 1 and x.shape[1] == int(np.prod(shape)):
        x = x.reshape(-1, *shape)
    elif x.shape == shape:
        x = x[None]
    if len(x) == 0:
        raise DataError(f"--input '{path}' holds no rows")
    return x


def _images(files: Sequence[Path], meta: Mapping[str, Any], note: Callable[[str], None]) -> np.ndarray:
    """Images as one batch; those that had to be changed are told once, by the first of them."""
    read = [_image(path, meta) for path in files]
    changed = [(path, how) for path, (_, how) in zip(files, read, strict=True) if how]
    if changed:
        more = f", and {len(changed) - 1} more images likewise" if len(changed) > 1 else ""
        note(f"image '{changed[0][0]}' was {changed[0][1]} to fit the model{more}")
    return np.stack([pixels for pixels, _ in read])


def _image(path: Path, meta: Mapping[str, Any]) -> tuple[np.ndarray, str]:
    """(image as [channels, height, width], uint8; how it was changed, empty for not at all).

    Resized (bilinear) where its size differs from the model's.
    """
    from PIL import Image, UnidentifiedImageError

    shape = tuple(meta["input_shape"])
    if len(shape) != 3 or shape[0] not in (1, 3, 4) or meta["stored"] != "uint8":
        raise DataError(f"the model takes inputs of shape {list(shape)}, not 8-bit images; give a .npy file")
    modes = {1: "L", 3: "RGB", 4: "RGBA"}
    try:
        with Image.open(path) as image:
            how = _changes(image.mode, image.size, modes[shape[0]], (shape[2], shape[1]))
            image = image.convert(modes[shape[0]])
            if image.size != (shape[2], shape[1]):
                image = image.resize((shape[2], shape[1]), Image.Resampling.BILINEAR)
            pixels = np.asarray(image)
    except (OSError, UnidentifiedImageError) as error:
        raise DataError(f"image '{path}' cannot be read ({error})") from error
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1), how


def _changes(mode: str, size: tuple[int, int], want_mode: str, want: tuple[int, int]) -> str:
    words = {"1": "black and white", "L": "grey"}
    parts = (
        [] if mode == want_mode else [f"converted from {words.get(mode, mode)} to {words.get(want_mode, want_mode)}"]
    )
    if size != want:
        parts.append(f"resized from {size[0]}x{size[1]} to {want[0]}x{want[1]}")
    return " and ".join(parts)
