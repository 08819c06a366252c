"""Streams: classes cut into tasks, or domains in an order, and which client is on which task at which stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from fedloom.core import ConfigError
from fedloom.core.errors import closest, unknown
from fedloom.core.seeds import seed_for
from fedloom.data.ranges import at_least

KINDS = ("class_incremental", "domain_incremental", "static")
ARRIVALS = ("synchronous", "shifted", "per_client")


def class_order(num_classes: int, order: str | Sequence[int], seed: int) -> tuple[int, ...]:
    """The order in which classes arrive: "seeded", "natural" or an explicit list.

    Raises `ConfigError` naming a class that is missing, unknown or listed twice.
    """
    if order == "natural":
        return tuple(range(num_classes))
    if order == "seeded":
        return tuple(np.random.default_rng(seed_for(seed, "class-order")).permutation(num_classes).tolist())
    if isinstance(order, str):
        known = ("seeded", "natural")
        raise ConfigError(
            f"stream.class_order must be seeded, natural or a list of class ids, got '{order}'.{closest(order, known)}"
        )
    given = list(order)
    for what, bad in (
        ("is no class id", [c for c in given if isinstance(c, bool) or c not in range(num_classes)]),
        ("is listed twice", [c for c in given if given.count(c) > 1]),
        ("is missing", sorted(set(range(num_classes)) - set(given))),
    ):
        if bad:
            raise ConfigError(
                f"stream.class_order: class {bad[0]} {what}; list each of 0..{num_classes - 1} exactly once"
            )
    return tuple(int(c) for c in given)


def domain_order(names: Sequence[str], order: str | Sequence[str | int], seed: int) -> tuple[int, ...]:
    """The order in which domains arrive: "seeded", "natural" or a list of their names or ids.

    Raises `ConfigError` naming a domain that is missing, unknown or listed twice.
    """
    if order == "natural":
        return tuple(range(len(names)))
    if order == "seeded":
        return tuple(np.random.default_rng(seed_for(seed, "domain-order")).permutation(len(names)).tolist())
    if isinstance(order, str):
        known = ("seeded", "natural")
        raise ConfigError(
            f"stream.domain_order must be seeded, natural or a list of domains, got '{order}'.{closest(order, known)}"
        )
    ids = {name: k for k, name in enumerate(names)}
    given = [ids.get(entry, entry) if isinstance(entry, str) else entry for entry in order]
    for what, bad in (
        ("is no domain", [d for d in given if type(d) is not int or d not in range(len(names))]),
        ("is listed twice", [names[d] for d in given if given.count(d) > 1]),
        ("is missing", [name for name, k in ids.items() if k not in given]),
    ):
        if bad:
            raise ConfigError(
                f"stream.domain_order: {bad[0]!r} {what}; list each of {', '.join(names)} exactly once, by name or by "
                f"id 0..{len(names) - 1}"
            )
    return tuple(int(d) for d in given)


def split_classes(num_classes: int, tasks: int, order: Sequence[int] | None = None) -> tuple[tuple[int, ...], ...]:
    """Cut an order of classes into tasks; class ids ascend within a task.

    Every task has floor(C / T) classes and the last also takes the remainder: (10, 3) -> 3, 3, 4.
    Source: LANDER's code. Differs: where the remainder is as large as a task, that code makes more than T tasks.
    """
    at_least("stream.tasks", tasks, 1)
    if tasks > num_classes:
        raise ConfigError(
            f"stream.tasks is {tasks} but there are {num_classes} classes; use at most {num_classes} tasks"
        )
    order = range(num_classes) if order is None else order
    step = num_classes // tasks
    cuts = [step * t for t in range(tasks)] + [num_classes]
    return tuple(tuple(sorted(order[a:b])) for a, b in pairwise(cuts))


def count_tasks(tasks: int | str, granularity: Mapping[str, int], name: str) -> int:
    """A number of tasks, given as such or as "coarse" or "fine" where the catalogue defines it for the data set."""
    if isinstance(tasks, str):
        if tasks in granularity:
            return granularity[tasks]
        known = ", ".join(f"{k} = {v}" for k, v in granularity.items()) or "none"
        raise ConfigError(
            f"stream.tasks '{tasks}' is not defined for '{name}' (defined: {known}); give a number of tasks"
        )
    at_least("stream.tasks", tasks, 1)
    return tasks


class Arrival(Protocol):
    """Who is on which task at which stage."""

    @property
    def stages(self) -> int:
        """Stages of the stream."""
        ...

    def task(self, client: int, stage: int) -> int | None:
        """The client's task at a stage; None before its first."""
        ...

    def current(self, stage: int) -> frozenset[int]:
        """Tasks that some client is on."""
        ...


@dataclass(frozen=True)
class Synchronous:
    """All clients are on task t at stage t."""

    tasks: int

    @property
    def stages(self) -> int:
        """One per task."""
        return self.tasks

    def task(self, client: int, stage: int) -> int | None:
        """The stage's task."""
        return stage

    def current(self, stage: int) -> frozenset[int]:
        """The stage's task."""
        return frozenset((stage,))


