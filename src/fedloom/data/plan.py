"""The data plan: who holds what, when. Implements `fedloom.core.method.DataPlan`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.core import Batches, ClientId, ConfigError, Stage
from fedloom.core.errors import closest, unknown
from fedloom.data.augment import Prepare
from fedloom.data.cache import digest
from fedloom.data.partition import check_clients, make_partition, partition_task
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
    make_arrival,
    split_classes,
)

STREAM_OPTIONS = ("kind", "tasks", "class_order", "arrival", "shift", "stages")


@dataclass(frozen=True, eq=False)
class Plan:
    """A source, cut into tasks, dealt out to clients, with a timetable.

    tasks: class ids per task, ascending. arrival: which client is on which task. parts: per task, the rows of each
    client. rounds: train rounds per stage. seed: of the batches. rule: the options that made the plan.
    notes: sentences for the user. Small to pickle: the source travels by reference.
    """

    source: Source
    tasks: tuple[tuple[int, ...], ...]
    arrival: Arrival
    parts: tuple[Parts, ...]
    rounds: int
    seed: int
    prepare: Prepare
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
        seen: set[int] = set()
        out = []
        for index in range(self.num_stages):
            classes = {c for task in self.arrival.current(index) for c in self.tasks[task]}
            old, seen = seen, seen | classes
            arrived = (tuple(sorted(group)) for group in (classes, seen, old))
            out.append(Stage(index, self.num_stages, self.rounds, *arrived))
        return tuple(out)

    def stage(self, index: int, client: ClientId | None = None) -> Stage:
        """The stage as the server (None) or as one client sees it; a client without a task has no classes."""
        stage = self._stages[index]
        if client is None:
            return stage
        task = self.arrival.task(client, index)
        return replace(stage, classes=() if task is None else self.tasks[task])

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
        return Batches(self.source.x_train, self.source.y_train, rows, key=key, prepare=self.prepare)

    def test(self, task: int) -> Batches:
        """Held-out examples of one task, in stored order."""
        key = (self.seed, "test", task)
        return Batches(self.source.x_test, self.source.y_test, self._test_rows[task], key=key, prepare=self.prepare)

    @cached_property
    def _test_rows(self) -> tuple[Tensor, ...]:
        return tuple(torch.from_numpy(rows) for rows in rows_of_tasks(self.source.y_test, self.tasks))

    def label_counts(self, client: ClientId, stage: int) -> Tensor:
        """int64 [classes]: examples per class that the client has held up to and including the stage."""
        tasks = {self.arrival.task(client, s) for s in range(stage + 1)} - {None}
        rows = [self.parts[t].rows(client) for t in tasks if t is not None]
        return self._count(np.concatenate(rows) if rows else np.empty(0, np.int64))

    def stage_counts(self, client: ClientId, stage: int) -> Tensor:
        """int64 [classes]: examples per class that the client holds at the stage."""
        return self._count(self.rows(client, stage))

    def _count(self, rows: np.ndarray) -> Tensor:
        return torch.bincount(self.source.y_train[torch.from_numpy(rows)], minlength=self.num_classes)

    def fingerprint(self) -> str:
        """SHA-256 of the data, the tasks, the timetable and every assignment."""
        assigned = [part.digest() for part in self.parts]
        return digest(
            [
                self.source.fingerprint,
                self.tasks,
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


def rows_of_tasks(y: Tensor, tasks: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Rows whose class belongs to each task, int64, ascending."""
    labels = y.numpy()
    return [np.flatnonzero(np.isin(labels, task)).astype(np.int64) for task in tasks]


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

    stream: kind ("class_incremental", "static"), tasks (a number, "coarse" or "fine"; default 5), class_order
    ("seeded", "natural", a list), arrival ("synchronous", "shifted", "per_client", `{client: {stage: task}}`),
    shift, stages. partition: kind ("dirichlet" by default), clients (default 10) and the options of the kind
    (see `fedloom.data.partition`). A value of None means the default.
    Raises `ConfigError` or `DataError` naming the option, its value and the mend, before anything is drawn.
    """
    stream, partition = _given(stream), _given(partition)
    at_least("training.rounds", rounds, 1)
    kind, clients = partition.pop("kind", "dirichlet"), partition.pop("clients", 10)
    dealing, notes = make_partition(kind, partition)
    check_clients(dealing, clients, len(source.y_train))
    prepare = _preparation(source, augment)
    tasks, arrival, more = _stream(source, stream, clients, seed)
    labels, parts = source.y_train.numpy(), []
    for task, rows in enumerate(rows_of_tasks(source.y_train, tasks)):
        part, said = partition_task(dealing, labels[rows], rows, clients, seed=seed, task=task)
        parts.append(part)
        more += [f"task {task}: {text}" if len(tasks) > 1 else text for text in said]
    rule = {
        "stream": {"kind": "class_incremental", **stream},
        "partition": {"kind": kind, "clients": clients, **vars(dealing)},
        "augment": augment,
        "seed": seed,
    }
    plan = Plan(source, tasks, arrival, tuple(parts), rounds, seed, prepare, rule)
    return replace(plan, notes=(*source.notes, *merge_tasks([*notes, *more]), *_empty(plan)))


def _preparation(source: Source, augment: str) -> Prepare:
    if augment != "none" and len(source.input_shape) != 3:
        raise ConfigError(
            f"data.augment '{augment}' needs images, but inputs have shape {source.input_shape}; set it to none"
        )
    return Prepare(source.mean, source.std, augment)


def _given(options: Mapping[str, Any] | None) -> dict[str, Any]:
    return {k: v for k, v in (options or {}).items() if v is not None}


def _stream(
    source: Source, options: Mapping[str, Any], clients: int, seed: int
) -> tuple[tuple[tuple[int, ...], ...], Arrival, list[str]]:
    wrong = sorted(options.keys() - set(STREAM_OPTIONS))
    if wrong:
        raise ConfigError(f"unknown option 'stream.{wrong[0]}'.{closest(wrong[0], STREAM_OPTIONS)}")
    kind = options.get("kind", "class_incremental")
    if kind not in KINDS:
        raise ConfigError(unknown("stream.kind", kind, KINDS))
    if kind == "static":
        unused = [k for k in STREAM_OPTIONS[1:] if k in options]
        notes = [f"stream.{k} is not used: a static stream has one task of all classes" for k in unused]
        return (tuple(range(source.num_classes)),), Synchronous(1), notes
    count = count_tasks(options.get("tasks", 5), source.granularity, source.name)
    tasks = split_classes(
        source.num_classes, count, class_order(source.num_classes, options.get("class_order", "seeded"), seed)
    )
    arrival = make_arrival(
        options.get("arrival", "synchronous"), tasks=count, clients=clients, shift=options.get("shift", 1),
        stages=options.get("stages"), seed=seed,
    )  # fmt: skip
    return tasks, arrival, []


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
