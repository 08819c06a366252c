"""The data plan: who holds what, when. Implements `fedloom.core.method.DataPlan`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.core import Batches, ClientId, ConfigError, DataError, Stage
from fedloom.core.errors import closest, unknown
from fedloom.data.augment import Prepare
from fedloom.data.cache import digest
from fedloom.data.partition import check_clients, make_partition, on_domains, partition_task
from fedloom.data.parts import Parts
from fedloom.data.ranges import at_least
from fedloom.data.source import Source
from fedloom.data.stream import (
    KINDS,
    Arrival,
    Schedule,
    Synchronous,
    class_order,
    count_tasks,
    domain_order,
    make_arrival,
    split_classes,
)
from fedloom.data.text import PrepareText

Groups = tuple[tuple[int, ...], ...]
# What each kind of stream uses of its options, and why not the others.
STREAM_OPTIONS = ("kind", "tasks", "class_order", "domain_order", "arrival", "shift", "stages")
UNUSED: Mapping[str, tuple[tuple[str, ...], str]] = {
    "class_incremental": (("domain_order",), "every domain is there from the start of a class-incremental stream"),
    "domain_incremental": (("tasks", "class_order"), "in a domain-incremental stream every domain is a task"),
    "static": (STREAM_OPTIONS[1:], "a static stream has one task of all classes"),
}


@dataclass(frozen=True, eq=False)
class Plan:
    """A source, cut into tasks, dealt out to clients, with a timetable.

    tasks: class ids per task, ascending. task_domains: domain ids per task, ascending; empty where the data have no
    domains. arrival: which client is on which task. parts: per task, the rows of each client. rounds: train rounds per
    stage. seed: of the batches. rule: the options that made the plan. notes: sentences for the user. Small to pickle:
    the source travels by reference.
    """

    source: Source
    tasks: Groups
    task_domains: Groups
    arrival: Arrival
    parts: tuple[Parts, ...]
    rounds: int
    seed: int
    prepare: Prepare | PrepareText
    rule: Mapping[str, Any]
    notes: tuple[str, ...] = ()

    @property
    def num_classes(self) -> int:
        """Classes of the whole stream."""
        return self.source.num_classes

    @property
    def domains(self) -> tuple[str, ...]:
        """Names of the data's domains; empty where they have none."""
        return self.source.domain_names

    @property
    def num_clients(self) -> int:
        """Registered clients, with or without data."""
        return len(self.parts[0])

    @property
    def num_stages(self) -> int:
        """Stages of the stream."""
        return self.arrival.stages

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input."""
        return self.source.input_shape

    @cached_property
    def _stages(self) -> tuple[Stage, ...]:
        current = [self.arrival.current(index) for index in range(self.num_stages)]
        arrived = zip(_arrived(current, self.tasks), _arrived(current, self.task_domains), strict=True)
        return tuple(Stage(k, self.num_stages, self.rounds, *c, *d) for k, (c, d) in enumerate(arrived))

    def stage(self, index: int, client: ClientId | None = None) -> Stage:
        """The stage as the server (None) or as one client sees it; a client without a task has nothing current."""
        stage = self._stages[index]
        if client is None:
            return stage
        task = self.arrival.task(client, index)
        own = ((), ()) if task is None else (self.tasks[task], self.task_domains[task])
        return replace(stage, classes=own[0], domains=own[1])

    @cached_property
    def _participants(self) -> tuple[Sequence[ClientId], ...]:
        return tuple(self._holders(stage) for stage in range(self.num_stages))

    def _holders(self, stage: int) -> Sequence[ClientId]:
        if isinstance(self.arrival, Synchronous):
            return self.parts[stage].holders()
        found = tuple(c for c in range(self.num_clients) if self.size(c, stage))
        return range(self.num_clients) if len(found) == self.num_clients else found

    def participants(self, stage: int) -> Sequence[ClientId]:
        """Clients that hold data at this stage, ascending; a range when all do."""
        return self._participants[stage]

    def task_of(self, client: ClientId, stage: int) -> int | None:
        """The task that a client is on; None before its first."""
        return self.arrival.task(client, stage)

    def rows(self, client: ClientId, stage: int) -> np.ndarray:
        """Rows of the train split that a client uses at a stage, int64, ascending."""
        task = self.arrival.task(client, stage)
        return np.empty(0, np.int64) if task is None else self.parts[task].rows(client)

    def size(self, client: ClientId, stage: int) -> int:
        """Number of examples of a client at a stage."""
        task = self.arrival.task(client, stage)
        return 0 if task is None else self.parts[task].size(client)

    def train(self, client: ClientId, stage: int, round: int | None, exchange: str) -> Batches:
        """A client's data for one piece of work."""
        key = (self.seed, "batches", stage, round, client, exchange)
        rows = torch.from_numpy(np.ascontiguousarray(self.rows(client, stage)))
        return self._batches("train", rows, key)

    def test(self, task: int, domain: int | None = None) -> Batches:
        """Held-out examples of one task, of all its domains or of one, in stored order.

        Raises `ConfigError` for a domain of data without domains.
        """
        if domain is None:
            return self._batches("test", self._test_rows[task], (self.seed, "test", task))
        if self.source.domains_test is None:
            raise ConfigError(f"there is no domain {domain}: the data have no domain labels; leave the domain out")
        rows = self._test_rows[task]
        rows = rows[self.source.domains_test[rows] == domain]
        return self._batches("test", rows, (self.seed, "test", task, domain))

    def _batches(self, split: str, rows: Tensor, key: tuple[Any, ...]) -> Batches:
        x, y, domains = (getattr(self.source, f"{what}_{split}") for what in ("x", "y", "domains"))
        return Batches(x, y, rows, key=key, prepare=self.prepare, domains=domains)

    @cached_property
    def _test_rows(self) -> tuple[Tensor, ...]:
        source = self.source
        rows = rows_of_tasks(source.y_test, self.tasks, source.domains_test, self.task_domains)
        return tuple(torch.from_numpy(part) for part in rows)

    def label_counts(self, client: ClientId, stage: int) -> Tensor:
        """int64 [classes]: examples per class that the client has held up to and including the stage."""
        return self.domain_counts(client, stage).sum(0)

    def domain_counts(self, client: ClientId, stage: int) -> Tensor:
        """int64 [domains, classes]: the same per domain; one row where the data have no domains."""
        return self._cells(self._held(client, stage))

    def _held(self, client: ClientId, stage: int) -> np.ndarray:
        tasks = {self.arrival.task(client, s) for s in range(stage + 1)} - {None}
        rows = [self.parts[t].rows(client) for t in tasks if t is not None]
        return np.concatenate(rows) if rows else np.empty(0, np.int64)

    def stage_counts(self, client: ClientId, stage: int) -> Tensor:
        """int64 [domains, classes]: examples that the client holds at the stage; one row without domains."""
        return self._cells(self.rows(client, stage))

    def _cells(self, rows: np.ndarray) -> Tensor:
        index = torch.from_numpy(rows)
        cells, domains = self.source.y_train[index], self.source.domains_train
        if domains is not None:
            cells = domains[index] * self.num_classes + cells
        count = max(1, len(self.domains))
        return torch.bincount(cells, minlength=count * self.num_classes).reshape(count, self.num_classes)

    def fingerprint(self) -> str:
        """SHA-256 of the data, the tasks, the timetable and every assignment."""
        assigned = [part.digest() for part in self.parts]
        return digest(
            [
                self.source.fingerprint,
                self.tasks,
                *([self.task_domains] if self.domains else []),
                repr(self.arrival),
                assigned,
                self.rounds,
                self.seed,
                repr(self.prepare),
            ]
        )

    def describe(self) -> dict[str, Any]:
        """The plan as JSON-able values for the record of a run; see `fedloom.data.describe.describe_plan`."""
        from fedloom.data.describe import describe_plan

        return describe_plan(self)

    def draw(self, path: str | Path) -> Path:
        """Draw who holds which classes and when, as a PNG; see `fedloom.data.picture.draw_plan`."""
        from fedloom.data.picture import draw_plan

        return draw_plan(self, Path(path))


