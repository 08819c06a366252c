"""Tables whose cells are drawn: bars for one number a row, shades for many. Texts are escaped by the page's template.

What a method tells about a run (`fedloom.core.table.Table`), and the accuracies per domain.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from fedloom.core.errors import PayloadError
from fedloom.core.table import Table
from fedloom.report.record import Row, RunRecord, number
from fedloom.report.tables import has_own_views
from fedloom.report.units import NONE, decimal, percent, points

MOST = 40  # rows and columns that are drawn
MOST_MAPS = 12  # tables of a group that are drawn
HALF = 62


class Grid(NamedTuple):
    """A table of texts: header cells and rows of cells; the first column is a label."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


class Cell(NamedTuple):
    """Text, and in [0, 1] how long its bar or how strong its shade is; None for neither.

    low, high: ends of an interval around the end of the bar, on the same scale.
    """

    text: str
    share: float | None = None
    low: float | None = None
    high: float | None = None

    @property
    def style(self) -> str:
        """The shares as CSS takes them."""
        named = {"--v": self.share, "--low": self.low, "--high": self.high}
        return ";".join(f"{k}:{min(1.0, max(0.0, v)):.3f}" for k, v in named.items() if v is not None)


class Cells(NamedTuple):
    """A table of drawn cells. kind: "bars", "bars intervals" or "heat". rows: a label and its cells."""

    title: str
    kind: str
    head: Sequence[str]
    rows: Sequence[tuple[str, Sequence[Cell]]]
    note: str = ""

    @property
    def wide(self) -> bool:
        """Whether it takes the page's width: half of it has room for about `HALF` characters."""
        labels = max((len(label) for label, _ in self.rows), default=0)
        words = (max(map(len, head.split()), default=0) for head in self.head[1:])
        return self.kind.endswith("intervals") or min(labels, 24) + sum(max(6, word) + 2 for word in words) > HALF


class Maps(NamedTuple):
    """Small heat maps of one kind, whose shades have one scale.

    told: whether their cells show their texts, which otherwise are for the pointer.
    """

    title: str
    maps: Sequence[Cells]
    note: str = ""
    told: bool = False


def read_tables(facts: Mapping[str, Any]) -> tuple[list[Table], int]:
    """The tables of facts.json, and how many entries are none."""
    entries = facts.get("tables", [])
    found, damaged = [], 0
    for entry in entries if isinstance(entries, list) else [{}]:
        try:
            found.append(Table(**entry))
        except (TypeError, OverflowError, PayloadError):
            damaged += 1
    return found, damaged


def fact_cells(record: RunRecord) -> list[Cells]:
    """Tables of their own that the method tells, and a sentence where a part of it cannot be read."""
    tables, damaged = read_tables(record.facts)
    found = [_drawn(table, record) for table in tables if table.rows and table.columns and not table.group]
    if damaged:
        many = f"{damaged} table{'s' * (damaged > 1)} of facts.json cannot be read."
        found.append(Cells("What the method tells", "bars", [""], [], many))
    return found


def fact_groups(record: RunRecord) -> list[Maps]:
    """Tables that the method tells in groups; of a large group some at even distances."""
    groups: dict[str, list[Table]] = {}
    for table in read_tables(record.facts)[0]:
        if table.rows and table.columns and table.group:
            groups.setdefault(table.group, []).append(table)
    return [_group(title, tables, record) for title, tables in groups.items()]


def _group(title: str, tables: Sequence[Table], record: RunRecord) -> Maps:
    shown = [tables[k] for k in _evenly(range(len(tables)), MOST_MAPS)]
    low, high = _range([value for table in shown for row in table.values for value in row])
    maps = []
    notes = dict.fromkeys([_axes(*shown[0].axes)])
    for table in shown:
        rows, columns = _shown(table, record)
        cells = [[_shade(table.values[r][c], low, high, decimal) for c in columns] for r in rows]
        maps.append(_labelled(table, record, "heat", cells, table.title.removeprefix(f"{title}, "), ""))
        notes |= dict.fromkeys((table.note, _left_out(table)))
    scale = f"Faintest: {decimal(low)}, strongest: {decimal(high)}; a cell tells its value to the pointer."
    fewer = f"{len(shown)} of {len(tables)} tables are shown, at even distances." if len(shown) < len(tables) else ""
    return Maps(title, maps, " ".join(filter(None, (*notes, scale, fewer))))


def _axes(row: str, column: str) -> str:
    """What a row and a column stand for, in a sentence."""
    told = ", ".join(f"a {what} per {axis}" for what, axis in (("row", row), ("column", column)) if axis)
    return f"{told.capitalize()}." if told else ""


def domain_accuracies(summary: Row) -> dict[str, dict[str, float | None]]:
    """The fields of a summary that map domains to accuracies, as far as they do."""
    found = {key: summary.get(key) for key in ("domain_accuracy", "personal_domain_accuracy")}
    return {
        key: {str(name): number(values, name) for name in values}
        for key, values in found.items()
        if isinstance(values, Mapping) and values
    }


