"""How many training examples were handed out: measured where the work is done, whoever does it and however it ends."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from fedloom.core import Batches, Context, Payload, Update
from fedloom.engine.checkpoint import Progress, newest
from fedloom.engine.experiment import Options
from fedloom.engine.folder import RunFolder
from fedloom.methods.fedavg import FedAvg
from toys.faults import Fault
from toys.federation import experiment, local
from toys.running import Notes, resume, rows, start

FAULTY, EPOCHS = "toys.faults:faulty", 2


def faulty(*faults: Fault, **plan: Any) -> Any:
    return experiment(FAULTY, options={"faults": faults}, **{"cohort": 1.0, **plan})


def visits(folder: Path) -> dict[tuple[int, int | None], int]:
    return {(row["stage"], row["round"]): row["sample_visits"] for row in rows(folder)}


def expected(made: Any, *absent: tuple[int, int, int]) -> dict[tuple[int, int | None], int]:
    """Examples of everybody at work, once per epoch. absent: (stage, round, client)."""
    found: dict[tuple[int, int | None], int] = {}
    for stage in range(made.plan.num_stages):
        found[stage, None] = 0  # the census looks at labels alone
        for r in range(made.plan.rounds):
            cohort = [c for c in made.draw(stage, r, "cohort") if (stage, r, c) not in absent]
            found[stage, r] = EPOCHS * sum(made.plan.size(c, stage) for c in cohort)
    return found


@pytest.mark.parametrize("cohort", [1.0, 0.5, 3])
def test_every_example_handed_out_counts_once_per_epoch(cohort: float, tmp_path: Path):
    made = faulty(cohort=cohort)
    summary = start(tmp_path / "run", made)
    assert visits(tmp_path / "run") == expected(made)
    assert summary["sample_visits"] == sum(expected(made).values()) > 0


def test_the_number_is_that_of_any_engine(tmp_path: Path):
    pytest.importorskip("flwr")
    from fedloom.engine.flower import inprocess

    made = faulty(num_clients=6, per_class=60)
    start(tmp_path / "two", made, workers=2)
    with RunFolder.create(tmp_path / "grid", {"toy": True}, {}) as folder:
        grid = inprocess.run(made, Options(), folder, [], {"config": {}, "model": {}})
    assert visits(tmp_path / "two") == visits(tmp_path / "grid") == expected(made)
    assert grid["sample_visits"] == sum(expected(made).values())


def test_a_rejected_update_has_visited_what_it_has_and_a_failed_client_nothing(tmp_path: Path):
    faults = Fault("nan", client=1, stage=0, round=1), Fault("raise", client=2, stage=1, round=0)
    made = faulty(*faults)
    summary = start(tmp_path / "run", made)
    assert (summary["rejected_updates"], summary["failed_clients"]) == (1, 1)
    assert visits(tmp_path / "run") == expected(made, (1, 0, 2))


def test_a_retried_client_counts_once(tmp_path: Path):
    made = faulty(Fault("raise", client=2, stage=1, round=0, once=str(tmp_path / "happened")))
    summary = start(tmp_path / "run", made, on_client_failure="retry", retries=1)
    assert (tmp_path / "happened").exists() and summary["failed_clients"] == 0
    assert visits(tmp_path / "run") == expected(made)


def test_work_that_another_process_repeats_counts_once(tmp_path: Path):
    made = faulty(Fault("kill_worker", once=str(tmp_path / "happened")), rounds=10, num_stages=1)
    start(tmp_path / "run", made, [Notes()], workers=2)
    assert visits(tmp_path / "run") == expected(made)


@dataclasses.dataclass(frozen=True)
class Measuring(FedAvg):
    """Goes over its data once more before it trains, and trains on three examples of them twice."""

    def client_update(self, down: Payload, state: Payload, data: Batches, ctx: Context) -> Update:
        for _ in data.epoch(purpose="measure", shuffle=False):
            pass
        x, y = data.stored(torch.arange(3))
        return super().client_update(down, state, data.joined(x, y), ctx)


def test_another_pass_and_examples_that_are_joined_count_too(tmp_path: Path):
    made = dataclasses.replace(experiment("fedloom.methods.fedavg:fedavg", cohort=1.0), method=Measuring(local()))
    start(tmp_path / "run", made, evaluate_every=1)
    passes = {(row["stage"], row["round"]): row["pass_visits"] for row in rows(tmp_path / "run")}
    for (stage, round_), count in visits(tmp_path / "run").items():
        own = sum(made.plan.size(c, stage) for c in range(4))
        assert count == EPOCHS * (own + 4 * 3) and passes[stage, round_] == own


def test_the_count_goes_on_after_a_resume(tmp_path: Path):
    made = faulty()
    whole = start(tmp_path / "run", made, checkpoint_keep=100)
    points = sorted((tmp_path / "run" / "checkpoints").iterdir())
    for point in points[len(points) // 2 :]:
        shutil.rmtree(point)
    assert 0 < newest(tmp_path / "run")[1].sample_visits < whole["sample_visits"]
    assert resume(tmp_path / "run", faulty(), checkpoint_keep=100)["sample_visits"] == whole["sample_visits"]


def test_a_checkpoint_from_before_there_was_a_count_begins_at_nothing():
    record = json.loads(json.dumps(dict(vars(Progress(stage=1, versions={3: "a"}, bytes_up=7, sample_visits=9)))))
    assert Progress.of(record) == Progress(stage=1, versions={3: "a"}, bytes_up=7, sample_visits=9)
    del record["sample_visits"]
    assert Progress.of(record) == Progress(stage=1, versions={3: "a"}, bytes_up=7)