def _arrived(current: Sequence[Iterable[int]], groups: Groups) -> list[tuple[tuple[int, ...], ...]]:
    """Per stage: what is current, has been seen, and had been seen before. current: its tasks; groups: of a task."""
    seen: set[int] = set()
    found = []
    for tasks in current:
        now = {entry for task in tasks for entry in groups[task]}
        old, seen = seen, seen | now
        found.append(tuple(tuple(sorted(group)) for group in (now, seen, old)))
    return found


def rows_of_tasks(y: Tensor, tasks: Groups, domains: Tensor | None, task_domains: Groups) -> list[np.ndarray]:
    """Rows whose class and domain belong to each task, int64, ascending."""
    found = []
    for classes, own in zip(tasks, task_domains, strict=True):
        inside = np.isin(y.numpy(), classes)
        if domains is not None:
            inside &= np.isin(domains.numpy(), own)
        found.append(np.flatnonzero(inside).astype(np.int64))
    return found


def make_plan(
    source: Source,
    *,
    stream: Mapping[str, Any] | None = None,
    partition: Mapping[str, Any] | None = None,
    augment: str = "none",
    seed: int = 0,
    rounds: int = 1,
) -> Plan:
    """Cut a source into tasks and deal them out.

    stream: kind ("class_incremental", "domain_incremental", "static"), tasks (a number, "coarse" or "fine"; default
    5), class_order ("seeded", "natural", a list), domain_order (the same, a list of names or ids), arrival
    ("synchronous", "shifted", "per_client", `{client: {stage: task}}`), shift, stages. partition: kind ("dirichlet" by
    default), clients (default 10) and the options of the kind (see `fedloom.data.partition`). None means the default.
    Raises `ConfigError` or `DataError` naming the option, its value and the mend, before anything is drawn.
    """
    stream, partition = _given(stream), _given(partition)
    at_least("training.rounds", rounds, 1)
    kind, clients = partition.pop("kind", "dirichlet"), partition.pop("clients", 10)
    dealing, notes = make_partition(kind, partition)
    check_clients(dealing, clients, len(source.y_train))
    prepare = _preparation(source, augment)
    tasks, task_domains, arrival, more = _stream(source, stream, clients, seed)
    domains = None if source.domains_train is None else source.domains_train.numpy()
    rule_of, said = on_domains(dealing, domains, source.domain_names, clients, seed)
    labels, parts = source.y_train.numpy(), []
    for task, rows in enumerate(rows_of_tasks(source.y_train, tasks, source.domains_train, task_domains)):
        part, found = partition_task(rule_of(rows), labels[rows], rows, clients, seed=seed, task=task)
        parts.append(part)
        more += [f"task {task}: {text}" if len(tasks) > 1 else text for text in found]
    rule = {
        "stream": {"kind": "class_incremental", **stream},
        "partition": {"kind": kind, "clients": clients, **vars(dealing)},
        "augment": augment,
        "seed": seed,
    }
    plan = Plan(source, tasks, task_domains, arrival, tuple(parts), rounds, seed, prepare, rule)
    return replace(plan, notes=(*source.notes, *merge_tasks([*notes, *said, *more]), *_empty(plan)))


