"""Parquet and Arrow tables -> stored inputs, labels and domains."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.core import DataError
from fedloom.data.images import Blob, channels_of, decode
from fedloom.data.labels import index_domains, index_labels
from fedloom.data.reading import FOLDERS, NO_DOMAINS, Reading
from fedloom.data.source import Source, assemble

LABEL_NAMES = ("label", "labels", "class", "target", "y")


@dataclass(frozen=True, eq=False)
class Table:
    """One split. data: a pyarrow table. features: column -> description as in the hub's metadata, may be empty.

    where: row -> words that name the row's origin in an error.
    """

    data: Any
    features: Mapping[str, Any]
    where: Callable[[int], str]

    @property
    def columns(self) -> list[str]:
        """Column names."""
        return list(self.data.column_names)

    def kind(self, column: str) -> str:
        """ "image", "class", "number" or "other"."""
        import pyarrow.types as types

        declared = self.features.get(column)
        declared = declared.get("_type", "") if isinstance(declared, Mapping) else ""
        kind = self.data.schema.field(column).type
        is_image_struct = types.is_struct(kind) and {"bytes", "path"} <= {f.name for f in kind}
        if declared == "Image" or is_image_struct or types.is_binary(kind) or types.is_large_binary(kind):
            return "image"
        if declared == "ClassLabel":
            return "class"
        is_number = types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)
        return "number" if is_number else "other"


def read_parquet(files: Sequence[Path]) -> Table:
    """Read parquet files of one split into one table. Raises `DataError` naming a corrupt file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    parts = []
    for path in files:
        try:
            parts.append(pq.read_table(path, partitioning=None))
        except (pa.ArrowException, OSError) as error:
            reason = str(error).splitlines()[0]
            raise DataError(f"parquet file '{path}' cannot be read ({reason}); fetch or write it again") from error
    different = next(
        (p for p, part in zip(files, parts, strict=True) if part.schema.names != parts[0].schema.names), None
    )
    if different is not None:
        raise DataError(f"parquet file '{different}' has other columns than '{files[0]}'; keep one data set per folder")
    ends = np.cumsum([len(part) for part in parts])

    def where(row: int) -> str:
        part = int(np.searchsorted(ends, row, side="right"))
        return f"row {row - (int(ends[part - 1]) if part else 0)} of '{files[part]}'"

    return Table(pa.concat_tables(parts, promote_options="permissive"), features_of(parts[0].schema.metadata), where)


def features_of(metadata: Mapping[bytes, bytes] | None) -> Mapping[str, Any]:
    """Feature descriptions that the `datasets` library keeps in a schema's metadata; empty without them."""
    try:
        return json.loads((metadata or {}).get(b"huggingface", b"{}"))["info"]["features"]
    except (KeyError, ValueError, TypeError):
        return {}


def split_files(files: Sequence[Path], base: Path) -> dict[str, list[Path]]:
    """Group parquet files by split: `train-00000-of-00001.parquet`, `train.parquet` or a folder `train/`."""
    known = ("train", *("test", "valid", "validation", "val", "dev"))
    found: dict[str, list[Path]] = {}
    for path in files:
        stem = re.sub(r"[-_.]?\d+(-of-\d+)?$", "", path.stem)
        folders = [p for p in path.relative_to(base).parts[:-1] if p in known]
        name = stem if stem in known or not folders else folders[-1]
        found.setdefault(name or "train", []).append(path)
    if not any(name in known for name in found):
        return {"train": sorted(files)}
    return {name: sorted(paths) for name, paths in found.items()}


def source_from_tables(name: str, tables: Mapping[str, Table], reading: Reading, **extra: Any) -> Source:
    """Decode the train and test tables of a data set.

    Raises `DataError` for a missing or ambiguous column, unreadable images, labels that are no class ids, and empty
    domain labels.
    """
    train_name, test_name = reading.splits(tables, f"data '{name}'")
    train = tables[train_name]
    test = tables[test_name] if test_name else None
    domain = _domain_column(name, train, reading.domain)
    label = _label_column(name, train, reading.label, domain)
    inputs = _input_columns(name, train, reading.image, (label, domain))
    splits = [train] if test is None else [train, test]
    for table in splits:
        _check_columns(name, table, [label, *inputs, *([domain] if domain else [])])
    xs = (
        _images(splits, inputs[0], reading)
        if train.kind(inputs[0]) == "image"
        else [_numbers(t, inputs) for t in splits]
    )
    *ys, class_names, notes = _ids(name, splits, label, "labels", index_labels)
    *ds, domain_names, more = _ids(name, splits, domain, "domain labels", index_domains) if domain else ((), [])
    parts = [tuple(column[i] for column in (xs, ys, ds) if column) for i in range(len(splits))]
    return assemble(
        name, parts[0], None if test is None else parts[1], class_names, domain_names=domain_names,
        test_fraction=reading.test_fraction, split_seed=reading.split_seed, notes=[*notes, *more], **extra,
    )  # fmt: skip


