"""FedFMX as a method: against FedAvg, invariants of the step, homes and cadences of the Fisher, merges, options."""

import shutil
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

from fedloom.core import Batches, ConfigError, Context, Net, Reply, Stage
from fedloom.core.payload import nbytes
from fedloom.core.seeds import seeded
from fedloom.local import SGD, LocalSGD
from fedloom.methods.fedavg import fedavg
from fedloom.methods.fedfmx import fedfmx
from fedloom.models.heads import Classifier
from toys.federation import experiment
from toys.running import resume, start

CLASSES, INPUT = 4, 6
LOCAL = LocalSGD(optimizer=SGD(lr=0.1), epochs=2, batch_size=5)


class Features(nn.Module):
    num_features = 8

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(INPUT, 8)

    def forward(self, x):
        return self.layer(x).tanh()


@dataclass(frozen=True)
class Spec:
    num_classes: int = CLASSES
    seed: int = 0

    def backbone(self):
        with seeded(self.seed, "backbone"):
            return Features()

    def classifier(self):
        body = self.backbone()
        with seeded(self.seed, "head"):
            return Classifier(body, self.num_classes)


def context(method, stage=0, seen=(0, 1, 2, 3), current=None, round=0, client=0, double=False):
    def build():
        module = method.module(Spec())
        return module.double() if double else module

    where = Stage(stage, 3, 2, current or seen, seen)
    return Context(Net(build), where, CLASSES, round=round, client=client)


def data(classes=(0, 1, 2, 3), count=23, seed=0, double=False):
    rng = torch.Generator().manual_seed(seed)
    y = torch.tensor(classes)[torch.randint(0, len(classes), (count,), generator=rng)]
    x = 0.5 * torch.randn(count, INPUT, generator=rng) + torch.nn.functional.one_hot(y, INPUT)
    x = x.double() if double else x
    return Batches(x, y, torch.arange(count), key=(seed, "data"), prepare=lambda rows, _: rows)


def rounds(method, ctx, clients, count=1, server=None):
    """A few rounds over all clients; returns the server state and the last updates."""
    server = method.init_server(ctx) if server is None else server
    states = [{} for _ in clients]
    for r in range(count):
        updates = [
            method.client_update(server, states[i], batches, replace(ctx, round=r, client=i))
            for i, batches in enumerate(clients)
        ]
        states = [update.state for update in updates]
        replies = [Reply(i, len(b), u.up, u.metrics) for i, (b, u) in enumerate(zip(clients, updates, strict=True))]
        server = method.server_update(server, replies, replace(ctx, round=r, client=None))
    return server, updates


@pytest.mark.parametrize("optimizer", [SGD(0.1), SGD(0.1, momentum=0.9, weight_decay=1e-3)])
def test_one_expert_without_gate_terms_is_fedavg_step_for_step(optimizer):
    local = replace(LOCAL, optimizer=optimizer)
    plain, routed = fedavg(local=local), fedfmx(local=local, experts=1, body="identity", beta=0.0, gamma=0.0)
    clients = [data(seed=1), data(seed=2, count=11)]
    a_ctx, b_ctx = context(plain, seen=(0, 1, 2, 3)), context(routed)
    a, b = plain.init_server(a_ctx), routed.init_server(b_ctx)
    for _ in range(3):
        (a, a_updates), (b, b_updates) = rounds(plain, a_ctx, clients, 1, a), rounds(routed, b_ctx, clients, 1, b)
        assert torch.allclose(b["params"]["heads.weight"][0], a["params"]["head.weight"], atol=2e-6)
        assert torch.allclose(b["params"]["heads.bias"][0], a["params"]["head.bias"], atol=2e-6)
        assert torch.allclose(b["params"]["backbone.layer.weight"], a["params"]["backbone.layer.weight"], atol=2e-6)
        for x, y in zip(a_updates, b_updates, strict=True):
            assert y.metrics["loss"] == pytest.approx(x.metrics["loss"], abs=1e-5)
    x = torch.randn(7, INPUT, generator=torch.Generator().manual_seed(5))
    assert torch.allclose(plain.predict(a, {}, x, a_ctx), routed.predict(b, {}, x, b_ctx), atol=1e-5)


def test_inactive_experts_do_not_move():
    method = fedfmx(local=replace(LOCAL, epochs=1, batch_size=50), stop=1)
    ctx = context(method)
    server, (update,) = rounds(method, ctx, [data(count=3)])
    start = method.init_server(ctx)["params"]
    idle = [k for k in range(4) if update.metrics[f"expert_{k}_usage"] == 0]
    assert idle
    for name in ("heads.weight", "heads.bias", "bodies.0.weight", "bodies.1.bias"):
        for k in range(4):
            assert torch.equal(server["params"][name][k], start[name][k]) == (k in idle)
    for k in idle:
        assert (server["fisher"]["experts"][k] == 0).all()
    assert not torch.equal(server["params"]["gate.weight"], start["gate.weight"])


