"""Evaluation of one stage: the global view on every part of the test set that has arrived, and each client's own view
where it differs.

A part is the examples of one task and, where the data have domains, of one of these: counts are kept per part and
summed to accuracies per task, per domain and overall.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from fedloom.core import ClientId, DataPlan, Payload, RunError, Stage
from fedloom.engine.checkpoint import Progress
from fedloom.engine.experiment import Experiment
from fedloom.engine.force import Force
from fedloom.engine.runtime import CHUNK, Failed, Measured, Probe
from fedloom.evaluate.domain import holders_mean
from fedloom.evaluate.measures import Sums, summed, values
from fedloom.evaluate.parts import Part, PartCounts
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

    Accuracy is over the test examples of every class and domain seen so far, without task or domain id; that of the
    current ones is over what arrived with the stage. "measures" are the network's own, of the global view, over the
    tasks and domains that have arrived (see `fedloom.evaluate.measures`); None where it has none. With `final` the row
    of the accuracy matrix is kept in `progress`. Clients are those that have taken part.
    lose: told of a client whose view cannot be had, which is then left out; without it, that ends the run.
    """
    plan, context = experiment.plan, force.runtime.context
    here, names = plan.stage(stage), plan.domains

    def down(client: ClientId | None) -> Payload:
        return experiment.method.send(server, client, context(stage, exchange="evaluate", client=client))

    found = _measure(experiment, force, stage, [None], progress, down, stop)[None]
    total, accuracies = found.total(), found.task_accuracies(len(plan.tasks))
    row: dict[str, Any] = {"stage": stage, "round": None, "exchange": None, "scope": "stage"}
    row |= {
        "accuracy": total.accuracy(),
        "accuracy/current": found.total(domains=here.domains if names else None).accuracy(here.classes),
        "accuracy/within_task": total.accuracy_within_task(),
        "accuracy/tasks": accuracies,
        "measures": values(found.measures) or None,
        "unseen": total.unseen,
        "seen_classes": len(here.seen),
    }
    if names:
        row["seen_domains"] = len(here.seen_domains)
        row["accuracy/domains"] = dict(zip(names, found.domain_accuracies(len(names)), strict=True))
    if personal:
        row |= _clients(experiment, force, stage, progress, down, found, stop, lose)
    if final:
        progress.matrix.append(accuracies)
        progress.test_counts = [len(plan.test(j)) for j in range(len(plan.tasks))]
        progress.last_stage_row = row
    return row


def _arrived(plan: DataPlan, stage: Stage) -> dict[Part, int]:
    """Parts of the test set that have arrived by a stage, with their numbers of examples, empty ones left out."""
    seen = set(stage.seen)
    tasks = [j for j, classes in enumerate(plan.tasks) if seen & set(classes)]
    if not plan.domains:
        sizes = {Part(j): len(plan.test(j)) for j in tasks}
    else:
        sizes = {Part(j, k): len(plan.test(j, k)) for j in tasks for k in stage.seen_domains}
    return {part: size for part, size in sizes.items() if size}


def _measure(
    experiment: Experiment,
    force: Force,
    stage: int,
    clients: Sequence[ClientId | None],
    progress: Progress,
    down: Callable[[ClientId | None], Payload],
    stop: Callable[[], bool],
    lose: Callable[[str], None] | None = None,
) -> dict[ClientId | None, PartCounts]:
    """Counts per client (None: the global view) over the parts that have arrived; without clients that were lost."""
    plan, sizes = experiment.plan, _arrived(experiment.plan, experiment.plan.stage(stage))
    probes = []
    for client in clients:
        state = None if client is None else progress.versions.get(client)
        for part, size in sizes.items():
            for start in range(0, size, CHUNK):
                stop_at = min(start + CHUNK, size)
                probes.append(Probe(client, stage, part.task, start, stop_at, state, stop_at - start, part.domain))
    found: dict[ClientId | None, dict[Part, Counts]] = {client: {} for client in clients}
    sums: dict[ClientId | None, list[Sums]] = {client: [] for client in clients}
    lost: set[ClientId | None] = set()
    for answer in force.carry_out(probes, down, stop=stop):
        if isinstance(answer, Failed):
            cause = _failed(answer, stage, fatal=not answer.lost or lose is None)
            if lose is not None and answer.client not in lost:
                lose(cause)
            lost.add(answer.client)
            continue
        assert isinstance(answer, Measured)
        counts, part = found[answer.client], Part(answer.task, answer.domain)
        counts[part] = counts[part] + answer.counts if part in counts else answer.counts
        sums[answer.client].append(answer.measures)
    return {k: PartCounts(plan.num_classes, found[k], summed(sums[k])) for k in found if k not in lost}


def _failed(answer: Failed, stage: int, *, fatal: bool) -> str:
    """What is told of a view that cannot be had; `RunError` where the run cannot go on without it."""
    view = "the global view" if answer.client is None else f"the view of client {answer.client}"
    cause = f"evaluation of {view} at stage {stage} failed: {answer.reason}"
    if fatal:
        error = RunError(answer.reason if answer.fatal else cause)
        error.add_note(answer.trace)
        raise error
    return cause


def _clients(
    experiment: Experiment,
    force: Force,
    stage: int,
    progress: Progress,
    down: Callable[[ClientId | None], Payload],
    common: PartCounts,
    stop: Callable[[], bool],
    lose: Callable[[str], None] | None,
) -> dict[str, Any]:
    """Accuracy per client under its own mix of classes and domains, and per domain over the clients that hold it.

    A client's own view is evaluated only where it has one.
    """
    plan, domains = experiment.plan, len(experiment.plan.domains)
    own = list(own_views(experiment, progress, down))
    views = _measure(experiment, force, stage, own, progress, down, stop, lose) if own else {}
    lost = set(own) - views.keys()
    clients = [client for client in progress.served if client not in lost]
    held = [_held(plan, client, stage) for client in clients]
    shared, cells = common.cell_accuracy(domains), {c: view.cell_accuracy(domains) for c, view in views.items()}
    accuracies = [
        float(expected_accuracy(cells.get(client, shared).ravel(), counts.ravel())[0])
        for client, counts in zip(clients, held, strict=True)
    ]
    row = spread(np.array(accuracies), np.array([int(counts.sum()) for counts in held])).metrics()
    if not domains:
        return row
    per_domain = [views.get(client, common).domain_accuracies(domains) for client in clients]
    means = holders_mean(
        np.array(per_domain, np.float64).reshape(-1, domains),
        np.array([counts.sum(1) for counts in held]).reshape(-1, domains),
    )
    return {**row, "accuracy/domains_personal": dict(zip(plan.domains, means, strict=True))}


def _held(plan: DataPlan, client: ClientId, stage: int) -> np.ndarray:
    """int64 [domains, classes], one row without domains: the examples that a client has held up to the stage."""
    if plan.domains:
        return plan.domain_counts(client, stage).numpy()
    return plan.label_counts(client, stage).numpy()[None]


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