def _ids(name: str, tables: Sequence[Table], column: str, what: str, index: Callable[..., Any]) -> Any:
    """What `index`, one of `fedloom.data.labels`, makes of a column of all splits."""
    train = tables[0]
    names = train.features.get(column, {}).get("names") if train.kind(column) == "class" else None
    raw = [_values(name, t, column, what) for t in tables]
    return index(*raw, names=names, where=f"{what} '{column}' of data '{name}'")


def _check_columns(name: str, table: Table, wanted: Sequence[str]) -> None:
    if len(table.data) == 0:
        raise DataError(f"data '{name}' has an empty split; it needs at least one example")
    missing = [c for c in wanted if c not in table.columns]
    if missing:
        raise DataError(f"data '{name}' has no column '{missing[0]}'; its columns are: {', '.join(table.columns)}")


def _domain_column(name: str, table: Table, asked: str | None) -> str | None:
    if asked is None or asked == NO_DOMAINS:
        return None
    if asked == FOLDERS and asked not in table.columns:
        raise DataError(f"data.domain '{FOLDERS}' is for folder:PATH; data '{name}' has columns, so name one of them")
    if asked not in table.columns:
        raise DataError(
            f"data '{name}' has no domain column '{asked}'; set data.domain to '{NO_DOMAINS}' or to one of: "
            f"{', '.join(table.columns)}"
        )
    if table.kind(asked) == "image":
        raise DataError(f"column '{asked}' of data '{name}' holds images, no domains; name another with data.domain")
    return asked


def _label_column(name: str, table: Table, asked: str | None, domain: str | None) -> str:
    if asked is not None and asked == domain:
        raise DataError(f"data.label and data.domain are both '{asked}'; set data.domain to '{NO_DOMAINS}'")
    if asked is not None:
        if asked not in table.columns:
            raise DataError(
                f"data '{name}' has no label column '{asked}'; set data.label to one of: {', '.join(table.columns)}"
            )
        return asked
    classes = [c for c in table.columns if table.kind(c) == "class" and c != domain]
    classes = classes or [c for c in LABEL_NAMES if c in table.columns and c != domain][:1]
    if len(classes) != 1:
        what = "several label columns" if classes else "no label column"
        shown = ", ".join(classes or table.columns)
        raise DataError(f"data '{name}' has {what}; set data.label to one of: {shown}")
    return classes[0]


def _input_columns(name: str, table: Table, asked: str | None, taken: Sequence[str | None]) -> list[str]:
    if asked is not None:
        if asked not in table.columns:
            raise DataError(
                f"data '{name}' has no image column '{asked}'; set data.image to one of: {', '.join(table.columns)}"
            )
        if table.kind(asked) != "image":
            raise DataError(f"column '{asked}' of data '{name}' holds no images; name another with data.image")
        return [asked]
    images = [c for c in table.columns if table.kind(c) == "image"]
    if len(images) > 1:
        raise DataError(f"data '{name}' has several image columns; set data.image to one of: {', '.join(images)}")
    inputs = images or [c for c in table.columns if c not in taken and table.kind(c) == "number"]
    if not inputs:
        raise DataError(
            f"data '{name}' has no image column and no numeric columns; its columns are: {', '.join(table.columns)}"
        )
    return inputs


def _values(name: str, table: Table, column: str, what: str) -> np.ndarray:
    found = table.data.column(column)
    if found.null_count:
        raise DataError(f"column '{column}' of data '{name}' has {found.null_count} empty {what}; fill or drop them")
    return np.asarray(found.to_pylist()) if table.kind(column) == "other" else found.to_numpy()


def _numbers(table: Table, columns: Sequence[str]) -> np.ndarray:
    return np.stack([table.data.column(c).to_numpy().astype(np.float32) for c in columns], axis=1)


def _images(tables: Sequence[Table], column: str, reading: Reading) -> list[np.ndarray]:
    blobs = [_blobs(table, column) for table in tables]
    channels = max(channels_of(b, t.where) for b, t in zip(blobs, tables, strict=True))
    return [decode(b, channels, reading.image_size, t.where) for b, t in zip(blobs, tables, strict=True)]


def _blobs(table: Table, column: str) -> list[Blob]:
    values = table.data.column(column).to_pylist()

    def reader(row: int, value: Any) -> Blob:
        if isinstance(value, bytes):
            return lambda: value
        if isinstance(value, Mapping) and value.get("bytes") is not None:
            return lambda: value["bytes"]
        path = value.get("path") if isinstance(value, Mapping) else None
        if not path:
            raise DataError(f"{table.where(row)} has no image in column '{column}'; fill or drop it")
        return lambda: Path(path).read_bytes()

    return [reader(row, value) for row, value in enumerate(values)]
