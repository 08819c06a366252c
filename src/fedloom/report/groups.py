"""Runs that differ in nothing but the seed are one group: a name, a curve with its interval, a row of a table."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedloom.evaluate.statistics import Interval, mean_interval
from fedloom.report.record import RunRecord
from fedloom.report.units import NONE

# Keys of the configuration that change no result, and the seed.
APART = (
    "seed",
    "tracker",
    "engine.name",
    "engine.runtime",
    "engine.workers",
    "engine.join",
    "data.root",
    "data.tokenizer",
)
MOST_SETTINGS = 3  # settings that a name holds


@dataclass(frozen=True)
class Group:
    """Runs of one configuration over seeds. records: in the order given, those that have not ended included."""

    name: str
    records: tuple[RunRecord, ...]

    @property
    def counted(self) -> tuple[RunRecord, ...]:
        """The runs that means are over: those that are done, or all where none is."""
        done = tuple(record for record in self.records if record.status == "done")
        return done or self.records

    @property
    def seeds(self) -> list[str]:
        """Seeds of the runs that are counted, as text."""
        return [str(record.seed) for record in self.counted if record.seed is not None]

    def interval(self, measure: Callable[[RunRecord], float | None]) -> Interval | None:
        """Mean and 95 % interval of a number over the runs that have it; None where none has."""
        found = [value for value in map(measure, self.counted) if value is not None]
        return mean_interval(found) if found else None

    def curve(self, measure: Callable[[RunRecord], Mapping[int, float]]) -> dict[int, Interval]:
        """Place -> mean and 95 % interval over the runs, at the places that all runs with a curve have."""
        curves = [curve for curve in map(measure, self.counted) if curve]
        shared = [place for place in (curves[0] if curves else ()) if all(place in curve for curve in curves)]
        return {place: mean_interval([curve[place] for curve in curves]) for place in shared}


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Dotted keys and short texts of a nested mapping; long lists are cut, with their length."""
    flat: dict[str, str] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
            continue
        text = value if isinstance(value, str) else json.dumps(value, default=str)
        size = f" … ({len(value)} entries)" if isinstance(value, list) else " …"
        flat[f"{prefix}{key}"] = text if len(text) <= 200 else text[:160] + size
    return flat


def settings(record: RunRecord) -> dict[str, str]:
    """Dotted keys and texts of what can change the result of a run, without its seed."""
    return {key: text for key, text in flatten(record.config).items() if key not in APART}


def grouped(records: Sequence[RunRecord]) -> list[Group]:
    """Groups in the order of their first run. A run whose seed its group has already begins another group."""
    found: list[tuple[str, list[RunRecord]]] = []
    for record in records:
        own = _identity(record)
        fits = (group for key, group in found if own and key == own)
        home = next((group for group in fits if record.seed not in [other.seed for other in group]), None)
        if home is None:
            found.append((own, [record]))
        else:
            home.append(record)
    groups = [group for _, group in found]
    return [Group(name, tuple(group)) for name, group in zip(_names(groups), groups, strict=True)]


def _identity(record: RunRecord) -> str:
    """Text that runs of one group share; empty where the configuration is not recorded."""
    kept = dict(record.config)
    for dotted in APART:
        section, _, key = dotted.rpartition(".")
        if not section:
            kept.pop(key, None)
        elif isinstance(kept.get(section), Mapping):
            kept[section] = {k: v for k, v in kept[section].items() if k != key}
    return json.dumps(kept, sort_keys=True, default=str) if kept else ""


def _names(groups: Sequence[Sequence[RunRecord]]) -> list[str]:
    """The method, with what tells it from others of the same method, or with seeds or folders, until all differ."""
    firsts = [group[0] for group in groups]
    names = [record.method for record in firsts]
    for add in (_dataset, _differing, _seed, _folder):
        doubled = {name for name in names if names.count(name) > 1}
        if not doubled:
            return names
        same = {name: [r for r, own in zip(firsts, names, strict=True) if own == name] for name in doubled}
        names = [f"{n}{add(r, same[n])}" if n in doubled else n for n, r in zip(names, firsts, strict=True)]
    return names if len(set(names)) == len(names) else [f"{i + 1}. {name}" for i, name in enumerate(names)]


def _dataset(record: RunRecord, others: Sequence[RunRecord]) -> str:
    return f", {record.dataset}" if len({r.dataset for r in others}) > 1 else ""


def _differing(record: RunRecord, others: Sequence[RunRecord]) -> str:
    """What of the settings differs among runs of one name; empty where it is too much for a name."""
    known = [settings(r) for r in others]
    keys = [k for k in dict.fromkeys(k for s in known for k in s) if len({s.get(k) for s in known}) > 1]
    if len(keys) > MOST_SETTINGS:
        return ""
    return "".join(f", {key.rpartition('.')[2]} {settings(record).get(key, NONE)}" for key in keys)


def _seed(record: RunRecord, others: Sequence[RunRecord]) -> str:
    return f", seed {record.seed}" if len({str(r.seed) for r in others}) > 1 else ""


def _folder(record: RunRecord, others: Sequence[RunRecord]) -> str:
    return f" ({record.folder.name if len({r.folder.name for r in others}) == len(others) else record.folder})"
