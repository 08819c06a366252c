"""PFL-MoE: training is FedAvg, what each phase moves, what stays on clients, and what they predict."""

from __future__ import annotations

import dataclasses
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from fedloom.core import ConfigError, Payload
from fedloom.core.payload import nbytes
from fedloom.engine.checkpoint import newest
from fedloom.engine.store import ClientStore
from fedloom.local.held_out import held_out
from fedloom.methods.pfl_moe import PRESETS, PFLMoE, pfl_moe
from toys.federation import BlobSpec, experiment, expert_spec, local
from toys.language_models import choice_spec
from toys.running import rows, start

PFL, AVG = "fedloom.methods.pfl_moe:pfl_moe", "fedloom.methods.fedavg:fedavg"
SCOPES = ["head", "last_moe", "experts"]


def at_work(scope: str = "head", spec: Any = None, **options: Any):
    """Method, context, data of client 0 and a download that is not the initial model."""
    spec = spec or expert_spec()
    method = pfl_moe(local=local(), scope=scope, **options)
    whole = dataclasses.replace(experiment(AVG, spec=spec), method=method, rebuild=None)
    ctx = whole.context(whole.net(), 0, exchange="personalise", client=0)
    data = whole.plan.train(0, 0, None, "personalise")
    end = method.local(ctx.init_state(), data.keyed("before"), ctx)
    return method, ctx, data, {"params": end.params, "buffers": end.buffers}


@dataclass(frozen=True)
class Noted(PFLMoE):
    """Notes every download and upload of the last trip."""

    calls: list[tuple[int, Payload, Payload]] = field(default_factory=list, compare=False)

    def personalise(self, down, state, data, ctx):
        update = super().personalise(down, state, data, ctx)
        self.calls.append((ctx.client, down, update.up))
        return update


@pytest.mark.parametrize("spec", [BlobSpec(), expert_spec()], ids=["blobs", "experts"])
def test_training_is_fedavg_and_the_last_trip_only_comes_down(tmp_path: Path, spec: Any):
    scope = {"scope": "experts"} if not isinstance(spec, BlobSpec) else {}
    own = start(tmp_path / "own", experiment(PFL, spec=spec, options=scope))
    avg = start(tmp_path / "avg", experiment(AVG, spec=spec))
    assert own["params_sha256"] == avg["params_sha256"] and own["state_sha256"] == avg["state_sha256"]
    assert own["accuracy_matrix"] == avg["accuracy_matrix"] and own["bytes_up"] == avg["bytes_up"]
    trained = [row for row in rows(tmp_path / "own") if row["exchange"] == "train"]
    assert trained == rows(tmp_path / "avg")
    last = [row for row in rows(tmp_path / "own") if row["exchange"] == "personalise"]
    assert len(last) == 3 and all(row["clients"] == 4 and not row["degraded"] for row in last)
    one_way = trained[0]["bytes_down"] // trained[0]["clients"]
    assert last[0]["bytes_up"] == 0 and last[0]["bytes_down"] == 4 * one_way
    assert own["bytes_down"] - avg["bytes_down"] == sum(row["bytes_down"] for row in last)


def test_head_and_gate_never_leave_the_client(tmp_path: Path):
    given = pfl_moe(local=local())
    parts = {f.name: getattr(given, f.name) for f in dataclasses.fields(given)}
    whole = dataclasses.replace(experiment(AVG), method=Noted(**parts), rebuild=None)
    start(tmp_path / "run", whole)
    assert len(whole.method.calls) == 12
    for _, down, up in whole.method.calls:
        assert set(down) == {"params", "buffers"} and nbytes(up) == 0
    progress = newest(tmp_path / "run")[1]
    states = ClientStore(tmp_path / "run" / "clients")
    state = states.load(0, progress.versions[0])
    assert set(state) == {"personal", "gate"} and set(state["personal"]) == {"head.weight", "head.bias"}
    assert {name: tensor.shape for name, tensor in state["gate"].items()} == {"weight": (8,), "bias": ()}


@pytest.mark.parametrize("scope", SCOPES)
def test_the_personal_part_is_the_scope_and_it_alone_moves(scope: str):
    method, ctx, data, down = at_work(scope)
    before = {f: {n: t.clone() for n, t in tree.items()} for f, tree in down.items()}
    update = method.personalise(down, {}, data, ctx)
    assert all(torch.equal(before[f][n], t) for f, tree in down.items() for n, t in tree.items())
    personal = update.state["personal"]
    experts = {n for n in personal if ".experts." in n}
    assert {"head.weight", "head.bias"} <= set(personal)
    assert len(experts) == {"head": 0, "last_moe": 4, "experts": 8}[scope]
    assert ("backbone.blocks.1.router.weight" in personal) is (scope == "last_moe")
    assert all(not torch.equal(down["params"][n], personal[n]) for n in ("head.weight", "head.bias"))
    bound = ctx.net.module.state_dict()
    assert all(torch.equal(bound[n], t) for n, t in down["params"].items()), "the gate phase left the global model"


