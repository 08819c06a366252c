"""Raw labels of any kind -> ids 0 .. C-1 and names, of classes and of domains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedloom.core import DataError

FAR = 2**63  # beyond 64 bits numbers are no class ids


def index_labels(
    train: Any, test: Any | None = None, names: Sequence[str] | None = None, *, where: str = "labels"
) -> tuple[np.ndarray, np.ndarray | None, tuple[str, ...], list[str]]:
    """Class ids (int64) of both splits, class names, and notes on what was changed.

    names: known class names; labels must then be integers in 0 .. len(names)-1. Without names, strings and
    integers with gaps are re-indexed in sorted order, over the labels of both splits.
    Raises `DataError` naming the first label that cannot be used.
    """
    parts = _parts(train, test, where)
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


def index_domains(
    train: Any, test: Any | None = None, names: Sequence[str] | None = None, *, where: str = "domain labels"
) -> tuple[np.ndarray, np.ndarray | None, tuple[str, ...], list[str]]:
    """Domain ids (int64) of both splits, names of the domains that occur, and notes on splits that lack one.

    names: known domain names; labels must then be integers in 0 .. len(names)-1. Ids follow their order, without
    names the sorted order of the labels. A domain without any example is left out.
    Raises `DataError` naming the first label that cannot be used.
    """
    parts = _parts(train, test, where)
    for part in parts:
        empty = np.flatnonzero(np.char.strip(part) == "") if part.dtype.kind == "U" else ()
        if len(empty):
            raise DataError(f"{where} must name a domain, got an empty text at position {empty[0]}; fill or drop it")
        if names is not None:
            _check_range(part, len(names), where)
    found = np.unique(np.concatenate(parts))
    shown = tuple(str(v) if names is None else str(names[v]) for v in found)
    ids = [np.searchsorted(found, part).astype(np.int64) for part in parts]
    notes = []
    for split, part in zip(("train", "test"), ids, strict=False):
        absent = sorted(set(range(len(found))) - set(np.unique(part).tolist()))
        notes += [f"domain '{shown[d]}' has no {split} example" for d in absent]
    return ids[0], ids[1] if len(ids) == 2 else None, shown, notes


def _parts(train: Any, test: Any | None, where: str) -> list[np.ndarray]:
    parts = [_plain(part, where) for part in (train, test) if part is not None]
    if len(parts) == 2 and (parts[0].dtype.kind == "U") != (parts[1].dtype.kind == "U"):
        raise DataError(f"{where} of the train split and of the test split must be of one kind, text or integers")
    return parts


def _plain(raw: Any, where: str) -> np.ndarray:
    y = np.asarray(raw)
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.ndim != 1:
        raise DataError(
            f"{where} must be one class per example, got shape {y.shape}; for one-hot rows pass y.argmax(1)"
        )
    if y.dtype.kind == "O":
        return _of_objects(y.tolist(), where)
    if y.dtype.kind == "f":
        bad_idx = np.flatnonzero(~(np.isfinite(y) & (y == np.floor(y)) & (np.abs(y) < FAR)))
        if len(bad_idx):
            raise DataError(f"{where} must be integers 0..C-1, got {y[bad_idx[0]]} at position {bad_idx[0]}")
        return y.astype(np.int64)
    if y.dtype.kind not in "iubUS":
        raise DataError(f"{where} must be integers 0..C-1 or text, got dtype {y.dtype}")
    if y.dtype.kind == "u" and y.size and y.max() > np.iinfo(np.int64).max:
        raise DataError(f"{where} must be integers 0..C-1, got {y.max()} at position {y.argmax()}")
    return _text(y.tolist(), where) if y.dtype.kind in "US" else y.astype(np.int64)


def _of_objects(values: list[Any], where: str) -> np.ndarray:
    values = [v.item() if isinstance(v, np.generic) else v for v in values]
    kind = str if values and isinstance(values[0], str | bytes) else int
    for position, value in enumerate(values):
        fits = isinstance(value, str | bytes) if kind is str else isinstance(value, int) and abs(value) < FAR
        if not fits:
            shown = str(value)[:60] if isinstance(value, float | str) or value is None else type(value).__name__
            shown = "an integer of over 64 bits" if isinstance(value, int) and kind is int else shown
            raise DataError(
                f"{where} must be all integers 0..C-1 or all text, got {shown} at position {position}; "
                "fill or drop these examples"
            )
    return _text(values, where) if kind is str else np.asarray(values, np.int64)


def _text(values: list[Any], where: str) -> np.ndarray:
    """Labels as text; bytes are read as UTF-8."""
    found = []
    for position, value in enumerate(values):
        try:
            text = value.decode() if isinstance(value, bytes) else value
            text.encode()  # lone surrogates cannot be written to any file
        except UnicodeError as error:
            raise DataError(f"{where}: the label at position {position} is no UTF-8 text; write it anew") from error
        found.append(text)
    return np.asarray(found, dtype=str)


def _check_range(y: np.ndarray, classes: int, where: str) -> None:
    if y.dtype.kind == "U":
        raise DataError(f"{where} must be integers 0..{classes - 1}, got text such as {str(y[0])!r}")
    bad = np.flatnonzero((y < 0) | (y >= classes))
    if len(bad):
        raise DataError(f"{where} must be integers 0..{classes - 1}, got {y[bad[0]]} at position {bad[0]}")
