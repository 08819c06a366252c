"""What a stage's row says: every accuracy has a name that tells its population."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedloom.core import Batches, Stage
from fedloom.engine.checkpoint import newest
from fedloom.engine.experiment import Experiment
from fedloom.engine.store import ClientStore
from fedloom.evaluate.domain import domain_summary
from toys.federation import BlobPlan, _domains, experiment
from toys.running import rows, start

FEDAVG, TALLY = "fedloom.methods.fedavg:fedavg", "toys.tally:tally"
OF_DOMAINS = ("seen_domains", "accuracy/domains", "accuracy/domains_personal")


def federation(name: str = FEDAVG, plan: Any = None) -> Experiment:
    whole = experiment(name, num_clients=3, cohort=1)
    return whole if plan is None else dataclasses.replace(whole, plan=plan, rebuild=None)


def stage_rows(path: Path, **options) -> list[dict]:
    start(path, federation(), **options)
    return rows(path, "stage")


@dataclass(frozen=True)
class Plain(BlobPlan):
    """The same examples, and nobody says which domain they are of."""

    domains = ()

    def stage(self, index: int, client: int | None = None) -> Stage:
        return dataclasses.replace(super().stage(index, client), domains=(), seen_domains=(), old_domains=())

    def domain_counts(self, client: int, stage: int) -> torch.Tensor:
        return self.label_counts(client, stage)[None]


@dataclass(frozen=True)
class OneDomain(BlobPlan):
    """The same examples, all of them of one domain."""

    domains = ("everywhere",)

    def stage(self, index: int, client: int | None = None) -> Stage:
        return dataclasses.replace(super().stage(index, client), domains=(0,), seen_domains=(0,), old_domains=(0,))

    def test(self, task: int, domain: int | None = None) -> Batches:
        return super().test(task)

    def domain_counts(self, client: int, stage: int) -> torch.Tensor:
        return self.label_counts(client, stage)[None]


@dataclass(frozen=True)
class DomainStream(BlobPlan):
    """A stream of two domains, all classes in both; the second has half as many test examples."""

    num_stages: int = 2

    @property
    def tasks(self) -> list[list[int]]:
        return [list(range(self.num_classes)) for _ in self.domains]

    def stage(self, index: int, client: int | None = None) -> Stage:
        every, seen = tuple(range(self.num_classes)), (0, 1)[: index + 1]
        return Stage(index, 2, self.rounds, every, every, every if index else (), (index,), seen, seen[:-1])

    def _indices(self, client: int, stage: int) -> torch.Tensor:
        whole = super()._indices(client, stage)
        return whole[_domains(self._pool("train")[1])[whole] == stage]

    def test(self, task: int, domain: int | None = None) -> Batches:
        whole = super().test(task, task)
        if domain not in (None, task):
            return whole.part(0, 0)
        return whole.subset(torch.arange(0, len(whole), 2)) if task else whole


@dataclass(frozen=True)
class Scarce(BlobPlan):
    """Client 0 holds the first domain alone, nobody holds the second; of a third there are no examples at all."""

    domains = ("here", "there", "nowhere")

    def stage(self, index: int, client: int | None = None) -> Stage:
        return dataclasses.replace(
            super().stage(index, client), **dict.fromkeys(("domains", "seen_domains"), (0, 1, 2))
        )

    def _indices(self, client: int, stage: int) -> torch.Tensor:
        whole = super()._indices(client, stage)
        return whole[_domains(self._pool("train")[1])[whole] == 0]


def correct(whole: Experiment, path: Path, client: int | None) -> tuple[np.ndarray, np.ndarray]:
    """(correct, total) [domains, classes] of a view after the last stage, by direct prediction."""
    server, progress = newest(path)
    net, plan, version = whole.net(), whole.plan, progress.versions.get(client)
    ctx = whole.context(net, plan.num_stages - 1, exchange="evaluate", client=client)
    kept = None if client is None else ClientStore(path / "clients").load(client, version)
    state, down = kept or whole.method.init_client(ctx), whole.method.send(server, client, ctx)
    hits, total = np.zeros((2, len(plan.domains), plan.num_classes), np.int64)
    for task in range(len(plan.tasks)):
        for k in range(len(plan.domains)):
            for x, y, _ in plan.test(task, k).epoch(batch_size=7, shuffle=False):
                right = whole.method.predict(down, state, x, ctx).argmax(1) == y
                np.add.at(hits[k], y[right].numpy(), 1)
                np.add.at(total[k], y.numpy(), 1)
    return hits, total


def test_accuracies_are_named_by_their_population(tmp_path: Path):
    """Every client that has taken part is asked, not the last cohort; means by examples and by clients have names."""
    found, served = stage_rows(tmp_path / "run"), set()
    whole = federation()
    assert [row["stage"] for row in found] == [0, 1, 2]
    for row in found:
        served |= {client for r in range(2) for client in whole.draw(row["stage"], r, "cohort")}
        assert row["accuracy/clients"] == len(served)
        assert {"accuracy", "accuracy/weighted", "accuracy/client_mean", "accuracy/client_worst10"} <= row.keys()
        tasks = [value for value in row["accuracy/tasks"] if value is not None]
        assert (
            len(tasks) == row["stage"] + 1 and len(row["accuracy/tasks"]) == 3 and row["seen_classes"] == 2 * len(tasks)
        )
        assert row["accuracy"] == pytest.approx(sum(tasks) / len(tasks)), "test sets of equal size"
        assert row["accuracy/current"] == tasks[-1]
        assert row["accuracy"] <= row["accuracy/within_task"] <= 1, "knowing the task can only help"
    assert len(served) > 1, "more than one cohort"
    assert found[0]["accuracy"] == found[0]["accuracy/within_task"]


def test_personal_views_can_be_left_out(tmp_path: Path):
    whole, bare = stage_rows(tmp_path / "whole"), stage_rows(tmp_path / "bare", personal=False)
    assert [row["accuracy"] for row in whole] == [row["accuracy"] for row in bare]
    assert [row["accuracy/domains"] for row in whole] == [row["accuracy/domains"] for row in bare]
    assert not any(key.startswith("accuracy/client") for row in bare for key in row if row[key] is not None)
    assert not any("accuracy/domains_personal" in row for row in bare)


@pytest.mark.parametrize("name", [FEDAVG, TALLY])
def test_accuracies_of_domains_are_those_of_direct_prediction(name: str, tmp_path: Path):
    """Of the global view, and of every client's own over its mix of domains and classes."""
    whole = federation(name)
    summary, row = start(tmp_path, whole), rows(tmp_path, "stage")[-1]
    hits, total = correct(whole, tmp_path, None)
    assert row["accuracy"] == hits.sum() / total.sum() and row["seen_domains"] == 2
    each = dict(zip(("here", "there"), (hits.sum(1) / total.sum(1)).tolist(), strict=True))
    assert row["accuracy/domains"] == summary["domain_accuracy"] == each
    assert {key: summary[key] for key in domain_summary({})} == domain_summary(each)
    held = [whole.plan.domain_counts(client, 2).numpy() for client in range(3)]
    cells = [np.divide(*correct(whole, tmp_path, client)) for client in range(3)]
    mixed = [(counts * cell).sum() / counts.sum() for counts, cell in zip(held, cells, strict=True)]
    assert row["accuracy/client_mean"] == pytest.approx(np.mean(mixed), abs=1e-12)
    sizes = [counts.sum() for counts in held]
    assert row["accuracy/weighted"] == pytest.approx(np.average(mixed, weights=sizes), abs=1e-12)
    own = [[np.average(cell[k], weights=total[k]) for cell in cells] for k in (0, 1)]  # every client holds both
    assert list(row["accuracy/domains_personal"].values()) == pytest.approx([np.mean(v) for v in own], abs=1e-12)
    assert summary["personal_domain_accuracy"] == row["accuracy/domains_personal"]
    assert summary["personal_domain_mean"] == pytest.approx(np.mean(own))
    differs = any(abs(a - b) > 1e-9 for a, b in zip(row["accuracy/domains_personal"].values(), each.values()))  # noqa: B905
    assert differs == (name == TALLY)


