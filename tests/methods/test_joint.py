"""Joint training: FedAvg on one client that holds everything, the budget of the stream, and what a user is shown."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

import fedloom
from fedloom import lifecycle
from fedloom.cli import app
from fedloom.core import ConfigError, Forward
from fedloom.core.payload import digest
from fedloom.data import from_arrays, make_plan
from fedloom.engine.experiment import Experiment
from fedloom.engine.files import load_payload
from fedloom.local.terms import CrossEntropy
from fedloom.methods.fedavg import fedavg
from fedloom.methods.joint import Joint, joint
from fedloom.select.sampling import uniform_cohort
from test_api import DIGITS
from toys.federation import BlobSpec, experiment, local
from toys.running import rows, start

JOINT, FEDAVG = "fedloom.methods.joint:joint", "fedloom.methods.fedavg:fedavg"
DEALT = {**DIGITS, "partition": {"kind": "dirichlet", "clients": 4}}


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "_pictures", lambda *args: None)


def everything(method: Any, clients: int, batch_size: int) -> Experiment:
    """One stage of three rounds over 120 examples of six classes, all clients in every round."""
    x, y = torch.randn(120, 2, generator=torch.Generator().manual_seed(1)), torch.arange(120) % 6
    source = from_arrays((x.numpy(), y.numpy(), x[:30].numpy(), y[:30].numpy()))
    plan = make_plan(source, stream={"kind": "static"}, partition={"kind": "iid", "clients": clients}, rounds=3)
    made = method(local=local(batch_size=batch_size))
    return Experiment(made, BlobSpec(norm=False), Forward(), plan, uniform_cohort)


def test_on_one_stage_with_everybody_it_is_fedavg_on_one_client_that_holds_everything(tmp_path: Path):
    """Full batches, whose order does not matter: the same steps, whoever holds the data in the stream."""
    for name, made in (("joint", everything(joint, 5, 200)), ("fedavg", everything(fedavg, 1, 200))):
        summary = start(tmp_path / name, made)
        assert summary["sample_visits"] == 3 * 2 * 120 and summary["clients"] == 1
    one, other = (load_payload(tmp_path / name / "model" / "model.safetensors") for name in ("joint", "fedavg"))
    for tensor, value in one["params"].items():
        assert torch.allclose(value, other["params"][tensor], atol=1e-5), tensor


def test_a_round_is_local_training_on_the_pool(tmp_path: Path):
    """Small batches too: with a quota of everything, the server takes over what the one client has trained."""
    made = everything(joint, 5, 8)
    start(tmp_path / "run", made)
    ctx = made.context(made.net(), 0)
    state = ctx.init_state()
    for r in range(3):
        data = made.plan.train(0, 0, r, "train")
        assert data.steps(8) == 15
        end = made.method.local(state, data, replace(ctx, round=r, client=0))
        state = {"params": end.params, "buffers": end.buffers}
    assert digest(state) == digest(load_payload(tmp_path / "run" / "model" / "model.safetensors"))


def test_it_goes_on_from_stage_to_stage_and_forgets_less_than_fedavg_with_the_same_visits(tmp_path: Path):
    found = {}
    for name in (JOINT, FEDAVG):
        found[name] = start(tmp_path / name.partition(":")[2], experiment(name, rounds=6, cohort=1.0))
    assert found[JOINT]["sample_visits"] == found[FEDAVG]["sample_visits"] > 0
    assert found[JOINT]["final_accuracy"] > 0.9 > 0.6 > found[FEDAVG]["final_accuracy"]
    assert found[JOINT]["forgetting"] < 0.1 < 0.5 < found[FEDAVG]["forgetting"]


def test_all_visits_are_those_of_the_whole_pool_in_every_epoch(tmp_path: Path):
    made = experiment(JOINT, rounds=2, options={"visits": "all"})
    summary = start(tmp_path / "run", made)
    seen = [(row["stage"], row["sample_visits"]) for row in rows(tmp_path / "run")]
    assert seen == [(s, 2 * made.plan.size(0, s)) for s in range(3) for _ in range(2)]
    sizes = [made.plan.size(0, s) for s in range(3)]
    assert sizes == sorted(sizes) and summary["data_view"] == "pooled_cumulative_all"
    assert start(tmp_path / "equal", experiment(JOINT, rounds=2))["data_view"] == "pooled_cumulative"


def test_the_loss_is_over_every_class_seen_and_replaces_other_terms():
    method = joint(local=local(terms=(CrossEntropy("current"), CrossEntropy("current"))))
    assert isinstance(method, Joint) and method.local.terms == (CrossEntropy("seen"),)
    made = experiment(JOINT)
    ctx = made.context(made.net(), 1, round=0, client=0)
    assert ctx.class_mask("seen").tolist() == ctx.class_mask("current").tolist() == [0, 0, 0, 0, -np.inf, -np.inf]
    assert ctx.class_mask("old").tolist() == [0, 0, *[-np.inf] * 4]


def test_it_has_no_options():
    with pytest.raises(ConfigError, match=r"unknown option of joint 'method.label_scope'"):
        fedloom.run(DIGITS, method={"name": "joint", "label_scope": "current"})


def test_every_engine_gives_the_same_run(tmp_path: Path):
    pytest.importorskip("flwr")
    one = fedloom.run(DEALT, method="joint", out=tmp_path / "one")
    two = fedloom.run(DEALT, method="joint", engine={"workers": 2}, out=tmp_path / "two")
    grid = fedloom.run(DEALT, method="joint", engine={"name": "flower"}, out=tmp_path / "grid")
    keys = ("state_sha256", "accuracy_matrix", "bytes_up", "bytes_down", "sample_visits", "clients")
    for other in (two, grid):
        assert [other.summary[key] for key in keys] == [one.summary[key] for key in keys]
        assert other.summary["failed_clients"] == 0
    plain = fedloom.run(DEALT, method="fedavg", out=tmp_path / "plain")
    assert plain.summary["sample_visits"] == one.summary["sample_visits"]
    assert (plain.summary["clients"], one.summary["clients"]) == (4, 1)


@pytest.mark.slow
def test_flowers_simulation_gives_the_same_run(tmp_path: Path):
    pytest.importorskip("ray")
    one = fedloom.run(DEALT, method="joint", out=tmp_path / "one")
    engine = {"name": "flower", "runtime": "simulation", "workers": 2}
    ray = fedloom.run(DEALT, method="joint", engine=engine, out=tmp_path / "ray")
    for key in ("state_sha256", "accuracy_matrix", "sample_visits", "clients"):
        assert ray.summary[key] == one.summary[key]


def test_the_record_says_who_held_what_in_the_stream(tmp_path: Path):
    pooled = fedloom.run(DEALT, method="joint", out=tmp_path / "joint")
    plain = fedloom.run(DEALT, method="fedavg", out=tmp_path / "fedavg")
    one, other = (json.loads((run.folder / "partition.json").read_text()) for run in (pooled, plain))
    assert one == other and one["clients"] == 4
    assert "one client holds what the 4 clients have held up to each stage" in (pooled.folder / "log.txt").read_text()
    assert [row["clients"] for row in pooled.metrics if row["scope"] == "round"] == [1] * 2
    last = [row for row in pooled.metrics if row["scope"] == "stage"][-1]
    assert last["accuracy/clients"] == 1


def call(*arguments: Any) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], prog_name="fedloom")


def test_the_preview_shows_the_stream_and_says_that_it_is_pooled(tmp_path: Path):
    sets = [part for key in ("partition.clients=4", "training.rounds=1000000") for part in ("--set", key)]
    result = call("run", "quickstart", "-m", "joint", *sets, "--dry-run")
    assert result.exit_code == 0, result.stderr
    assert "10 clients" not in result.stdout and "4 clients, 5 stages" in result.stdout
    assert "1 client a round" in result.stdout and "workers: 1;" in result.stdout
    assert "note: the method pools the data: one client holds what the 4 clients have held" in result.stderr
    shown = call("show-data", "quickstart", "--set", "method.name=joint", "--out", tmp_path / "picture.png")
    assert shown.exit_code == 0 and "10 clients, 5 stages" in shown.stdout


def test_a_finished_run_predicts_exports_and_reports(tmp_path: Path):
    folder = fedloom.run(DEALT, method="joint", out=tmp_path / "run").folder
    np.save(tmp_path / "x.npy", np.full((2, 1, 8, 8), 100, np.uint8))
    scores = call("predict", folder, "--input", tmp_path / "x.npy", "--json")
    assert scores.exit_code == 0, scores.stderr
    its = call("predict", folder, "--input", tmp_path / "x.npy", "--client", 0, "--json")
    assert its.exit_code == 0 and json.loads(its.stdout)["predictions"] == json.loads(scores.stdout)["predictions"]
    none = call("predict", folder, "--input", tmp_path / "x.npy", "--client", 3)
    assert none.exit_code == 2 and none.stderr == "error: --client is 3, but the run has the clients 0 to 0\n"
    assert call("export", folder, "--format", "safetensors", "--out", tmp_path / "m.safetensors").exit_code == 0
    assert call("report", folder, "--out", tmp_path / "report.html").exit_code == 0
    assert "joint" in (tmp_path / "report.html").read_text()
