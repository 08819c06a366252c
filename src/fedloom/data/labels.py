"""Raw labels of any kind -> class ids 0 .. C-1 and class names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedloom.core import DataError


def index_labels(
    train: Any, test: Any | None = None, names: Sequence[str] | None = None, *, where: str = "labels"
) -> tuple[np.ndarray, np.ndarray | None, tuple[str, ...], list[str]]:
    """Class ids (int64) of both splits, class names, and notes on what was changed.

    names: known class names; labels must then be integers in 0 .. len(names)-1. Without names, strings and
    integers with gaps are re-indexed in sorted order, over the labels of both splits.
    Raises `DataError` naming the first label that cannot be used.
    """
    parts = [_plain(part, where) for part in (train, test) if part is not None]
    if len(parts) == 2 and (parts[0].dtype.kind == "U") != (parts[1].dtype.kind == "U"):
        raise DataError(f"{where} of the train split and of the test split must be of one kind, text or integers")
    notes: list[str] = []
    if names is not None:
        for part in parts:
            _check_range(part, len(names), where)
        out, class_names = parts, tuple(str(n) for n in names)
    else:
        found = np.unique(np.concatenate(parts))
        out = [np.searchsorted(found, part) for part in parts]
        class_names = tuple(str(v) for v in found)
        if found.dtype.kind == "U" or not np.array_equal(found, np.arange(len(found))):
            shown = ", ".join(class_names[:4]) + (", ..." if len(found) > 4 else "")
            notes.append(f"{where} were re-indexed to 0..{len(found) - 1} in sorted order: {shown}")
    absent = sorted(set(range(len(class_names))) - set(np.unique(out[0]).tolist()))
    if absent:
        shown = ", ".join(class_names[c] for c in absent[:5]) + (", ..." if len(absent) > 5 else "")
        notes.append(f"{len(absent)} classes have no training example: {shown}")
    ids = [part.astype(np.int64) for part in out]
    return ids[0], ids[1] if len(ids) == 2 else None, class_names, notes


def _plain(raw: Any, where: str) -> np.ndarray:
    y = np.asarray(raw)
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.ndim != 1:
        raise DataError(
            f"{where} must be one class per example, got shape {y.shape}; for one-hot rows pass y.argmax(1)"
        )
    if y.dtype.kind == "O":
        bad = [v for v in y.tolist() if not isinstance(v, type(y[0])) or not isinstance(v, str | int)]
        if bad:
            raise DataError(f"{where} must be all integers or all text, got {bad[0]!r}; fill or drop these examples")
        return y.astype(str if isinstance(y[0], str) else np.int64)
    if y.dtype.kind == "f":
        bad_idx = np.flatnonzero(~(np.isfinite(y) & (y == np.floor(y))))
        if len(bad_idx):
            raise DataError(f"{where} must be integers 0..C-1, got {y[bad_idx[0]]} at position {bad_idx[0]}")
        return y.astype(np.int64)
    if y.dtype.kind not in "iubUS":
        raise DataError(f"{where} must be integers 0..C-1 or text, got dtype {y.dtype}")
    return y.astype(str) if y.dtype.kind in "US" else y.astype(np.int64)


def _check_range(y: np.ndarray, classes: int, where: str) -> None:
    if y.dtype.kind == "U":
        raise DataError(f"{where} must be integers 0..{classes - 1}, got text such as {str(y[0])!r}")
    bad = np.flatnonzero((y < 0) | (y >= classes))
    if len(bad):
        raise DataError(f"{where} must be integers 0..{classes - 1}, got {y[bad[0]]} at position {bad[0]}")