def test_a_fixed_width_head_equals_a_head_that_grows():
    """Three of four classes seen: everything equals a network that has only three rows."""
    local = LocalSGD(optimizer=SGD(0.1, momentum=0.9, weight_decay=1e-2), epochs=2, batch_size=5, clip_norm=0.5)
    method = fedfmx(local=local, fisher_scale="pooled", empty_value="chance")
    wide_ctx = context(method, seen=(0, 1, 2), double=True)

    def narrow_module():
        module = method.module(Spec()).double()
        for name in ("weight", "bias"):
            setattr(module.heads, name, nn.Parameter(getattr(module.heads, name)[:, :3].detach()))
        return module

    narrow_ctx = Context(Net(narrow_module), wide_ctx.stage, 3, round=0, client=0)
    clients = [data((0, 1, 2), double=True)]
    wide, _ = rounds(method, wide_ctx, clients, 2)
    narrow, _ = rounds(method, narrow_ctx, clients, 2)
    for name, tensor in narrow["params"].items():
        full = wide["params"][name]
        assert torch.allclose(full[:, :3] if name.startswith("heads.") else full, tensor, atol=1e-12), name
    assert torch.allclose(wide["fisher"]["experts"][:, :3], narrow["fisher"]["experts"], atol=1e-14)
    assert (wide["fisher"]["experts"][:, 3] == 0).all()
    assert torch.equal(wide["params"]["heads.weight"][:, 3], wide_ctx.init_state()["params"]["heads.weight"][:, 3])
    seen = (0, 1, 2)
    assert nbytes(wide, method.class_rows(wide_ctx), seen) == nbytes(narrow, method.class_rows(narrow_ctx), seen)


def test_old_logits_are_the_same_after_classes_arrive():
    method = fedfmx(local=LOCAL)
    before, after = context(method, seen=(0, 1)), context(method, stage=1, seen=(0, 1, 2, 3))
    server, _ = rounds(method, before, [data((0, 1))])
    x = torch.randn(5, INPUT, generator=torch.Generator().manual_seed(5))
    old, new = method.predict(server, {}, x, before), method.predict(server, {}, x, after)
    assert torch.equal(old[:, :2], new[:, :2])
    assert (old[:, 2:] == -torch.inf).all() and new.isfinite().all()


def test_same_call_gives_the_same_bits_and_alters_nothing():
    method = fedfmx(local=LOCAL, fisher_home="client")
    ctx = context(method)
    server = method.init_server(ctx)
    copy = {f: {n: t.clone() for n, t in tree.items()} for f, tree in server.items()}
    first = method.client_update(server, {}, data(), ctx)
    state = {f: {n: t.clone() for n, t in tree.items()} for f, tree in first.state.items()}
    method.client_update(server, first.state, data(seed=3), ctx)
    again = method.client_update(server, {}, data(), ctx)
    for payload, want in ((server, copy), (first.state, state), (again.up, first.up), (again.state, first.state)):
        assert all(torch.equal(t, want[f][n]) for f, tree in payload.items() for n, t in tree.items())


def test_every_sample_sees_the_fisher_from_before_its_batch():
    seen = []

    @dataclass(frozen=True)
    class Spy:
        inner: object
        needs = ("fisher_rows",)

        def __call__(self, out, batch, ref, carry):
            seen.append(carry["fisher"]["experts"].clone())
            return self.inner(out, batch, ref, carry)

    method = fedfmx(local=replace(LOCAL, epochs=1))
    spied = replace(method, local=replace(method.local, decisions=(Spy(method.local.decisions[0]),)))
    ctx = context(spied)
    _, (update,) = rounds(spied, ctx, [data()])
    assert (seen[0] == 0).all() and (seen[1] != 0).any()
    assert not torch.equal(seen[-1], update.up["fisher"]["experts"])


def test_server_home_averages_by_examples():
    method = fedfmx(local=LOCAL)
    server, (a, b) = rounds(method, context(method), [data((0, 1), count=30), data((2, 3), count=10)])
    want = (30 * a.up["fisher"]["experts"] + 10 * b.up["fisher"]["experts"]) / 40
    assert torch.allclose(server["fisher"]["experts"], want)
    assert a.state == {}
    held = a.up["fisher"]["experts"].sum((0, 2))
    assert held[:2].min() > held[2:].max()  # what `reveals` says


def test_client_home_stays_on_the_client():
    method = fedfmx(local=LOCAL, fisher_home="client")
    ctx = context(method)
    server, (update,) = rounds(method, ctx, [data()])
    assert "fisher" not in server and "fisher" not in update.up
    first = update.state["fisher"]["experts"]
    later = method.client_update(server, update.state, data(), ctx).state["fisher"]["experts"]
    fresh = method.client_update(server, {}, data(), ctx).state["fisher"]["experts"]
    assert (first > 0).any() and not torch.equal(later, fresh)


