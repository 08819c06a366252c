"""Tables that are as narrow as can be: heads on several lines, and parts where a table is wider than its place."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

HEAD_WIDTH = 11  # characters to which heads are wrapped, where the cells below are not wider
GAP = 3  # characters between columns


def aligned(cells: Sequence[Sequence[str]], names: int = 1) -> list[str]:
    """Lines of a plain table, the first row its heads, wrapped. names: columns that stand to the left."""
    heads, widths = layout(cells)
    tall = max(map(len, heads))
    lines = [[(*[""] * (tall - len(head)), *head)[k] for head in heads] for k in range(tall)]

    def line(row: Sequence[str]) -> str:
        padded = [f"{cell:<{width}}" for cell, width in zip(row[:names], widths[:names], strict=True)]
        padded += [f"{cell:>{width}}" for cell, width in zip(row[names:], widths[names:], strict=True)]
        return "  ".join(padded).rstrip()

    return [*map(line, lines), *map(line, cells[1:])]


def layout(table: Sequence[Sequence[str]]) -> tuple[list[list[str]], list[int]]:
    """Heads as lines, and the width of each column: that of its cells, or where they are narrow of its head."""
    cells = [max(map(len, column)) for column in zip(*table[1:], strict=True)]
    heads = [
        textwrap.wrap(head, max(width, HEAD_WIDTH), break_long_words=False, break_on_hyphens=False)
        for head, width in zip(table[0], cells, strict=True)
    ]
    return heads, [max(width, *map(len, lines)) for width, lines in zip(cells, heads, strict=True)]


def parts(cells: Sequence[Sequence[str]], width: int) -> list[list[int]]:
    """Columns, without the first, which is repeated, of each of the tables that fit that many characters."""
    taken = [size + GAP for size in layout(cells)[1]]
    found: list[list[int]] = []
    for k in range(1, len(taken)):
        if not found or taken[0] + sum(taken[j] for j in found[-1]) + taken[k] > width:
            found.append([])
        found[-1].append(k)
    return found


def fitted(whole: Sequence[Sequence[str]], width: int) -> list[Table]:
    """Rich tables for a terminal of that width: one, or as many as it takes, each with the labels again."""
    return [_table([[row[0], *(row[k] for k in part)] for row in whole]) for part in parts(whole, width)]


def _table(cells: Sequence[Sequence[str]]) -> Table:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD)
    for k, (lines, width) in enumerate(zip(*layout(cells), strict=True)):
        head = escape("\n".join(lines))
        made.add_column(head, justify="right" if k else "left", vertical="bottom", min_width=width, overflow="fold")
    for row in cells[1:]:
        made.add_row(*map(escape, row))
    return made
