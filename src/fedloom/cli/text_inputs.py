"""Files of texts and of questions that `predict` reads."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedloom.core.errors import DataError

if TYPE_CHECKING:
    from fedloom.data.text import Text

FORMATS = (".txt", ".csv", ".jsonl", ".parquet")
LONGEST = 2**31 - 1  # characters of a field of a .csv file
SHOWN = 40  # characters of an input that stand for it


def read_texts(path: Path, text: Text, options: int) -> tuple[list[str], list[Any]]:
    """(label, input) of every text, or question with its options, of a file. `DataError` says what is wrong.

    text: what the model reads. options: of each of its questions.
    """
    from fedloom.data.choices import FORMS, form_of, read_questions
    from fedloom.data.texts import checked_texts

    def where(row: int) -> str:
        return f"row {row} of '{path}'"

    columns = _columns(path)
    if text.kind == "tokens":
        if "text" not in columns:
            raise DataError(f"--input '{path}' has no column 'text'; its columns are: {', '.join(columns)}")
        found: list[Any] = checked_texts(columns["text"], "column 'text'", where)
        return [_short(value) for value in found], found
    form = form_of([*columns])
    if form is None:
        forms = " or ".join(", ".join([*f.context_columns, f.choices]) for f in FORMS)
        raise DataError(f"--input '{path}' needs the columns {forms}; its columns are: {', '.join(columns)}")
    found = read_questions(columns, form, where)
    if len(found[0].options) != options:
        raise DataError(f"--input '{path}' has questions of {len(found[0].options)} options, the model needs {options}")
    return [_short(question.context) for question in found], found


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= SHOWN else f"{line[: SHOWN - 3]}..."


def _columns(path: Path) -> dict[str, Sequence[Any]]:
    """Column name -> values; the lines of a .txt file are the column `text`."""
    suffix = path.suffix.lower()
    if suffix not in FORMATS:
        raise DataError(f"--input '{str(path)[:200]}' must end in {', '.join(FORMATS)}, for the model reads texts")
    try:
        found = _parquet(path) if suffix == ".parquet" else _lines(path, suffix)
    except (OSError, ValueError, csv.Error, RecursionError) as error:
        raise DataError(f"--input '{path}' cannot be read ({str(error).splitlines()[0]})") from error
    if not found or not len(next(iter(found.values()))):
        raise DataError(f"--input '{path}' holds no texts")
    return found


def _parquet(path: Path) -> dict[str, Sequence[Any]]:
    import pyarrow.parquet as pq

    table = pq.read_table(path, partitioning=None)
    return {name: table.column(name).to_pylist() for name in table.column_names}


def _lines(path: Path, suffix: str) -> dict[str, Sequence[Any]]:
    with open(path, newline="" if suffix == ".csv" else None, encoding="utf-8-sig") as file:
        if suffix == ".txt":
            return {"text": [line.removesuffix("\n") for line in file]}
        rows = _csv_rows(file) if suffix == ".csv" else [json.loads(line) for line in file if line.strip()]
    if not all(isinstance(row, dict) for row in rows):
        raise ValueError("every line must be an object with names and values")
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def _csv_rows(file: Iterable[str]) -> list[dict[str, Any]]:
    before = csv.field_size_limit(LONGEST)
    try:
        rows: list[dict[Any, Any]] = list(csv.DictReader(file))
    finally:
        csv.field_size_limit(before)
    for number, row in enumerate(rows):
        if None in row:
            raise ValueError(f"row {number} has more fields than the header; put texts with commas into quotes")
    return rows