def test_what_the_labels_of_domains_add_changes_nothing_else(tmp_path: Path):
    """The counts of the domains sum up to those without; of one domain even the clients' values are the same."""
    given = {}
    for plan in (BlobPlan, Plain, OneDomain):
        summary = start(tmp_path / plan.__name__, federation(TALLY, plan(num_clients=3)))
        given[plan] = summary, rows(tmp_path / plan.__name__, "stage")
    for summary, found in given.values():
        assert summary["accuracy_matrix"] == given[Plain][0]["accuracy_matrix"]
        for row, plain in zip(found, given[Plain][1], strict=True):
            same = [key for key in plain if "client" not in key and "weighted" not in key]
            assert {key: row[key] for key in same} == {key: plain[key] for key in same}
    assert [{k: v for k, v in row.items() if k not in OF_DOMAINS} for row in given[OneDomain][1]] == given[Plain][1]
    assert not any(key in row for row in given[Plain][1] for key in OF_DOMAINS)
    summary, alone = given[Plain][0], given[OneDomain][0]
    assert all(summary[key] is None for key in summary if "domain" in key)
    assert alone["domain_accuracy"] == {"everywhere": alone["final_accuracy"]}
    assert alone["domain_std"] == 0 and alone["domain_std_ddof1"] is None


