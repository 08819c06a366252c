"""Evaluation of one stage: the global view on every task seen, and each client's own view where it differs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from operator import add
from typing import Any

import numpy as np

from fedloom.core import ClientId, Payload, RunError
from fedloom.engine.checkpoint import Progress
from fedloom.engine.experiment import Experiment
from fedloom.engine.force import Force
from fedloom.engine.runtime import CHUNK, Failed, Measured, Probe
from fedloom.evaluate.personal import expected_accuracy, spread
from fedloom.evaluate.predict import Counts


def evaluate_stage(
    experiment: Experiment,
    force: Force,
    server: Payload,
    progress: Progress,
    stage: int,
    *,
    personal: bool,
    final: bool,
    stop: Callable[[], bool],
    lose: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Evaluate after a stage (`final`) or inside one; a row of scope "stage".

    Accuracy is over the test examples of every class seen so far, without task id. With `final` the row of the
    accuracy matrix is kept in `progress`. Clients are those that have taken part.
    lose: told of a client whose view cannot be had, which is then left out; without it, that ends the run.
    """
    plan, context = experiment.plan, force.runtime.context
    seen = plan.stage(stage).seen
    tasks = [j for j, classes in enumerate(plan.tasks) if set(classes) & set(seen)]

    def down(client: ClientId | None) -> Payload:
        return experiment.method.send(server, client, context(stage, exchange="evaluate", client=client))

    counts = _measure(experiment, force, stage, [None], tasks, progress, down, stop)[None]
    accuracies = counts.task_accuracies(plan.tasks)
    row: dict[str, Any] = {"stage": stage, "round": None, "exchange": None, "scope": "stage"}
    row |= {
        "accuracy": counts.accuracy(),
        "accuracy/current": counts.accuracy(plan.stage(stage).classes),
        "accuracy/within_task": counts.accuracy_within_task(),
        "accuracy/tasks": accuracies,
        "unseen": counts.unseen,
        "seen_classes": len(seen),
    }
    if personal:
        row |= _clients(experiment, force, stage, tasks, progress, down, counts, stop, lose)
    if final:
        progress.matrix.append(accuracies)
        progress.test_counts = [len(plan.test(j)) for j in range(len(plan.tasks))]
        progress.last_stage_row = row
    return row


def _measure(
    experiment: Experiment,
    force: Force,
    stage: int,
    clients: Sequence[ClientId | None],
    tasks: Sequence[int],
    progress: Progress,
    down: Callable[[ClientId | None], Payload],
    stop: Callable[[], bool],
    lose: Callable[[str], None] | None = None,
) -> dict[ClientId | None, Counts]:
    """Counts per client (None: the global view) over the tasks; without clients that were lost."""
    probes = []
    for client in clients:
        state = None if client is None else progress.versions.get(client)
        for task in tasks:
            for start in range(0, len(experiment.plan.test(task)), CHUNK):
                size = min(CHUNK, len(experiment.plan.test(task)) - start)
                probes.append(Probe(client, stage, task, start, start + size, state, size))
    answers = force.carry_out(probes, down, stop=stop)
    found: dict[ClientId | None, list[Counts]] = {client: [] for client in clients}
    lost: set[ClientId | None] = set()
    for answer in answers:
        if isinstance(answer, Failed):
            view = "the global view" if answer.client is None else f"the view of client {answer.client}"
            cause = f"evaluation of {view} at stage {stage} failed: {answer.reason}"
            if not answer.lost or lose is None:
                error = RunError(answer.reason if answer.fatal else cause)
                error.add_note(answer.trace)
                raise error
            if answer.client not in lost:
                lose(cause)
            lost.add(answer.client)
            continue
        assert isinstance(answer, Measured)
        found[answer.client].append(answer.counts)
    zero = Counts.zero(experiment.plan.num_classes)
    return {client: reduce(add, parts, zero) for client, parts in found.items() if client not in lost}


def _clients(
    experiment: Experiment,
    force: Force,
    stage: int,
    tasks: Sequence[int],
    progress: Progress,
    down: Callable[[ClientId | None], Payload],
    common: Counts,
    stop: Callable[[], bool],
    lose: Callable[[str], None] | None,
) -> dict[str, Any]:
    """Accuracy per client under its own label mix; a client's own view is evaluated only where it has one."""
    own = list(own_views(experiment, progress, down))
    views = _measure(experiment, force, stage, own, tasks, progress, down, stop, lose) if own else {}
    lost = set(own) - views.keys()
    accuracies, sizes = [], []
    for client in (client for client in progress.served if client not in lost):
        labels = experiment.plan.label_counts(client, stage).numpy()
        by_class = views.get(client, common).class_accuracy()
        accuracies.append(float(expected_accuracy(by_class, labels)[0]))
        sizes.append(int(labels.sum()))
    return spread(np.array(accuracies), np.array(sizes)).metrics()


def own_views(
    experiment: Experiment, progress: Progress, down: Callable[[ClientId | None], Payload]
) -> Iterator[ClientId]:
    """Clients that have taken part and whose view is not the global one: they keep a state or are sent another."""
    for client in progress.served if experiment.method.personal else ():
        if client in progress.versions or not _same_view(down(client), down(None)):
            yield client


def _same_view(a: Payload, b: Payload) -> bool:
    """True when both views are made of the very same tensors."""
    return a.keys() == b.keys() and all(a[f].keys() == b[f].keys() and all(a[f][n] is b[f][n] for n in a[f]) for f in a)
