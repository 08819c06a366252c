"""The user's own arrays, tensors and torch datasets -> a source. Nothing is written and nothing is fetched."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedloom.core import DataError
from fedloom.core.errors import origin
from fedloom.data.labels import index_domains, index_labels
from fedloom.data.reading import TextReading
from fedloom.data.source import Source, assemble
from fedloom.data.texts import checked_texts, text_source

CHANNELS = (1, 3, 4)
SPLITS = ("train", "test")
FORMS = {  # number of arrays -> what they are
    2: ("x", "y"),
    3: ("x", "y", "domain"),
    4: ("x_train", "y_train", "x_test", "y_test"),
    6: ("x_train", "y_train", "domain_train", "x_test", "y_test", "domain_test"),
}


def from_arrays(
    data: Any,
    *,
    name: str = "arrays",
    class_names: Sequence[str] | None = None,
    test_fraction: float = 0.2,
    split_seed: int = 0,
    cache: Path | None = None,
    text: TextReading | None = None,
) -> Source:
    """Build a source from `(x, y)`, `(x_train, y_train, x_test, y_test)`, a torch dataset or a pair of them.

    With domains: `(x, y, domain)` or `(x_train, y_train, domain_train, x_test, y_test, domain_test)`.
    x: [n, ...] arrays or tensors. Images are [n, channels, height, width], [n, height, width] (grey) or
    [n, height, width, channels]; 8-bit images are normalised by statistics of the train split, floats are used
    as they are. Texts are a list or an array [n] of str; text: how they are read.
    y: [n] integers or text; other values than 0..C-1 are re-indexed with a note. domain: [n] integers or text, the
    domains' names.
    Raises `DataError` in words that name the part and the mend.
    """
    parts = _parts(data)
    _check_scalars(data, parts)
    if not all(len(part) for part in parts):
        raise DataError("data: the arrays are empty; give at least one example per split")
    width = 3 if len(parts) in (3, 6) else 2
    columns = [parts[k::width] for k in range(width)]
    _check_lengths(columns)
    notes: list[str] = []
    words = [_is_text(x) for x in columns[0]]
    if any(words) and not all(words):
        raise DataError("data: one split holds texts and the other does not; give both the same kind")
    xs: list[Any] = [_texts(*split) for split in zip(SPLITS, columns[0], strict=False)] if all(words) else []
    xs = xs or _inputs(columns[0], notes)
    *ys, names, changed = index_labels(*columns[1], names=class_names)
    *ds, domains, more = index_domains(*columns[2]) if width == 3 else ((), [])
    splits = [tuple(column[i] for column in (xs, ys, ds) if column) for i in range(len(xs))]
    about = {
        "domain_names": domains, "test_fraction": test_fraction, "split_seed": split_seed,
        "notes": (*dict.fromkeys(notes), *changed, *more), "cache": cache,
    }  # fmt: skip
    if all(words):
        where = [partial(_place, split) for split in SPLITS]
        return text_source(name, splits, names, text or TextReading(), where=where, **about)
    return assemble(name, splits[0], splits[1] if len(splits) > 1 else None, names, **about)


def _is_text(x: np.ndarray) -> bool:
    return x.ndim == 1 and (x.dtype.kind == "U" or (x.dtype.kind == "O" and any(isinstance(v, str) for v in x)))


def _place(split: str, row: int) -> str:
    return f"data: example {row} of the {split} split"


def _texts(split: str, x: np.ndarray) -> list[str]:
    return checked_texts(x.tolist(), "x", partial(_place, split))


def _check_lengths(columns: Sequence[Sequence[np.ndarray]]) -> None:
    for values, what in zip(columns[1:], ("labels", "domain labels"), strict=False):
        for x, ids, split in zip(columns[0], values, ("train", "test"), strict=False):
            if len(x) != len(ids):
                raise DataError(f"data: the {split} split has {len(x)} inputs but {len(ids)} {what}; make them equal")


def _check_scalars(data: Any, parts: Sequence[np.ndarray]) -> None:
    names = FORMS[len(parts)]
    for name, part in zip(names, parts, strict=True):
        if part.ndim == 0:
            given = data if not isinstance(data, tuple | list) else data[names.index(name)]
            raise DataError(f"data: {name} must be an array of examples, got a single {type(given).__name__}")


def _parts(data: Any) -> list[Any]:
    if _is_dataset(data):
        return list(_stack(data))
    if isinstance(data, tuple | list) and len(data) == 2 and all(_is_dataset(d) for d in data):
        return [part for d in data for part in _stack(d)]
    if isinstance(data, tuple | list) and len(data) in FORMS:
        return [_array(part) for part in data]
    raise DataError(
        "data must be (x, y), (x_train, y_train, x_test, y_test), either with domain after y, a torch dataset or a "
        "(train, test) pair of them, "
        f"got {type(data).__name__}" + (f" of length {len(data)}" if isinstance(data, tuple | list) else "")
    )


def _is_dataset(value: Any) -> bool:
    return isinstance(value, torch.utils.data.Dataset)


def _stack(dataset: Any) -> tuple[np.ndarray, np.ndarray]:
    if isinstance(dataset, torch.utils.data.IterableDataset) or not hasattr(dataset, "__len__"):
        raise DataError(f"data: {type(dataset).__name__} has no length; pass a map-style dataset or arrays")
    pairs = _read(dataset)
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
    return np.stack(xs), np.asarray([_label(y, i, dataset) for i, (_, y) in enumerate(pairs)])


def _read(dataset: Any) -> list[Any]:
    """Every example; what the user's own code raises is told with the example's number."""
    i = -1
    try:
        length = len(dataset)
        if length < 0:
            raise ValueError("its length is negative")
        pairs = []
        for i in range(length):
            pairs.append(dataset[i])
    except Exception as error:
        what = f"example {i}" if i >= 0 else "the length"
        cause = f"{type(error).__name__}: {error} {origin(error, own=False)}".strip()
        raise DataError(f"data: {what} of {type(dataset).__name__} cannot be read ({cause}); mend it") from error
    return pairs


def _label(y: Any, i: int, dataset: Any) -> Any:
    if isinstance(y, str | bytes):
        return y
    found = _array(y)
    if found.size != 1:
        raise DataError(
            f"data: example {i} of {type(dataset).__name__} has a label of shape {found.shape}, which must be one "
            "class; for one-hot rows return the index of the one"
        )
    return found.item()


def _array(value: Any) -> np.ndarray:
    if isinstance(value, torch.Tensor) and (value.is_meta or value.layout is not torch.strided or value.is_quantized):
        raise DataError("data: a tensor is sparse, quantised or on the device meta; pass a dense one (x.to_dense())")
    try:
        if isinstance(value, list | tuple) and value and all(isinstance(v, str) for v in value):
            return np.asarray(value, object)  # a text array would give every text the room of the longest
        if not isinstance(value, torch.Tensor):
            return np.asarray(value)
        value = value.detach().cpu().resolve_conj().resolve_neg()
        return (value.float() if value.dtype in (torch.bfloat16, torch.float16) else value).numpy()
    except (ValueError, TypeError, RuntimeError) as error:
        raise DataError(f"data: cannot make an array of {type(value).__name__} ({error})") from error


def _inputs(splits: Sequence[np.ndarray], notes: list[str]) -> list[np.ndarray]:
    """Stored inputs of all splits, which are of one kind: 8-bit or float."""
    for x in splits:
        if x.dtype.kind not in "fiub":
            raise DataError(f"data: inputs must be numbers or texts, got dtype {x.dtype}")
        if x.ndim < 2:
            raise DataError(f"data: inputs must be [n, features] or images, got shape {x.shape}; use x.reshape(-1, 1)")
        if not x.size:
            raise DataError(f"data: inputs have shape {x.shape}, which holds no value; give each at least one")
    if len({x.dtype.kind == "f" for x in splits}) > 1:
        raise DataError(
            f"data: train inputs are {splits[0].dtype} and test inputs {splits[1].dtype}; whole numbers are scaled by "
            "255 as 8-bit images and floats are used as they are, so give both the same dtype"
        )
    eight = _eight_bits(splits, notes)
    return [_arranged(x.astype(np.uint8) if eight else x, notes) for x in splits]


def _eight_bits(splits: Sequence[np.ndarray], notes: list[str]) -> bool:
    """Whether the inputs of all splits are stored as uint8."""
    if all(x.dtype == np.uint8 for x in splits):
        return True
    if any(x.dtype.kind not in "iu" or x.ndim < 3 or x.min() < 0 or x.max() > 255 for x in splits):
        return False
    wide = next(x.dtype for x in splits if x.dtype != np.uint8)
    notes.append(f"images of dtype {wide} were stored as 8 bits")
    return True


def _arranged(x: np.ndarray, notes: list[str]) -> np.ndarray:
    """Inputs as [n, channels, height, width] or vectors, uint8 or float32."""
    if x.ndim == 3:
        notes.append(f"inputs of shape [n, {x.shape[1]}, {x.shape[2]}] were taken as grey images")
        x = x[:, None]
    elif x.ndim == 4 and x.shape[1] not in CHANNELS and x.shape[3] in CHANNELS:
        notes.append("images were turned from [n, height, width, channels] to [n, channels, height, width]")
        x = x.transpose(0, 3, 1, 2)
    with np.errstate(over="ignore"):  # what 32 bits cannot hold becomes infinite, which is refused in words
        return np.ascontiguousarray(x if x.dtype == np.uint8 else x.astype(np.float32))