def domain_cells(record: RunRecord) -> Cells | None:
    """Accuracy per domain at the end, of the global view and, where they differ, of the clients' own."""
    known = domain_accuracies(record.summary)
    if "domain_accuracy" not in known:
        return None
    if not has_own_views(known):
        known.pop("personal_domain_accuracy", None)
    names = {key: "own views" if key.startswith("personal") else "global view" for key in known}
    domains = dict.fromkeys(domain for values in known.values() for domain in values)
    rows = [(d, [_bar(values.get(d), 1.0, fractions=True) for values in known.values()]) for d in domains]
    notes = [f"{name.capitalize()}: {_spread(record, key)}." for key, name in names.items()]
    if len(known) > 1:
        notes.append("The own views of a domain are averaged over the clients that hold it.")
    return Cells("Accuracy per domain", "bars", ["domain", *names.values()], rows, " ".join(notes))


def _spread(record: RunRecord, key: str) -> str:
    prefix = key.removesuffix("domain_accuracy")
    mean, std, worst = (number(record.summary, f"{prefix}domain_{k}") for k in ("mean", "std", "worst"))
    return f"mean {percent(mean)}, deviation (ddof 0) {points(std)}, worst {percent(worst)}"


def _drawn(table: Table, record: RunRecord) -> Cells:
    rows, columns = _shown(table, record)
    values = [[table.values[r][c] for c in columns] for r in rows]
    low, high = _range([value for row in values for value in row])
    single = len(table.columns) == 1
    if single:
        fractions = low >= 0 and high <= 1
        cells = [[_bar(v, max(1.0, high), fractions=fractions) for v in row] for row in values]
    else:
        cells = [[_shade(v, low, high, _hundredths) for v in row] for row in values]
    scale = "" if single else f"Faintest: {low:.2f}, strongest: {high:.2f}."
    note = " ".join(filter(None, (table.note, scale, _left_out(table))))
    return _labelled(table, record, "bars" if single else "heat", cells, table.title, note)


def _labelled(
    table: Table, record: RunRecord, kind: str, cells: Sequence[Sequence[Cell]], title: str, note: str
) -> Cells:
    """The cells with the names of their rows and columns."""
    rows, columns = _shown(table, record)
    names = [_name(table.axes[0], table.rows[r], record, whose=True) for r in rows]
    heads = [_name(table.axes[1], table.columns[c], record) for c in columns]
    corner = " \\ ".join(dict.fromkeys(axis for axis in table.axes if axis))
    return Cells(title, kind, [corner, *heads], list(zip(names, cells, strict=True)), note)


def _range(values: Sequence[float | None]) -> tuple[float, float]:
    known = [value for value in values if value is not None]
    return min(known, default=0.0), max(known, default=1.0)


def _shown(table: Table, record: RunRecord) -> tuple[Sequence[int], Sequence[int]]:
    """Positions of the rows and of the columns that are drawn: clients side by side with others of the same domain."""
    rows, columns = (_order(axis, ids, record) for axis, ids in zip(table.axes, _labels(table), strict=True))
    return _evenly(rows, MOST), _evenly(columns, MOST)


def _left_out(table: Table) -> str:
    """A sentence where not every row, or else not every column, is drawn."""
    sizes = ((axis, len(labels)) for axis, labels in zip(table.axes, _labels(table), strict=True))
    told = [f"{MOST} of {n} {axis or 'label'}s are shown, at even distances." for axis, n in sizes if n > MOST]
    return told[0] if told else ""


def _labels(table: Table) -> tuple[Sequence[str | int], Sequence[str | int]]:
    return table.rows, table.columns


def _order(axis: str, labels: Sequence[str | int], record: RunRecord) -> list[int]:
    places = list(range(len(labels)))
    if axis == "client":
        domains = record.main_domains
        places.sort(key=lambda k: domains.get(str(labels[k]), -1))
    return places


def _evenly(places: Sequence[int], most: int) -> Sequence[int]:
    """All of them, or `most` at even distances."""
    return places if len(places) <= most else [places[k * len(places) // most] for k in range(most)]


def _name(axis: str, label: str | int, record: RunRecord, *, whose: bool = False) -> str:
    """A label as people read it; whose: with the domain of which a client holds most."""
    names = record.domain_names
    if axis == "domain" and isinstance(label, int) and 0 <= label < len(names):
        return names[label]
    domain = record.main_domains.get(str(label)) if axis == "client" and whose else None
    text = label if isinstance(label, str) else json.dumps(label)
    return f"{text} · {names[domain]}" if domain is not None and domain < len(names) else text


def _bar(value: float | None, most: float, *, fractions: bool) -> Cell:
    if value is None:
        return Cell(NONE)
    return Cell(percent(value) if fractions else decimal(value), value / most)


def _shade(value: float | None, low: float, high: float, write: Callable[[float], str]) -> Cell:
    """The faintest shade is a tenth."""
    if value is None:
        return Cell(NONE)
    strength = (value - low) / (high - low) if high > low else 1.0
    return Cell(write(value).replace("-", "−"), 0.1 + 0.9 * strength)


def _hundredths(value: float) -> str:
    return f"{value:.2f}"
