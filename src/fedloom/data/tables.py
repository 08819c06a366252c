"""Parquet and Arrow tables -> stored inputs, labels and domains."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from string import ascii_uppercase
from typing import Any

import numpy as np

from fedloom.core import DataError
from fedloom.data.choices import Form, form_of, read_answers, read_questions
from fedloom.data.images import Blob, channels_of, decode
from fedloom.data.labels import index_domains, index_labels
from fedloom.data.reading import FOLDERS, NO_DOMAINS, Reading
from fedloom.data.source import Source, assemble
from fedloom.data.texts import checked_texts, text_source, without_rare

LABEL_NAMES = ("label", "labels", "class", "target", "y")
TEXT_NAME = "text"  # a column of that name is the input even where there are numbers


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
        """ "image", "class", "number", "text", "texts" (a list of them) or "other"."""
        import pyarrow.types as types

        declared = self.features.get(column)
        declared = declared.get("_type", "") if isinstance(declared, Mapping) else ""
        kind = self.data.schema.field(column).type
        is_image_struct = types.is_struct(kind) and {"bytes", "path"} <= {f.name for f in kind}
        if declared == "Image" or is_image_struct or types.is_binary(kind) or types.is_large_binary(kind):
            return "image"
        if declared == "ClassLabel":
            return "class"
        if types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind):
            return "number"
        if types.is_list(kind) or types.is_large_list(kind):
            return "texts" if _is_text(kind.value_type) else "other"
        return "text" if _is_text(kind) else "other"


def _is_text(kind: Any) -> bool:
    import pyarrow.types as types

    return types.is_string(kind) or types.is_large_string(kind)


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
    splits = [tables[split] for split in (train_name, test_name) if split]
    domain = _domain_column(name, splits[0], reading.domain)
    form = form_of(splits[0].columns) if reading.text.column is None and reading.image is None else None
    if form is not None:
        return _questions(name, splits, replace(form, answer=reading.label or form.answer), domain, reading, extra)
    label = _label_column(name, splits[0], reading.label, domain)
    inputs = _input_columns(name, splits[0], reading, (label, domain))
    for table in splits:
        _check_columns(name, table, [label, *inputs, *([domain] if domain else [])])
    *ys, class_names, notes = _ids(name, splits, label, "labels", index_labels)
    *ds, domain_names, more = _ids(name, splits, domain, "domain labels", index_domains) if domain else ((), [])
    about = {
        "domain_names": domain_names,
        "test_fraction": reading.test_fraction,
        "split_seed": reading.split_seed,
        "notes": [*notes, *more],
    }
    where = [table.where for table in splits]
    kind = splits[0].kind(inputs[0])
    if kind == "text":
        xs = [checked_texts(t.data.column(inputs[0]).to_pylist(), f"column '{inputs[0]}'", t.where) for t in splits]
        return text_source(name, _joined(xs, ys, ds), class_names, reading.text, where=where, **about, **extra)
    arrays = _images(splits, inputs[0], reading) if kind == "image" else [_numbers(t, inputs) for t in splits]
    train, test = [*_joined(arrays, ys, ds), None][:2]
    return assemble(name, train, test, class_names, **about, **extra)


def _joined(*columns: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Per split, what the columns that there are hold of it."""
    return list(zip(*(column for column in columns if column), strict=False))


def _questions(
    name: str, splits: Sequence[Table], form: Form, domain: str | None, reading: Reading, extra: Mapping[str, Any]
) -> Source:
    wanted = [*form.context_columns, form.choices, form.answer, *([domain] if domain else [])]
    for table in splits:
        _check_columns(name, table, wanted)
    where = [table.where for table in splits]
    columns = [{c: table.data.column(c).to_pylist() for c in wanted} for table in splits]
    raw = [read_questions(c, form, w) for c, w in zip(columns, where, strict=True)]
    count = len(raw[0][0].options)
    if (other := next((r for r in raw if len(r[0].options) != count), None)) is not None:
        raise DataError(f"data '{name}' has questions of {count} options and of {len(other[0].options)}; drop some")
    ys = [read_answers(c[form.answer], count, form.answer, w) for c, w in zip(columns, where, strict=True)]
    ds, domain_names, notes = [], (), []
    if domain:
        labels, notes = without_rare([_texts_of(name, t, domain) for t in splits])
        *ds, domain_names, more = index_domains(*labels, where=f"domain labels '{domain}' of data '{name}'")
        notes += more
    return text_source(
        name, _joined(raw, ys, ds), ascii_uppercase[:count], reading.text, where=where, domain_names=domain_names,
        test_fraction=reading.test_fraction, split_seed=reading.split_seed, notes=notes, prompt=form.prompt, **extra,
    )  # fmt: skip


def _texts_of(name: str, table: Table, column: str) -> list[str]:
    """Domain labels as texts, those of a class column by the class names."""
    names = table.features.get(column, {}).get("names") if table.kind(column) == "class" else None
    values = _values(name, table, column, "domain labels").tolist()
    return [str(value) if names is None else str(names[value]) for value in values]


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


def _input_columns(name: str, table: Table, reading: Reading, taken: Sequence[str | None]) -> list[str]:
    """One image column, one text column, or numeric columns, in this order of what is looked for."""
    for key, kind, asked in (("image", "image", reading.image), ("text", "text", reading.text.column)):
        if asked is not None:
            return [_asked(name, table, asked, key, kind)]
    free = [c for c in table.columns if c not in taken]
    images, texts, numbers = ([c for c in free if table.kind(c) == kind] for kind in ("image", "text", "number"))
    if TEXT_NAME in texts:
        texts = [TEXT_NAME]
    elif numbers:
        texts = []
    for key, found in (("image", images), ("text", texts)):
        if len(found) > 1:
            raise DataError(f"data '{name}' has several {key} columns; set data.{key} to one of: {', '.join(found)}")
        if found:
            return found
    if not numbers:
        raise DataError(
            f"data '{name}' has no image column, no text column and no numeric columns; its columns are: "
            f"{', '.join(table.columns)}"
        )
    return numbers


def _asked(name: str, table: Table, column: str, key: str, kind: str) -> str:
    if column not in table.columns:
        raise DataError(
            f"data '{name}' has no {key} column '{column}'; set data.{key} to one of: {', '.join(table.columns)}"
        )
    if table.kind(column) != kind:
        raise DataError(f"column '{column}' of data '{name}' holds no {key}s; name another with data.{key}")
    return column


def _values(name: str, table: Table, column: str, what: str) -> np.ndarray:
    found = table.data.column(column)
    if found.null_count:
        raise DataError(f"column '{column}' of data '{name}' has {found.null_count} empty {what}; fill or drop them")
    return np.asarray(found.to_pylist()) if table.kind(column) in ("text", "texts", "other") else found.to_numpy()


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