def test_in_a_stream_of_domains_the_tasks_are_the_domains(tmp_path: Path):
    plan = DomainStream(num_clients=3)
    summary = start(tmp_path, federation(plan=plan))
    first, last = rows(tmp_path, "stage")
    assert (first["seen_classes"], first["seen_domains"], last["seen_classes"], last["seen_domains"]) == (6, 1, 6, 2)
    assert first["accuracy/tasks"] == [first["accuracy"], None] == list(first["accuracy/domains"].values())
    assert first["accuracy/current"] == first["accuracy"]
    here, there = last["accuracy/tasks"]
    assert last["accuracy/domains"] == {"here": here, "there": there} == summary["domain_accuracy"]
    assert last["accuracy/current"] == there != here, "current is the domain that has arrived"
    assert (len(plan.test(0)), len(plan.test(1))) == (120, 60)
    assert last["accuracy"] == pytest.approx((2 * here + there) / 3) == summary["final_accuracy"]
    assert summary["domain_mean"] == pytest.approx((here + there) / 2) != summary["final_accuracy"]
    assert summary["accuracy_matrix"] == [[first["accuracy"], None], [here, there]]
    assert summary["forgetting"] == pytest.approx(first["accuracy"] - here)
    assert last["accuracy"] == last["accuracy/within_task"], "all classes are in every task"


@pytest.mark.parametrize("name", [FEDAVG, TALLY])
def test_a_domain_that_nobody_holds_is_evaluated_and_counts_for_no_client(name: str, tmp_path: Path):
    summary = start(tmp_path, federation(name, Scarce(num_clients=3)))
    row = rows(tmp_path, "stage")[-1]
    each, own = row["accuracy/domains"], row["accuracy/domains_personal"]
    assert each["here"] > 0 and each["there"] is not None and each["nowhere"] is None
    assert own["here"] > 0 and own["there"] is own["nowhere"] is None
    assert summary["domain_mean"] == pytest.approx((each["here"] + each["there"]) / 2)
    assert summary["domain_worst"] == min(each["here"], each["there"])
    assert summary["personal_domain_mean"] == summary["personal_domain_worst"] == own["here"]
    assert summary["personal_domain_std_ddof1"] is None
    assert name == TALLY or math.isclose(own["here"], each["here"])


def test_data_with_domains_that_nobody_holds_anything_of(tmp_path: Path):
    summary = start(tmp_path, federation(plan=BlobPlan(num_clients=3, empty=(0, 1, 2))))
    row = rows(tmp_path, "stage")[-1]
    assert row["accuracy/domains_personal"] == {"here": None, "there": None} and row["accuracy/clients"] == 0
    assert summary["personal_domain_mean"] is None and summary["domain_mean"] is not None
