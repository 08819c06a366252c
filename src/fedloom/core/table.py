"""Numbers that a method tells about a finished run, for the record of the run and its report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fedloom.core.errors import PayloadError


@dataclass(frozen=True)
class Table:
    """Numbers by row and column, drawn as bars where there is one column and as a heat map where there are more.

    title: what the numbers are. axes: what a row and a column stand for; labels of a "client" and a "domain" are ids,
    to which the report gives names. rows, columns: labels. values: a list per row of a number per column, None where
    there is no number. note: what one has to know to read them. group: tables of one group (the layers of a network,
    say) are drawn side by side as small heat maps with one scale, under the group's name; one whose title begins with
    that name, a comma and a space is called by the rest. Empty for a table of its own.

    Raises `PayloadError`, naming the table, for values that do not fit the labels or are not finite.
    """

    title: str
    axes: tuple[str, str]
    rows: Sequence[str | int]
    columns: Sequence[str | int]
    values: Sequence[Sequence[float | None]]
    note: str = ""
    group: str = ""

    def __post_init__(self) -> None:
        lists = (self.axes, self.rows, self.columns, self.values, *self.values)
        if not all(isinstance(found, list | tuple) for found in lists) or len(self.axes) != 2:
            raise PayloadError(f"the table '{self.title}' must hold two axes and lists of labels and values")
        texts = all(isinstance(text, str) for text in (self.title, self.note, self.group, *self.axes))
        if not texts or not all(isinstance(label, str | int) for label in (*self.rows, *self.columns)):
            raise PayloadError(
                f"the table '{self.title}' must have texts for its words and texts or ids for its labels"
            )
        shape, wanted = [len(row) for row in self.values], [len(self.columns)] * len(self.rows)
        if shape != wanted:
            raise PayloadError(f"the table '{self.title}' has rows of {shape} values where its labels ask for {wanted}")
        for row in self.values:
            if any(value is not None and not _is_finite(value) for value in row):
                raise PayloadError(f"the table '{self.title}' must hold finite numbers or None, got {list(row)}")


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
