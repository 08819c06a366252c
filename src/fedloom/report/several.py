"""What a page shows of several groups of runs: results with intervals, all numbers, matrices, settings, data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from fedloom.evaluate.comparison import pooled
from fedloom.evaluate.statistics import Interval
from fedloom.report import costs, overlays
from fedloom.report.cells import MOST_MAPS, Cell, Cells, Grid, Maps, domain_accuracies
from fedloom.report.groups import Group, settings
from fedloom.report.record import Matrix, Row, RunRecord, number
from fedloom.report.svg import legend, picture
from fedloom.report.tables import COSTS, OWN_VIEWS, RESULTS, TROUBLE, Format, flat, results
from fedloom.report.units import NONE, count

BARS = (
    "final_accuracy",
    "average_incremental_accuracy",
    "forgetting",
    "per_client_accuracy_mean",
    "per_client_accuracy_worst10",
    "domain_mean",
    "domain_worst",
)
TOLD = 12  # tasks up to which the cells of a matrix show their numbers
MOST_DATA = 6  # pictures of data


class Data(NamedTuple):
    """A picture of the data that some runs share: whose it is, and one of these runs."""

    title: str
    record: RunRecord


def view(groups: Sequence[Group]) -> dict[str, Any]:
    """Everything that the template shows of several groups."""
    curves = overlays.pictures(groups)
    drawn = [partial(costs.scatter, groups=groups, cost=cost) for cost in costs.drawable(groups)]
    shared, apart = differing(groups)
    return {
        "curves": [picture(f"curve{i}", draw) for i, draw in enumerate(curves)],
        "costs": [picture(f"cost{i}", draw) for i, draw in enumerate(drawn)],
        "pooled": any(pooled(record.summary) for group in groups for record in group.counted),
        "legend": legend([group.name for group in groups]),
        "seeded": any(len(group.counted) > 1 for group in groups),
        "results": bars(groups),
        "matrices": matrices(groups),
        "numbers": numbers(groups),
        "settings": shared,
        "options": apart,
    }


def _of(key: str, record: RunRecord) -> float | None:
    return number(clean(record.summary), key)


def clean(summary: Row) -> dict[str, Any]:
    """The numbers of a summary by their keys; what is no number is left out."""
    known = flat(summary)
    numbers = {key: number(known, key) for key, _, _ in (*RESULTS, *OWN_VIEWS, *COSTS, *TROUBLE)}
    return {**numbers, **domain_accuracies(summary)}


def with_interval(write: Format, found: Interval | None) -> str:
    """Mean and half of the interval, with the unit once: "63.3 ± 1.2 %"."""
    if found is None or found.half_width is None:
        return NONE if found is None else write(found.mean)
    value, _, unit = write(found.mean).partition(" ")
    return f"{value} ± {write(found.half_width).partition(' ')[0].lstrip('+')} {unit}".rstrip()


def bars(groups: Sequence[Group]) -> Cells | None:
    """A row per group and a column per result that some group has, each scaled to its longest bar or interval."""
    shown = [(label, write, [group.interval(partial(_of, key)) for group in groups]) for key, label, write in _bars()]
    shown = [(label, write, found) for label, write, found in shown if any(found)]
    if not shown:
        return None
    columns = [[_bar(write, one, _longest(found)) for one in found] for _, write, found in shown]
    rows = [(group.name, [column[i] for column in columns]) for i, group in enumerate(groups)]
    many = any(len(group.counted) > 1 for group in groups)
    note = "Each column has a scale of its own, from zero."
    note += " Line: the 95 % Student-t interval over seeds." if many else ""
    return Cells("Results", "bars intervals", ["", *(label for label, _, _ in shown)], rows, note)


def _bars() -> list[tuple[str, str, Format]]:
    return [entry for entry in RESULTS if entry[0] in BARS]


def _longest(found: Sequence[Interval | None]) -> float:
    return max((max(one.mean, one.high or 0.0) for one in found if one is not None), default=0.0) or 1.0


def _bar(write: Format, found: Interval | None, longest: float) -> Cell:
    if found is None:
        return Cell(NONE)
    low, high = (None if end is None else end / longest for end in (found.low, found.high))
    return Cell(with_interval(write, found), found.mean / longest, low, high)


def numbers(groups: Sequence[Group]) -> Grid:
    """A column per group, a row per number that some has: results with intervals, means of costs, sums of troubles."""
    summaries = [clean(record.summary) for group in groups for record in group.counted]
    rows = [["Seeds", *(", ".join(group.seeds) or NONE for group in groups)]]
    for key, label, write in results(*summaries):
        rows.append([label, *(with_interval(write, group.interval(partial(_of, key))) for group in groups)])
    for key, label, write in COSTS:
        rows.append([label, *(_mean(write, group.interval(partial(_of, key))) for group in groups)])
    for key, label, write in TROUBLE:
        rows.append([label, *(_total(write, [_of(key, record) for record in group.counted]) for group in groups)])
    return Grid(["", *(group.name for group in groups)], [row for row in rows if any(c != NONE for c in row[1:])])


def _mean(write: Format, found: Interval | None) -> str:
    if found is None:
        return NONE
    return write(round(found.mean) if write is count else found.mean)


def _total(write: Format, values: Sequence[float | None]) -> str:
    known = [int(value) for value in values if value is not None]
    return write(sum(known)) if any(known) else NONE


def matrices(groups: Sequence[Group]) -> Maps | None:
    """The mean accuracy matrix of each group with several stages."""
    found = {group.name: mean_matrix([record.matrix for record in group.counted]) for group in groups}
    known = {name: matrix for name, matrix in found.items() if len(matrix) > 1}
    if not known:
        return None
    told = max(len(row) for matrix in known.values() for row in matrix) <= TOLD
    maps = [_map(name, matrix) for name, matrix in list(known.items())[:MOST_MAPS]]
    fewer = f" The first {MOST_MAPS} of {len(known)} are shown." if len(known) > MOST_MAPS else ""
    note = f"In per cent: a row per stage, a column per task; means over seeds.{fewer}"
    return Maps("Accuracy per task after every stage", maps, note, told)


def mean_matrix(found: Sequence[Matrix]) -> Matrix:
    """R[t][j] averaged over the matrices that have the shape of the largest; None where one of them has no value."""
    shape = max(((len(m), len(m[0])) for m in found if m), default=(0, 0))
    same = [m for m in found if m and (len(m), len(m[0])) == shape]
    cells = [[[m[t][j] for m in same] for j in range(shape[1])] for t in range(shape[0])]
    return [[_mean_of(values) for values in row] for row in cells]


def _mean_of(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known and len(known) == len(values) else None


def _map(name: str, matrix: Matrix) -> Cells:
    rows = [(str(t), [_shade(value) for value in row]) for t, row in enumerate(matrix)]
    return Cells(name, "heat", ["", *map(str, range(len(matrix[0])))], rows)


def _shade(value: float | None) -> Cell:
    return Cell("") if value is None else Cell(f"{100 * value:.0f}", 0.06 + 0.94 * value)


def differing(groups: Sequence[Group]) -> tuple[Grid | None, Grid | None]:
    """Settings that differ: those that every group has, and those that only some have."""
    known = [settings(group.records[0]) for group in groups]
    keys = [k for k in dict.fromkeys(k for s in known for k in s) if len({s.get(k) for s in known}) > 1]
    rows: dict[bool, list[list[str]]] = {True: [], False: []}
    for key in keys:
        rows[all(key in s for s in known)].append([key, *(s.get(key, NONE) for s in known)])
    head = ["", *(group.name for group in groups)]
    return Grid(head, rows[True]) if rows[True] else None, Grid(head, rows[False]) if rows[False] else None


def data_pictures(groups: Sequence[Group]) -> list[Data]:
    """One per partition that some run has a picture of: methods that are compared share one per seed."""
    found: dict[str, list[tuple[Group, RunRecord]]] = {}
    for group in groups:
        for record in group.records:
            if record.picture is not None:
                found.setdefault(str(record.partition.get("fingerprint") or record.folder), []).append((group, record))
    datasets = {record.dataset for runs in found.values() for _, record in runs}
    titles = [_seed(runs[0][1], named=len(datasets) > 1) for runs in found.values()]
    if len(set(titles)) < len(titles):
        holders = (", ".join(dict.fromkeys(group.name for group, _ in runs)) for runs in found.values())
        titles = [f"{title}: {names}" for title, names in zip(titles, holders, strict=True)]
    return [Data(title, runs[0][1]) for title, runs in zip(titles, found.values(), strict=True)][:MOST_DATA]


def _seed(record: RunRecord, *, named: bool) -> str:
    """The seed that a partition was drawn with; named: after its data set."""
    parts = [str(record.dataset)] if named else []
    return ", ".join([*parts, "Partition" if record.seed is None else f"Seed {record.seed}"])


def troubles(groups: Sequence[Group], names: Mapping[int, str]) -> list[str]:
    """A sentence or two per run that has failed or not ended. names: of records by their id."""
    found = {id(record): (group, record) for group in groups for record in group.records if record.status != "done"}
    return [_trouble(record, names[key], record not in group.counted) for key, (group, record) in found.items()]


def _trouble(record: RunRecord, name: str, apart: bool) -> str:
    stages = len(record.stages)
    so_far = f"{stages} stage{'s' * (stages != 1)} evaluated so far"
    what = (
        f"failed: {record.reason or 'why is not recorded'}" if record.status == "failed" else f"is unfinished, {so_far}"
    )
    left_out = " It is left out of means." if apart else ""
    return f"{name} {what.rstrip('.')}.{left_out} `fedloom resume {record.folder}` goes on with it."
