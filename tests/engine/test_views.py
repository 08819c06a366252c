"""Views of the data plan: what a pooled one holds at each stage, and that its budget is exactly the stream's."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from fedloom.core import Batches, ConfigError, Forward
from fedloom.data import from_arrays, make_plan
from fedloom.engine.experiment import Experiment
from fedloom.engine.views import VIEWS, PooledCumulative, stream_of, viewed
from fedloom.methods.fedavg import FedAvg
from fedloom.select.sampling import uniform_cohort
from toys.domains import source
from toys.federation import BlobPlan, BlobSpec, local, method_of
from toys.running import rows, start

JOINT, FEDAVG = "fedloom.methods.joint:joint", "fedloom.methods.fedavg:fedavg"
EPOCHS = 2  # of the toys' local training


def stream(partition: dict[str, Any] | None = None, rounds: int = 3, **options: Any) -> Any:
    """A real plan over 240 examples of six classes."""
    x, y = torch.randn(240, 2, generator=torch.Generator().manual_seed(1)), torch.arange(240) % 6
    dealing = {"kind": "dirichlet", "alpha": 0.4, "clients": 6, **(partition or {})}
    whole = from_arrays((x.numpy(), y.numpy(), x[:60].numpy(), y[:60].numpy()))
    return make_plan(whole, stream={"tasks": 3, **options}, partition=dealing, rounds=rounds)


def domains(partition: dict[str, Any] | None = None, **options: Any) -> Any:
    """Four domains of six classes, which arrive one after another."""
    dealing = {"kind": "single", "clients": 6, **(partition or {})}
    return make_plan(source(), stream={"kind": "domain_incremental", **options}, partition=dealing, rounds=2)


def whole(plan: Any, name: str = JOINT, cohort: int | float = 0.5, **more: Any) -> Experiment:
    spec = BlobSpec(plan.num_classes, norm=False)  # clients of one example train as well
    return Experiment(method_of(name), spec, Forward(), plan, uniform_cohort, 0, cohort, **more)


PLANS = {
    "equal clients": lambda: stream({"kind": "iid"}),
    "unequal clients": stream,
    "empty clients": lambda: stream({"alpha": 0.01, "clients": 30}),
    "shifted arrival": lambda: stream(arrival="shifted", shift=2),
    "an order per client": lambda: stream(arrival="per_client"),
    "a schedule": lambda: stream(arrival={0: {0: 0, 3: 2}, 4: {2: 1}}, stages=5),
    "domains one by one": lambda: domains(),
    "domains in other orders": lambda: domains({"kind": "k_domains", "cover": 2}, arrival="per_client"),
    "one client": lambda: stream({"clients": 1}),
    "blobs": BlobPlan,
    "an idle stage": lambda: BlobPlan(idle=(1,)),
    "an idle start": lambda: BlobPlan(idle=(0,)),
    "clients that hold nothing": lambda: BlobPlan(empty=(1,), hollow=(0, 2)),
    "nobody holds anything": lambda: BlobPlan(hollow=(0, 1, 2, 3), num_stages=2),
}


@pytest.fixture(params=PLANS)
def plan(request: pytest.FixtureRequest) -> Any:
    return PLANS[request.param]()


def held(plan: Any, stage: int) -> set[tuple[float, ...]]:
    """What all clients have held up to a stage, as inputs and labels; equal ones are one."""
    found = set()
    for s in range(stage + 1):
        for client in range(plan.num_clients):
            x, y = plan.train(client, s, None, "train").stored(torch.arange(plan.size(client, s)))
            found |= {(*row, float(label)) for row, label in zip(x.tolist(), y.tolist(), strict=True)}
    return found


def test_the_pool_is_what_all_clients_have_held_up_to_the_stage(plan: Any):
    view, before = whole(plan).plan, 0
    for stage in reversed(range(plan.num_stages)):  # asked in any order
        pool = view.train(0, stage, None, "train")
        x, y = pool.stored(torch.arange(len(pool)))
        assert {(*row, float(label)) for row, label in zip(x.tolist(), y.tolist(), strict=True)} == held(plan, stage)
        assert len(pool) == view.size(0, stage) == len(held(plan, stage)), "an example is in the pool twice"
    for stage in range(plan.num_stages):
        counts = view.label_counts(0, stage)
        labels = [int(row[-1]) for row in held(plan, stage)]
        assert counts.dtype == torch.int64 and counts.tolist() == [labels.count(c) for c in range(plan.num_classes)]
        assert view.size(0, stage) >= before
        before = view.size(0, stage)


@pytest.mark.parametrize("cohort", [1, 3, 0.3, 1.0])
def test_sample_visits_equal_those_of_the_stream_in_every_round(plan: Any, cohort: int | float, tmp_path: Path):
    found, clients = {}, {}
    for name in (FEDAVG, JOINT):
        folder = tmp_path / name.partition(":")[2]
        summary = start(folder, whole(plan, name, cohort), checkpoint_every=0)
        found[name] = {(row["stage"], row["round"]): row["sample_visits"] for row in rows(folder)}
        clients[name] = {(row["stage"], row["round"]): row["clients"] for row in rows(folder)}
        assert summary["sample_visits"] == sum(found[name].values())
        assert summary["failed_clients"] == summary["rejected_updates"] == 0
    assert found[JOINT] == found[FEDAVG]
    assert clients[JOINT] == {place: min(1, count) for place, count in clients[FEDAVG].items()}
    for (stage, round_), visits in found[JOINT].items():
        drawn = whole(plan, FEDAVG, cohort).draw(stage, round_, "cohort")
        assert visits == EPOCHS * sum(plan.size(c, stage) for c in drawn)
    some = any(plan.size(c, s) for c in range(plan.num_clients) for s in range(plan.num_stages))
    assert (sum(found[JOINT].values()) > 0) == some


def test_where_nobody_works_the_pool_does_not_either():
    idle = whole(BlobPlan(idle=(1,))).plan
    assert [list(idle.participants(s)) for s in range(3)] == [[0], [], [0]]
    assert idle.size(0, 1) == idle.size(0, 0) < idle.size(0, 2)
    hollow = whole(BlobPlan(hollow=(0, 1, 2, 3))).plan
    assert list(hollow.participants(0)) == [0] and len(list(hollow.train(0, 0, 0, "train").epoch())) == 0


def test_stages_are_the_plans_and_everything_seen_is_current_to_the_one_client():
    plan = stream(arrival="shifted", shift=2, class_order="natural")
    view = whole(plan).plan
    assert (view.num_clients, view.num_stages, view.rounds) == (1, 5, 3)
    for index in range(5):
        assert view.stage(index) == plan.stage(index)
        assert view.stage(index, 0) == dataclasses.replace(plan.stage(index), classes=plan.stage(index).seen)
    assert view.stage(1, 0).classes == (0, 1, 2, 3) and view.stage(1, 0).old == (0, 1)


def test_the_pool_of_a_stream_of_domains_holds_every_domain_so_far():
    plan = domains(domain_order=[2, 0, 3, 1])
    view = whole(plan).plan
    for stage, seen in enumerate([[2], [0, 2], [0, 2, 3], [0, 1, 2, 3]]):
        pool = view.train(0, stage, None, "train")
        assert {domain: len(part) for domain, part in pool.by_domain().items()} == dict.fromkeys(seen, 60)
        counts = view.domain_counts(0, stage)
        assert counts.dtype == torch.int64 and counts.tolist() == [[10 * (d in seen)] * 6 for d in range(4)]
        assert torch.equal(counts.sum(0), view.label_counts(0, stage))
        assert view.stage(stage, 0).domains == tuple(seen)
        assert view.stage(stage) == plan.stage(stage)
    assert view.task_domains == ((2,), (0,), (3,), (1,)) and len(view.test(1, 0)) == 30
    assert whole(stream()).plan.domain_counts(0, 2).tolist() == [[40] * 6], "one row without domains"
    held = sum(BlobPlan().domain_counts(client, 2) for client in range(4))
    assert torch.equal(whole(BlobPlan()).plan.domain_counts(0, 2), held)


def test_what_does_not_depend_on_who_holds_the_data_is_the_plans_own(tmp_path: Path):
    plan = stream()
    view = whole(plan).plan
    assert view.fingerprint() == plan.fingerprint() and view.describe() == plan.describe()
    assert view.tasks is plan.tasks and view.num_classes == 6
    assert torch.equal(view.test(1).labels, plan.test(1).labels)
    assert view.draw(tmp_path / "picture.png").exists()
    assert view.notes == (
        *plan.notes,
        "the method pools the data: one client holds what the 6 clients have held up to each stage",
    )
    for name in ("rows", "task_of", "stage_counts", "no_such_thing"):
        with pytest.raises(AttributeError):
            getattr(view, name)
    assert copy.copy(view).num_classes == 6


def order(data: Batches, epochs: int = 1) -> list[int]:
    return [i for e in range(epochs) for b in data.epoch(e) for i in b.index.tolist()]


def test_every_round_draws_a_pass_of_its_own_from_the_pool():
    view = whole(stream(), cohort=1.0).plan
    first = view.train(0, 2, 0, "train")
    assert len(first) == 240 and first.steps(1) == stream().size(0, 2) + sum(stream().size(c, 2) for c in range(1, 6))
    assert order(first) == order(whole(stream(), cohort=1.0).plan.train(0, 2, 0, "train")), "another process sees more"
    others = [view.train(0, 2, 1, "train"), view.train(0, 2, 0, "measure"), view.train(0, 1, 0, "train")]
    assert all(order(first) != order(other) for other in others)
    assert len(set(order(first, 3))) == 240, "three epochs of a third of the pool are one pass"
    assert sorted(order(view.train(0, 2, None, "consolidate"))) == list(range(240)), "without a round there is no quota"
    list(first.epoch(0))
    assert view.train(0, 2, 0, "train").visits.count == 0, "every piece of work counts for itself"


@dataclasses.dataclass(frozen=True)
class Odd(FedAvg):
    data_view: ClassVar[str] = "pooled_cumulativ"


def test_an_unknown_view_is_refused_with_the_closest():
    made = whole(BlobPlan())
    with pytest.raises(ConfigError, match="unknown data view of the method 'pooled_cumulativ'") as caught:
        dataclasses.replace(made, method=Odd(local()))
    assert "Did you mean 'pooled_cumulative'?" in str(caught.value)


def test_a_view_is_never_put_on_a_view():
    plan = BlobPlan()
    made = whole(plan)
    assert isinstance(made.plan, PooledCumulative) and made.plan.plan is plan and stream_of(made.plan) is plan
    assert stream_of(plan) is plan and whole(plan, FEDAVG).plan is plan
    again = dataclasses.replace(made, cohort=1)
    assert again.plan.plan is plan
    assert again.plan.train(0, 0, 0, "train").steps(1) < made.plan.train(0, 0, 0, "train").steps(1), "an old cohort"
    assert dataclasses.replace(made, method=method_of(FEDAVG)).plan is plan
    for view in VIEWS:
        assert stream_of(viewed(viewed(plan, "pooled_cumulative", made.plan.cohort), view, made.plan.cohort)) is plan


class Apart(BlobPlan):
    """Every client has a data set of its own."""

    def train(self, client: int, stage: int, round: int | None, exchange: str) -> Batches:
        data = super().train(client, stage, round, exchange)
        return Batches(*data.stored(torch.arange(len(data))), torch.arange(len(data)), key=(), prepare=lambda x, r: x)


def test_clients_with_data_sets_of_their_own_cannot_be_pooled(tmp_path: Path):
    assert start(tmp_path / "stream", whole(Apart(), FEDAVG))["rounds"] == 6
    with pytest.raises(ConfigError, match="can be pooled only where they are rows of one data set"):
        start(tmp_path / "pooled", whole(Apart()))