def test_the_head_phase_is_sgd_on_three_quarters_with_the_base_at_rest():
    method, ctx, data, down = at_work(spec=BlobSpec(), personal_epochs=1, personal_lr=0.3)
    kept, _ = held_out(data, 4, ctx.seed_for("held out"))
    assert len(kept) < 64, "one batch, so one step"
    found = method.personalise(down, {}, data, ctx).state["personal"]
    x, y = kept.stored(torch.arange(len(kept)))
    ctx.bind(down["params"], down["buffers"])
    with ctx.evaluating():
        feats = ctx.apply(x)["feats"]
    head = {n: down["params"][n].clone().requires_grad_() for n in ("head.weight", "head.bias")}
    logits = feats @ head["head.weight"].T + head["head.bias"] + ctx.class_mask("seen")
    grads = torch.autograd.grad(torch.nn.functional.cross_entropy(logits, y), list(head.values()))
    for (name, start_), grad in zip(head.items(), grads, strict=True):
        moved = start_.detach() - 0.3 * (grad + 5e-4 * start_.detach())
        moved[ctx.unseen] = start_.detach()[ctx.unseen]
        torch.testing.assert_close(found[name], moved)
    grown = method.personalise(down, {}, data, ctx).state["personal"]["head.weight"]
    assert torch.equal(grown[ctx.unseen], down["params"]["head.weight"][ctx.unseen])


def test_the_gate_lowers_the_cross_entropy_of_the_mixture_on_its_own_quarter():
    method, ctx, data, down = at_work(gate_epochs=200, gate_lr=0.05, personal_lr=0.3)
    state = method.personalise(down, {}, data, ctx).state
    _, aside = held_out(data, 4, ctx.seed_for("held out"))
    x, y = aside.stored(torch.arange(len(aside)))
    losses = [
        torch.nn.functional.cross_entropy(method.predict(down, {**state, "gate": gate}, x, ctx), y)
        for gate in ({}, state["gate"])
    ]
    assert losses[1] < losses[0]


def test_predictions_go_from_the_global_to_the_personal_model_with_the_gate():
    method, ctx, data, down = at_work("experts", personal_lr=0.3)
    state = method.personalise(down, {}, data, ctx).state
    x, _ = data.stored(torch.arange(len(data)))

    def scores(bias: float | None, personal=state["personal"]) -> torch.Tensor:
        gate = {} if bias is None else {"weight": torch.zeros(8), "bias": torch.tensor(bias)}
        return method.predict(down, {"personal": personal, "gate": gate}, x, ctx)

    common = method.predict(down, {}, x, ctx)
    own = method.predict({**down, "params": {**down["params"], **state["personal"]}}, {}, x, ctx)
    assert not torch.allclose(common, own)
    assert torch.equal(scores(200.0), common) and torch.equal(scores(-200.0), own)
    torch.testing.assert_close(scores(None)[:, :2], (common + own)[:, :2] / 2)
    same = {name: down["params"][name] for name in state["personal"]}
    assert torch.equal(scores(0.7, same), common), "equal experts leave the gate nothing to decide"
    assert torch.isneginf(scores(0.7)[:, ctx.unseen]).all()


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_client_of_fewer_than_four_examples_weighs_both_alike(count: int):
    method, ctx, data, down = at_work(personal_lr=0.3)
    update = method.personalise(down, {}, data.part(0, count), ctx)
    assert update.state["gate"] == {} and "gate" not in update.metrics
    moved = not torch.equal(update.state["personal"]["head.bias"], down["params"]["head.bias"])
    assert moved is (count > 0)
    x, _ = data.stored(torch.arange(4))
    assert torch.isfinite(method.predict(down, update.state, x, ctx)[:, :2]).all()


def test_a_tiny_client_lasts_through_a_run(tmp_path: Path):
    plan = {"num_clients": 30, "num_stages": 1, "rounds": 1, "per_class": 10, "cohort": 1.0}
    summary = start(tmp_path / "run", experiment(PFL, spec=BlobSpec(norm=False), **plan))
    assert summary["failed_clients"] == summary["rejected_updates"] == 0
    states, progress = ClientStore(tmp_path / "run" / "clients"), newest(tmp_path / "run")[1]
    found = [states.load(client, version) for client, version in progress.versions.items()]
    assert {bool(state["gate"]) for state in found} == {True, False}


def test_the_gate_of_raw_inputs_reads_them():
    method, ctx, data, down = at_work(gate_input="inputs")
    gate = method.personalise(down, {}, data, ctx).state["gate"]
    assert gate["weight"].shape == (2,) and gate["weight"].any()


def test_gate_passes_are_counted_once_and_head_epochs_as_training():
    method, ctx, data, down = at_work(gate_epochs=50, personal_epochs=3)
    before = data.visits.count
    method.personalise(down, {}, data, ctx)
    n = len(data)
    assert (data.visits.count - before, data.visits.passes) == (3 * (n - n // 4), n // 4)


def test_the_preset_of_the_code_says_what_differs():
    with pytest.warns(UserWarning, match="pfl_moe follows the public code where it differs"):
        made = pfl_moe(local=local(), **PRESETS["code_2020"])
    assert made.uniform and made.head.epochs == made.gate.epochs == 200
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pfl_moe(local=local(), personal_epochs=200)


def test_a_network_without_experts_has_a_head_alone():
    for scope in ("last_moe", "experts"):
        with pytest.raises(ConfigError, match=f"'pfl_moe with scope {scope}' needs a network with mixture-of-experts"):
            pfl_moe(local=local(), scope=scope).module(BlobSpec())


def test_features_of_questions_are_refused_before_any_training():
    pytest.importorskip("transformers")
    for architecture in ("switch_encoder", "mixtral"):
        with pytest.raises(ConfigError, match=r"gate_input is features, and a model of questions.*set it to inputs"):
            pfl_moe(local=local(), scope="experts").module(choice_spec(architecture))
        pfl_moe(local=local(), scope="experts", gate_input="inputs").module(choice_spec(architecture))