def test_reset_keeps_nothing():
    method = fedfmx(local=LOCAL, fisher_home="reset")
    server, (update,) = rounds(method, context(method), [data()])
    assert "fisher" not in server and "fisher" not in update.up and update.state == {}
    for cadence in ("round", "task"):
        with pytest.raises(ConfigError, match=f"fisher_cadence '{cadence}' needs fisher_home server or client"):
            fedfmx(local=LOCAL, fisher_home="reset", fisher_cadence=cadence)


@pytest.mark.parametrize("home", ["server", "client"])
def test_task_cadence_remembers_across_stages(home):
    method = fedfmx(local=LOCAL, fisher_cadence="task", fisher_home=home, rho=0.9)
    ctx = context(method, seen=(0, 1))
    server, (update,) = rounds(method, ctx, [data((0, 1))], 2)
    held = update.state if home == "client" else server
    assert (held["fisher"]["experts"] == 0).all() and (held["fisher"]["counts"] > 0).any()
    later = context(method, stage=1, current=(2, 3))
    after = method.client_update(server, update.state, data((2, 3), seed=4), later)
    fisher = (after.state if home == "client" else after.up)["fisher"]
    used = held["fisher"]["counts"] > 0
    want = 0.1 * held["fisher"]["sums"][used] / held["fisher"]["counts"][used][:, None, None]
    assert torch.allclose(fisher["experts"][used], want, atol=1e-7)
    assert (fisher["experts"][:, 2:] == 0).all() and int(fisher["stage"]) == 1


def test_usage_merge_weighs_experts_by_their_samples():
    method = fedfmx(local=LOCAL, merge="usage", stop=1)
    ctx = context(method)
    start = method.init_server(ctx)["params"]
    server, updates = rounds(method, ctx, [data((0,), count=9), data((3,), count=14)])
    used = torch.stack([u.up["usage"]["experts"] * n for u, n in zip(updates, (9, 14), strict=True)])
    assert torch.allclose(used.sum(1), torch.tensor([9.0, 14.0]))
    for name in ("heads.weight", "bodies.0.bias"):
        for k in range(4):
            values = torch.stack([u.up["params"][name][k] for u in updates])
            share = used[:, k].view(2, *(1,) * (values.dim() - 1))
            want = (share * values).sum(0) / used[:, k].sum() if used[:, k].sum() > 0 else start[name][k]
            assert torch.allclose(server["params"][name][k], want, atol=1e-6)
    gates = [u.up["params"]["gate.weight"] for u in updates]
    assert torch.allclose(server["params"]["gate.weight"], (9 * gates[0] + 14 * gates[1]) / 23, atol=1e-6)


def test_the_global_view_is_the_model_alone():
    method = fedfmx(local=LOCAL)
    ctx = context(method)
    server = method.init_server(ctx)
    assert method.send(server, 3, ctx) is server
    assert method.send(server, None, ctx).keys() == {"params", "buffers"}


def test_uniform_merge():
    method = fedfmx(local=LOCAL, uniform=True)
    server, (a, b) = rounds(method, context(method), [data(count=30), data(seed=1, count=5)])
    for field, name in (("params", "gate.weight"), ("fisher", "experts")):
        assert torch.allclose(server[field][name], (a.up[field][name] + b.up[field][name]) / 2)


def test_experts_differ_after_training_and_metrics_are_plain_numbers():
    method = fedfmx(local=LOCAL, empty_value="chance")
    server, (update,) = rounds(method, context(method), [data()], 3)
    assert not torch.allclose(server["params"]["heads.weight"][0], server["params"]["heads.weight"][1])
    assert all(type(value) is float for value in update.metrics.values())
    assert 2 <= update.metrics["active_experts"] <= 4
    assert update.metrics.keys() >= {"loss", "gate_entropy", "fallback_weights", "expert_3_usage"}


def test_training_learns_the_classes():
    method = fedfmx(local=replace(LOCAL, epochs=8, optimizer=SGD(0.2)))
    ctx = context(method)
    server, _ = rounds(method, ctx, [data(count=60)], 3)
    x, y = zip(*((batch.x, batch.y) for batch in data(count=60).epoch(shuffle=False)), strict=True)
    hits = method.predict(server, {}, torch.cat(x), ctx).argmax(1) == torch.cat(y)
    assert hits.float().mean() > 0.6


