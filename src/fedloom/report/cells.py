"""Tables whose cells are drawn: bars for one number a row, shades for many. Texts are escaped by the page's template.

What a method tells about a run (`fedloom.core.table.Table`), and the accuracies per domain.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fedloom.core.errors import PayloadError
from fedloom.core.table import Table
from fedloom.report.record import Row, RunRecord, number
from fedloom.report.tables import has_own_views
from fedloom.report.units import NONE, decimal, percent, points

MOST = 40  # rows and columns that are drawn


class Cell(NamedTuple):
    """Text, and in [0, 1] how long its bar or how strong its shade is; None for neither."""

    text: str
    share: float | None = None

    @property
    def ink(self) -> str:
        """The share as CSS takes it."""
        return "" if self.share is None else f"{min(1.0, max(0.0, self.share)):.3f}"


class Cells(NamedTuple):
    """A table of drawn cells. kind: "bars" or "heat". rows: a label and its cells."""

    title: str
    kind: str
    head: Sequence[str]
    rows: Sequence[tuple[str, Sequence[Cell]]]
    note: str = ""

    @property
    def wide(self) -> bool:
        """Whether it takes the page's width."""
        return len(self.head) > 11


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
    """What the method tells of this run, and a sentence where a part of it cannot be read."""
    tables, damaged = read_tables(record.facts)
    found = [_drawn(table, record) for table in tables if table.rows and table.columns]
    if damaged:
        many = f"{damaged} table{'s' * (damaged > 1)} of facts.json cannot be read."
        found.append(Cells("What the method tells", "bars", [""], [], many))
    return found


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
    rows, columns = (_order(axis, ids, record) for axis, ids in zip(table.axes, _labels(table), strict=True))
    values = [[table.values[r][c] for c in columns] for r in rows]
    names = [_name(table.axes[0], table.rows[r], record, whose=True) for r in rows]
    heads = [_name(table.axes[1], table.columns[c], record) for c in columns]
    known = [v for row in values for v in row if v is not None]
    low, high = min(known, default=0.0), max(known, default=1.0)
    notes = [table.note] if table.note else []
    if len(table.columns) == 1:
        fractions = low >= 0 and high <= 1
        cells = [[_bar(v, max(1.0, high), fractions=fractions) for v in row] for row in values]
    else:
        cells = [[_shade(v, low, high) for v in row] for row in values]
        notes.append(f"Faintest: {low:.2f}, strongest: {high:.2f}.")
    notes += [
        f"{len(shown)} of {len(labels)} {axis or 'label'}s are shown, at even distances."
        for axis, labels, shown in zip(table.axes, _labels(table), (rows, columns), strict=True)
        if len(shown) < len(labels)
    ][:1]
    kind = "bars" if len(table.columns) == 1 else "heat"
    corner = " \\ ".join(dict.fromkeys(axis for axis in table.axes if axis))
    return Cells(table.title, kind, [corner, *heads], list(zip(names, cells, strict=True)), " ".join(notes))


def _labels(table: Table) -> tuple[Sequence[str | int], Sequence[str | int]]:
    return table.rows, table.columns


def _order(axis: str, labels: Sequence[str | int], record: RunRecord) -> list[int]:
    """Positions of what is drawn: clients side by side with others of the same domain, at most `MOST`."""
    places = list(range(len(labels)))
    if axis == "client":
        domains = record.main_domains
        places.sort(key=lambda k: domains.get(str(labels[k]), -1))
    return places if len(places) <= MOST else [places[k * len(places) // MOST] for k in range(MOST)]


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


def _shade(value: float | None, low: float, high: float) -> Cell:
    """The faintest shade is a tenth."""
    if value is None:
        return Cell(NONE)
    strength = (value - low) / (high - low) if high > low else 1.0
    return Cell(f"{value:.2f}".replace("-", "−"), 0.1 + 0.9 * strength)