def _preparation(source: Source, augment: str) -> Prepare | PrepareText:
    if source.text is not None:
        if augment != "none":
            raise ConfigError(f"data.augment '{augment}' is for images, and the data are texts; set it to none")
        return PrepareText()
    if augment != "none" and len(source.input_shape) != 3:
        raise ConfigError(
            f"data.augment '{augment}' needs images, but inputs have shape {source.input_shape}; set it to none"
        )
    return Prepare(source.mean, source.std, augment)


def _given(options: Mapping[str, Any] | None) -> dict[str, Any]:
    return {k: v for k, v in (options or {}).items() if v is not None}


def _stream(
    source: Source, options: Mapping[str, Any], clients: int, seed: int
) -> tuple[Groups, Groups, Arrival, list[str]]:
    """Classes and domains of every task, the timetable, and notes."""
    wrong = sorted(options.keys() - set(STREAM_OPTIONS))
    if wrong:
        raise ConfigError(f"unknown option 'stream.{wrong[0]}'.{closest(wrong[0], STREAM_OPTIONS)}")
    kind = options.get("kind", "class_incremental")
    if kind not in KINDS:
        raise ConfigError(unknown("stream.kind", kind, KINDS))
    unused, reason = UNUSED[kind]
    notes = [f"stream.{option} is not used: {reason}" for option in unused if option in options]
    tasks, task_domains = _tasks(source, kind, options, seed)
    if kind == "static":
        return tasks, task_domains, Synchronous(1), notes
    arrival = make_arrival(
        options.get("arrival", "synchronous"), tasks=len(tasks), clients=clients, shift=options.get("shift", 1),
        stages=options.get("stages"), seed=seed,
    )  # fmt: skip
    return tasks, task_domains, arrival, notes


