"""The teacher of a stage: which model it is, for whom, and how often it travels."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from fedloom.core import Interrupted, Reply
from fedloom.core.payload import digest, nbytes
from fedloom.local.terms import CrossEntropy
from fedloom.methods.teachers import TEACHER, TaughtFedAvg, as_teacher
from toys.faults import AFTER, Fault
from toys.federation import experiment, local
from toys.running import resume, rows, start


@dataclass(frozen=True)
class Unlucky(TaughtFedAvg):
    """Clients that fail or are rejected on purpose; notes every teacher that was used, and what a stage began with."""

    faults: tuple[Fault, ...] = ()
    used: list[tuple[int, int, int, str]] = field(default_factory=list, compare=False)
    began: dict[int, str] = field(default_factory=dict, compare=False)

    def send(self, server, client, ctx):
        if client is not None:
            self.began.setdefault(ctx.stage.index, digest(as_teacher(server)))
        return super().send(server, client, ctx)

    def client_update(self, down, state, data, ctx):
        due = [fault for fault in self.faults if fault.due(ctx)]
        for fault in due:
            fault.before()
        update = super().client_update(down, state, data, ctx)
        if TEACHER.holds(update.state, ctx):
            seen = digest({name: update.state[name] for name in TEACHER.names})
            self.used.append((ctx.stage.index, ctx.round, ctx.client, seen))
        for fault in due:
            update = AFTER.get(fault.kind, lambda same: same)(update)
        return update


def unlucky(*faults: Fault, **plan: Any):
    whole = experiment("fedloom.methods.fedlwf:fedlwf", **{"num_clients": 5, "rounds": 3, "cohort": 0.4, **plan})
    return replace(whole, method=Unlucky(local(terms=(CrossEntropy("current"),)), faults=faults), rebuild=None)


def outcomes(whole, faults, stage, round):
    """Per client of a round: True where its update is accepted."""
    hit = [f for f in faults if (f.stage, f.round) == (stage, round)]
    return {c: not any(f.client in (None, c) for f in hit) for c in whole.draw(stage, round, "cohort")}


CASES = {
    "all well": (),
    "a client rejected in the first round": (Fault("nan", client=None, stage=1, round=0),),
    "one that fails": (Fault("raise", client=1, stage=1, round=1), Fault("raise", client=2, stage=2, round=0)),
    "a whole stage without replies": tuple(Fault("inf", stage=1, round=r) for r in range(3)),
    "a late stage rejected": (Fault("shape", stage=2, round=1), Fault("nan", client=0, stage=1, round=2)),
}


@pytest.mark.parametrize("cohort", [0.4, 1.0])
@pytest.mark.parametrize("faults", CASES.values(), ids=CASES.keys())
def test_the_old_model_is_the_teacher_and_travels_once_per_stage_and_client(faults, cohort, tmp_path: Path):
    whole = unlucky(*faults, cohort=cohort)
    start(tmp_path / "run", whole, min_replies=0)
    assert whole.method.used and {stage for stage, *_ in whole.method.used} == {1, 2}
    assert all(seen == whole.method.began[stage] for stage, _, _, seen in whole.method.used)
    told, ctx = iter(rows(tmp_path / "run")), whole.context(whole.net(), 0)
    server, class_rows = whole.method.init_server(ctx), whole.method.class_rows(ctx)
    for stage in range(3):
        seen = whole.plan.stage(stage).seen
        model = nbytes({f: server[f] for f in ("params", "buffers")}, class_rows, seen)
        assert nbytes({name: server[name] for name in TEACHER.names}, class_rows, seen) == model
        holders, merged = set(), False
        for round in range(3):
            replied = outcomes(whole, faults, stage, round)
            extra = sum(c not in holders for c in replied) if merged and stage else 0
            assert next(told)["bytes_down"] == (len(replied) + extra) * model, (stage, round)
            holders |= {c for c, fine in replied.items() if fine}
            merged = merged or any(replied.values())


def test_somebody_was_away_for_two_stages_and_is_taught_by_the_newest_model(tmp_path: Path):
    whole = unlucky(num_clients=8, num_stages=6, rounds=2, cohort=1)
    start(tmp_path / "run", whole)
    stages = {c: sorted({s for s, _, client, _ in whole.method.used if client == c}) for c in range(8)}
    assert any(b - a > 2 for asked in stages.values() for a, b in pairwise(asked)), stages
    assert all(seen == whole.method.began[stage] for stage, _, _, seen in whole.method.used)
    assert len(set(whole.method.began.values())) == 6


def test_a_run_that_goes_on_inside_a_stage_knows_the_teacher(tmp_path: Path):
    whole = start(tmp_path / "whole", unlucky())
    cut = unlucky(Fault("interrupt", stage=1, round=1, once=str(tmp_path / "once")))
    with pytest.raises(Interrupted):
        start(tmp_path / "cut", cut)
    assert resume(tmp_path / "cut", unlucky())["state_sha256"] == whole["state_sha256"]


def test_a_client_s_state_is_written_once_per_stage():
    whole, method = unlucky(), unlucky().method
    ctx = whole.context(whole.net(), 1, round=0, client=0)
    server, data = method.init_server(ctx), whole.plan.train(0, 1, 0, "train")
    first = method.client_update(method.send(server, 0, ctx), {}, data, ctx)
    again = method.client_update(method.send(server, 0, ctx), first.state, data, replace(ctx, round=1))
    assert again.state is first.state and set(first.up) == set(method.reveals)


def test_the_first_merge_of_a_stage_makes_the_model_before_it_the_teacher():
    whole, method = unlucky(), unlucky().method
    ctx = whole.context(whole.net(), 1, round=2)
    server = method.init_server(ctx)
    moved = {name: tensor + 1 for name, tensor in server["params"].items()}
    new = method.server_update(server, [Reply(3, 2.0, {"params": moved, "buffers": server["buffers"]}, {})], ctx)
    assert all(torch.equal(new["teacher_params"][name], tensor) for name, tensor in server["params"].items())
    assert new["holders"]["clients"].tolist() == [False, False, False, True, False]
    third = method.server_update(new, [Reply(0, 2.0, {"params": moved, "buffers": server["buffers"]}, {})], ctx)
    assert all(third["teacher_params"][name] is tensor for name, tensor in new["teacher_params"].items())
    assert method.send(new, None, ctx).keys() == method.send(new, 3, ctx).keys() == {"params", "buffers"}
    assert method.send(new, 0, ctx).keys() == {"params", "buffers", "teacher_params", "teacher_buffers"}
