"""The user's own arrays, tensors and torch datasets -> a source. Nothing is written and nothing is fetched."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedloom.core import DataError
from fedloom.data.labels import index_labels
from fedloom.data.source import Source, assemble

CHANNELS = (1, 3, 4)


def from_arrays(
    data: Any,
    *,
    name: str = "arrays",
    class_names: Sequence[str] | None = None,
    test_fraction: float = 0.2,
    split_seed: int = 0,
    cache: Path | None = None,
) -> Source:
    """Build a source from `(x, y)`, `(x_train, y_train, x_test, y_test)`, a torch dataset or a pair of them.

    x: [n, ...] arrays or tensors. Images are [n, channels, height, width], [n, height, width] (grey) or
    [n, height, width, channels]; 8-bit images are normalised by statistics of the train split, floats are used
    as they are. y: [n] integers or text; other values than 0..C-1 are re-indexed with a note.
    Raises `DataError` in words that name the part and the mend.
    """
    parts = _parts(data)
    if not all(len(part) for part in parts):
        raise DataError("data: the arrays are empty; give at least one example per split")
    for x, y, split in zip(parts[::2], parts[1::2], ("train", "test"), strict=False):
        if len(x) != len(y):
            raise DataError(f"data: the {split} split has {len(x)} inputs but {len(y)} labels; make them equal")
    notes: list[str] = []
    xs = [_inputs(x, notes) for x in parts[::2]]
    y_train, y_test, names, changed = index_labels(parts[1], *parts[3:4], names=class_names)
    return assemble(
        name, (xs[0], y_train), None if y_test is None else (xs[1], y_test), names,
        test_fraction=test_fraction, split_seed=split_seed, notes=(*dict.fromkeys(notes), *changed), cache=cache,
    )  # fmt: skip


def _parts(data: Any) -> list[Any]:
    if _is_dataset(data):
        return list(_stack(data))
    if isinstance(data, tuple | list) and len(data) == 2 and all(_is_dataset(d) for d in data):
        return [part for d in data for part in _stack(d)]
    if isinstance(data, tuple | list) and len(data) in (2, 4):
        return [_array(part) for part in data]
    raise DataError(
        "data must be (x, y), (x_train, y_train, x_test, y_test), a torch dataset or a (train, test) pair of them, "
        f"got {type(data).__name__}" + (f" of length {len(data)}" if isinstance(data, tuple | list) else "")
    )


def _is_dataset(value: Any) -> bool:
    return isinstance(value, torch.utils.data.Dataset)


def _stack(dataset: Any) -> tuple[np.ndarray, np.ndarray]:
    if isinstance(dataset, torch.utils.data.IterableDataset) or not hasattr(dataset, "__len__"):
        raise DataError(f"data: {type(dataset).__name__} has no length; pass a map-style dataset or arrays")
    pairs = [dataset[i] for i in range(len(dataset))]
    bad = next((i for i, p in enumerate(pairs) if not isinstance(p, tuple | list) or len(p) != 2), None)
    if bad is not None:
        raise DataError(f"data: example {bad} of {type(dataset).__name__} is not a pair (input, label)")
    if not pairs:
        return np.empty(0), np.empty(0)
    xs = [_array(x) for x, _ in pairs]
    other = next((i for i, x in enumerate(xs) if x.shape != xs[0].shape), None)
    if other is not None:
        raise DataError(
            f"data: example {other} of {type(dataset).__name__} has shape {xs[other].shape}, the first {xs[0].shape}; "
            "resize them to one shape"
        )
    return np.stack(xs), np.asarray([_array(y).item() if not isinstance(y, str) else y for _, y in pairs])


def _array(value: Any) -> np.ndarray:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        return (value.float() if value.dtype in (torch.bfloat16, torch.float16) else value).numpy()
    try:
        return np.asarray(value)
    except ValueError as error:
        raise DataError(f"data: cannot make an array of {type(value).__name__} ({error})") from error


def _inputs(x: np.ndarray, notes: list[str]) -> np.ndarray:
    if x.dtype.kind not in "fiub":
        raise DataError(f"data: inputs must be numbers, got dtype {x.dtype}")
    if x.ndim < 2:
        raise DataError(f"data: inputs must be [n, features] or images, got shape {x.shape}; use x.reshape(-1, 1)")
    if x.dtype.kind in "iu" and x.dtype != np.uint8 and x.ndim >= 3 and x.min() >= 0 and x.max() <= 255:
        notes.append(f"images of dtype {x.dtype} were stored as 8 bits")
        x = x.astype(np.uint8)
    if x.ndim == 3:
        notes.append(f"inputs of shape [n, {x.shape[1]}, {x.shape[2]}] were taken as grey images")
        x = x[:, None]
    elif x.ndim == 4 and x.shape[1] not in CHANNELS and x.shape[3] in CHANNELS:
        notes.append("images were turned from [n, height, width, channels] to [n, channels, height, width]")
        x = x.transpose(0, 3, 1, 2)
    return np.ascontiguousarray(x if x.dtype == np.uint8 else x.astype(np.float32))