def _tasks(source: Source, kind: str, options: Mapping[str, Any], seed: int) -> tuple[Groups, Groups]:
    """Classes and domains of every task: the one or the other are cut, where anything is."""
    classes, domains = tuple(range(source.num_classes)), tuple(range(len(source.domain_names)))
    if kind == "domain_incremental":
        if source.domains_train is None or not domains:
            raise DataError(
                "stream.kind 'domain_incremental' goes from domain to domain, but the data have no domain labels; name "
                "their column with data.domain, or take stream.kind: class_incremental"
            )
        order = domain_order(source.domain_names, options.get("domain_order", "seeded"), seed)
        return (classes,) * len(order), tuple((domain,) for domain in order)
    if kind == "static":
        return (classes,), (domains,)
    count = count_tasks(options.get("tasks", 5), source.granularity, source.name)
    order = class_order(source.num_classes, options.get("class_order", "seeded"), seed)
    return split_classes(source.num_classes, count, order), (domains,) * count


def merge_tasks(notes: Sequence[str]) -> list[str]:
    """Say once, with a count, what was noted for several tasks."""
    seen: dict[str, list[str]] = {}
    for note in notes:
        head, colon, text = note.partition(": ")
        is_task = bool(colon) and head.startswith("task ")
        seen.setdefault(text if is_task else note, []).extend([head.removeprefix("task ")] if is_task else [])
    return [f"{'task' if len(t) == 1 else 'tasks'} {', '.join(t)}: {text}" if t else text for text, t in seen.items()]


def _empty(plan: Plan) -> list[str]:
    """One sentence per stage on clients without examples, and on tasks that nobody ever works on."""
    notes = []
    for stage in range(plan.num_stages):
        if len(plan.participants(stage)) == plan.num_clients:
            continue
        # A client that has not started yet is where its timetable says; it is not short of data.
        started = (c for c in range(plan.num_clients) if plan.task_of(c, stage) is not None)
        without = [c for c in started if not plan.size(c, stage)]
        if not without:
            continue
        share = f"{len(without)} of {plan.num_clients} clients hold no examples"
        notes.append(f"stage {stage}: {share} ({_listed('client', without)})")
    reached = {t for s in range(plan.num_stages) for t in plan.arrival.current(s)}
    never = sorted(set(range(len(plan.tasks))) - reached)
    if never:
        notes.append(f"no client ever works on {_listed('task', never)}")
    if isinstance(plan.arrival, Schedule):
        idle = sorted(set(range(plan.num_clients)) - plan.arrival.entries.keys())
        notes += [f"the schedule gives no task to {_listed('client', idle)}: evaluation only"] if idle else []
    return notes


def _listed(noun: str, numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
    return f"{noun if len(numbers) == 1 else noun + 's'} {shown}"