@dataclass(frozen=True)
class Shifted:
    """Client i starts `i mod (shift + 1)` stages late and stays on the last task once it has reached it."""

    tasks: int
    clients: int
    shift: int

    @property
    def stages(self) -> int:
        """One per task, and one more per stage of delay."""
        return self.tasks + min(self.shift, self.clients - 1)

    def task(self, client: int, stage: int) -> int | None:
        """The stage's task for the client's delay."""
        late = stage - client % (self.shift + 1)
        return None if late < 0 else min(late, self.tasks - 1)

    def current(self, stage: int) -> frozenset[int]:
        """One task per delay that occurs."""
        found = (self.task(delay, stage) for delay in range(min(self.shift + 1, self.clients)))
        return frozenset(t for t in found if t is not None)


@dataclass(frozen=True)
class PerClient:
    """Every client meets the tasks in an order of its own, a function of (seed, client) (fedfmx.md, A22)."""

    tasks: int
    clients: int
    seed: int

    @property
    def stages(self) -> int:
        """One per task."""
        return self.tasks

    @cached_property
    def _orders(self) -> np.ndarray:
        draw = (
            np.random.default_rng(seed_for(self.seed, "arrival", c)).permutation(self.tasks)
            for c in range(self.clients)
        )
        return np.stack(list(draw)).astype(np.int32)

    def task(self, client: int, stage: int) -> int | None:
        """The stage's task in the client's order."""
        return int(self._orders[client, stage])

    def current(self, stage: int) -> frozenset[int]:
        """Tasks of all clients."""
        return frozenset(np.unique(self._orders[:, stage]).tolist())


@dataclass(frozen=True)
class Schedule:
    """An explicit timetable: per client, (stage, task) in order; a client keeps a task until the next.

    A client that is not listed never trains; it only evaluates.
    """

    entries: Mapping[int, tuple[tuple[int, int], ...]]
    stages: int

    def task(self, client: int, stage: int) -> int | None:
        """The task of the latest entry."""
        found = None
        for start, task in self.entries.get(client, ()):
            found = task if start <= stage else found
        return found

    def current(self, stage: int) -> frozenset[int]:
        """Tasks of the listed clients."""
        return frozenset(t for c in self.entries if (t := self.task(c, stage)) is not None)


def table(arrival: Arrival, clients: Sequence[int]) -> list[list[int | None]]:
    """Active task per client (row) and stage (column)."""
    return [[arrival.task(c, s) for s in range(arrival.stages)] for c in clients]


def make_arrival(
    arrival: str | Mapping[Any, Any], *, tasks: int, clients: int, shift: int = 1, stages: int | None = None, seed: int
) -> Arrival:
    """The timetable of that name, or an explicit one `{client: {stage: task}}` (all counted from 0).

    shift: stages of the longest delay ("shifted"). stages: length of an explicit timetable, by default up to its
    last entry. Raises `ConfigError` for unknown names, clients or tasks, and for a first stage without anyone.
    """
    if isinstance(arrival, Mapping):
        return _schedule(arrival, tasks, clients, stages)
    if arrival not in ARRIVALS:
        raise ConfigError(unknown("stream.arrival", arrival, [*ARRIVALS, "{client: {stage: task}}"]))
    if arrival == "shifted":
        at_least("stream.shift", shift, 1)
        return Shifted(tasks, clients, shift)
    return Synchronous(tasks) if arrival == "synchronous" else PerClient(tasks, clients, seed)


def _schedule(arrival: Mapping[Any, Any], tasks: int, clients: int, stages: int | None) -> Schedule:
    entries: dict[int, tuple[tuple[int, int], ...]] = {}
    for client, rows in arrival.items():
        if not isinstance(rows, Mapping):
            raise ConfigError(f"stream.arrival: client {client} must map stages to tasks, got {rows!r}")
        number = _index("client", client, clients)
        entries[number] = tuple(sorted((_index("stage", s, stages), _index("task", t, tasks)) for s, t in rows.items()))
    starts = [stage for rows in entries.values() for stage, _ in rows]
    if not starts:
        raise ConfigError("stream.arrival is an empty schedule; give at least one client a task at stage 0")
    if min(starts) > 0:
        raise ConfigError(
            f"stream.arrival: nobody has a task before stage {min(starts)}; let a client start at stage 0"
        )
    return Schedule(dict(sorted(entries.items())), stages or max(starts) + 1)


def _index(what: str, value: Any, count: int | None) -> int:
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    digits = isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 10
    number = int(value) if whole or digits else -1
    number_of = "a whole number " if isinstance(value, float | bool) else ""
    if number < 0 or (count is not None and number >= count):
        most = "" if count is None else f"..{count - 1}"
        raise ConfigError(f"stream.arrival: {what} must be {number_of}in 0{most}, got {repr(value)[:60]}")
    return number