OPTIONS = {
    "rho": 0.5,
    "alpha": 0.1,
    "mu": 0.0,
    "beta": 0.5,
    "gamma": 0.0,
    "tau_r": 3.0,
    "temperature": 2.0,
    "experts": 3,
    "body": (5,),
    "fisher_scale": "trace",
    "fisher_squash": "softplus",
    "fisher_samples": "all",
    "fisher_cadence": "round",
    "fisher_home": "client",
    "empty_value": "chance",
    "scores": "loss",
    "stop": 2,
    "weights": "uniform",
    "fallback": "uniform",
    "label_scope": "current",
    "balance": "batch",
    "mixing": "probabilities",
    "inference_experts": 1,
    "merge": "usage",
    "uniform": True,
}


@pytest.fixture(scope="module")
def default_outcome():
    return outcome({})


def outcome(options):
    """Parameters and predictions after two rounds of two clients that hold two classes each."""
    method = fedfmx(local=LOCAL, **{"stop": 2, "mu": 0.5, **options} if "mu" not in options else options)
    ctx = context(method, current=(0, 1))
    server, _ = rounds(method, ctx, [data((0, 1), count=20), data((0, 1), seed=1, count=9)], 2)
    x = torch.randn(3, INPUT, generator=torch.Generator().manual_seed(5))
    return {n: t.clone() for n, t in server["params"].items()}, method.predict(server, {}, x, ctx)


@pytest.mark.parametrize("name", [name for name in OPTIONS if name not in ("stop", "mu")])
def test_every_option_does_something(name, default_outcome):
    params, scores = outcome({name: OPTIONS[name]})
    same = all(params[n].shape == t.shape and torch.equal(params[n], t) for n, t in default_outcome[0].items())
    assert not (same and torch.equal(scores, default_outcome[1]))


@pytest.mark.parametrize("rule", ["exclude_trigger", "abs", "all", 1, 3])
def test_stop_rules_choose_different_sets(rule):
    sizes = []
    for stop in ("literal", rule):
        method = fedfmx(local=LOCAL, stop=stop, mu=0.0)
        sizes.append(rounds(method, context(method), [data()])[1][0].metrics["active_experts"])
    assert sizes[0] != sizes[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop": "litteral"}, "unknown stop rule 'litteral'"),
        ({"stop": 0}, "at least 1, got 0"),
        ({"mu": 1.5}, "mu must be in"),
        ({"alpha": -1.0}, "alpha must be in"),
        ({"rho": 1.0}, "rho must be in"),
        ({"beta": -1.0}, "beta must be"),
        ({"gamma": float("nan")}, "gamma must be"),
        ({"tau_r": 0.0}, "tau_r must be"),
        ({"fisher_squash": "identity"}, "identity' needs fisher_scale"),
        ({"fisher_scale": "zscore"}, "unknown fisher_scale 'zscore'"),
        ({"scores": "fisher"}, "unknown scores 'fisher'"),
        ({"weights": "unifrom"}, "Did you mean 'uniform'"),
        ({"fisher_home": "sever"}, "Did you mean 'server'"),
        ({"empty_value": "chanse"}, "empty_value must be"),
        ({"inference_experts": 0}, "inference_experts must be at least 1"),
        ({"label_scope": "past"}, "label scope must be one of"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ConfigError, match=message):
        fedfmx(local=LOCAL, **options)


def test_one_sample_and_one_expert():
    method = fedfmx(local=LOCAL, experts=1)
    server, (update,) = rounds(method, context(method), [data(count=1)])
    assert all(t.isfinite().all() for tree in server.values() for t in tree.values() if t.is_floating_point())
    assert update.metrics["active_experts"] == 1.0


def test_float64_modules_stay_float64():
    method = fedfmx(local=LOCAL)
    server, _ = rounds(method, context(method, double=True), [data(double=True)])
    assert {t.dtype for t in server["params"].values()} == {torch.float64}
    assert server["fisher"]["experts"].dtype == torch.float64


@pytest.mark.parametrize(
    "options",
    [
        {"fisher_cadence": "task", "fisher_home": "client", "merge": "usage", "empty_value": "chance"},
        {"fisher_cadence": "task", "fisher_squash": "softplus", "mixing": "probabilities"},
    ],
)
def test_runs_through_the_engine_and_resumes(options, tmp_path):
    """Stages, class growth on the wire and client state, with the parts that the defaults leave out."""

    def made():
        return experiment("fedloom.methods.fedfmx:fedfmx", options=options, cohort=1.0, rounds=1, num_clients=2)

    whole = start(tmp_path / "whole", made())
    start(tmp_path / "cut", made(), checkpoint_keep=100)
    points = sorted((tmp_path / "cut" / "checkpoints").iterdir())
    for path in points[len(points) // 2 :]:
        shutil.rmtree(path)
    assert resume(tmp_path / "cut", made(), checkpoint_keep=100)["state_sha256"] == whole["state_sha256"]
    assert whole["failed_clients"] == whole["rejected_updates"] == 0
