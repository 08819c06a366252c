"""FedDyn: quadratics with exact solves, h as the mean of all g_i, and the first round against FedProx."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import fedloom
from fedloom.core import ConfigError, Net, Reply
from fedloom.core.payload import digest
from fedloom.local import SGD
from fedloom.local.terms import CrossEntropy
from fedloom.methods.feddyn import FedDyn, feddyn
from fedloom.methods.fedprox import fedprox
from toys.federation import BlobSpec, experiment, local
from toys.running import start

DYN = "fedloom.methods.feddyn:feddyn"


def tree(value):
    return {"w": torch.tensor(value, dtype=torch.float64)}


@dataclass(frozen=True)
class Exact:
    """Stands for LocalSGD on L_i(w) = a_i (w - b_i)^2 / 2, with (a_i, b_i) as the data.

    One Newton step on L_i and the terms that the method adds, which is exact: their sum is quadratic.
    """

    terms: tuple = (CrossEntropy(),)

    def __call__(self, down, data, ctx, ref):
        w = down["params"]["w"].clone().requires_grad_()
        ref = {**ref, "anchor": down["params"]}
        loss = data[0] * (w - data[1]) ** 2 / 2 + sum(term({"w": w}, {}, None, ref, {}) for term in self.terms[1:])
        (slope,) = torch.autograd.grad(loss, w, create_graph=True)
        (curvature,) = torch.autograd.grad(slope, w)
        return SimpleNamespace(params={"w": (w - slope / curvature).detach()}, buffers={}, metrics={})


def simulate(data, cohorts, alpha=1.0):
    """Runs the cohorts from theta = 0; yields theta, h, the g_i and the cohort's local models after each."""
    method, ctx = feddyn(local=Exact(), alpha=alpha), SimpleNamespace(num_clients=len(data))
    server = {"params": tree(0.0), "buffers": {}, "gradient": tree(0.0)}
    states = [{"gradient": tree(0.0)} for _ in data]
    for cohort in cohorts:
        replies = []
        for i in cohort:
            update = method.client_update(method.send(server, i, ctx), states[i], data[i], ctx)
            states[i] = update.state
            replies.append(Reply(client=i, weight=1.0 + 10 * i, up=update.up, metrics={}))
        server = method.server_update(server, replies, ctx)
        ends = [reply.up["params"]["w"].item() for reply in replies]
        g = [state["gradient"]["w"].item() for state in states]
        yield server["params"]["w"].item(), server["gradient"]["w"].item(), g, ends


def test_two_quadratics_solved_exactly_meet_in_the_optimum_after_one_round():
    expected = [
        (1.0, -0.5, [0.0, -1.0], [0.0, 1.0]),
        (1.0, -0.25, [0.5, -1.0], [0.5, 1.0]),
        (1.0, -0.125, [0.75, -1.0], [0.75, 1.0]),
    ]
    for found, wanted in zip(simulate([(1.0, 0.0), (1.0, 2.0)], [range(2)] * 3), expected, strict=True):
        for a, b in zip(found, wanted, strict=True):
            assert a == pytest.approx(b, abs=1e-12)


@pytest.mark.parametrize("alpha", [0.1, 1.0, 5.0])
def test_after_an_exact_solve_g_is_the_gradient_of_the_client_s_loss(alpha):
    data, cohorts = [(1.0, 0.0), (2.0, 3.0), (0.5, -1.0)], [(0, 1), (1, 2), (0, 2), (0, 1)]
    for cohort, (_, _, g, ends) in zip(cohorts, simulate(data, cohorts, alpha), strict=True):
        for i, end in zip(cohort, ends, strict=True):
            assert g[i] == pytest.approx(data[i][0] * (end - data[i][1]), abs=1e-12)


def test_absent_clients_keep_g_and_h_is_the_mean_of_all_of_them():
    data, before = [(1.0, 0.5), (2.0, 3.0), (0.5, -1.0), (1.5, 2.0)], [0.0] * 4
    cohorts = [(0, 1), (1, 3), (2, 3), (0, 2)]
    for cohort, (_, h, g, _) in zip(cohorts, simulate(data, cohorts, 0.3), strict=True):
        assert {i for i in range(4) if g[i] != before[i]} == set(cohort)
        assert h == pytest.approx(sum(g) / 4, abs=1e-12)
        before = g


@pytest.mark.parametrize("cohorts", [[range(4)], [(0, 1), (1, 3), (2, 3), (0, 2)]])
def test_clients_of_different_curvature_end_at_the_optimum_of_all_their_data(cohorts):
    """sum a b / sum a = 1.7, where the mean of the minima is 1."""
    data = [(1.0, 0.0), (2.0, 3.0), (0.5, -1.0), (1.5, 2.0)]
    *_, (theta, h, g, _) = simulate(data, cohorts * (120 // len(cohorts)))
    assert theta == pytest.approx(1.7, abs=1e-6) and h == pytest.approx(0.0, abs=1e-6)
    assert g == pytest.approx([a * (1.7 - b) for a, b in data], abs=1e-6)


def test_the_server_takes_the_uniform_mean_and_the_share_of_all_clients():
    server = {"params": tree(1.0), "buffers": {"m": torch.tensor(0.0)}, "gradient": tree(0.5)}
    replies = [
        Reply(0, 10.0, {"params": tree(2.0), "buffers": {"m": torch.tensor(1.0)}}, {}),
        Reply(1, 90.0, {"params": tree(4.0), "buffers": {"m": torch.tensor(3.0)}}, {}),
    ]
    new = feddyn(local=local(), alpha=0.1).server_update(server, replies, SimpleNamespace(num_clients=20))
    # h = .5 - .1 / 20 (1 + 3) = .48, theta = 3 - .48 / .1 = -1.8
    assert new["gradient"]["w"].item() == pytest.approx(0.48)
    assert new["params"]["w"].item() == pytest.approx(-1.8)
    assert new["buffers"]["m"].item() == 2.0


def at_work(norm=True):
    whole = experiment(DYN, spec=BlobSpec(norm=norm))
    return whole.context(whole.net(), 0, round=0, client=0), whole.plan.train(0, 0, 0, "train")


def test_the_first_round_of_a_client_is_fedprox_with_the_same_weight_bit_for_bit():
    ctx, data = at_work()
    model = ctx.init_state()
    ours = feddyn(local=local(), alpha=0.3).client_update(model, feddyn(local=local()).init_client(ctx), data, ctx)
    theirs = fedprox(local=local(), mu=0.3).client_update(model, {}, data, ctx)
    assert digest(ours.up) == digest(theirs.up) and ours.metrics == theirs.metrics


def test_one_step_follows_the_gradient_of_the_loss_written_by_hand():
    ctx, data = at_work(norm=False)
    model, old = (Net(BlobSpec(seed=seed, norm=False).classifier).fresh()["params"] for seed in (1, 2))
    g = {name: 0.1 * tensor for name, tensor in old.items()}
    method = feddyn(local=local(optimizer=SGD(lr=0.5), epochs=2, batch_size=1000), alpha=0.7)
    end = method.client_update({"params": model, "buffers": {}}, {"gradient": g}, data, ctx)
    x, y = data.stored(torch.arange(len(data)))
    module, w = BlobSpec(norm=False).classifier(), model
    for _ in range(2):
        w = {name: tensor.detach().clone().requires_grad_() for name, tensor in w.items()}
        z = torch.func.functional_call(module, w, x)["logits"] + ctx.class_mask("seen")
        loss = torch.nn.functional.cross_entropy(z, y)
        loss = loss - sum((g[name] * w[name]).sum() for name in w)
        (loss + 0.35 * sum((w[name] - model[name]).square().sum() for name in w)).backward()
        w = {name: tensor.detach() - 0.5 * tensor.grad for name, tensor in w.items()}
    for name in ("body.layers.0.weight", "body.layers.0.bias"):
        torch.testing.assert_close(end.up["params"][name], w[name])
        torch.testing.assert_close(end.state["gradient"][name], g[name] - 0.7 * (w[name] - model[name]))
    seen = list(ctx.stage.seen)
    torch.testing.assert_close(end.up["params"]["head.weight"][seen], w["head.weight"][seen])


def test_the_model_alone_travels():
    ctx, data = at_work()
    method = feddyn(local=local())
    server = method.init_server(ctx)
    update = method.client_update(method.send(server, 0, ctx), method.init_client(ctx), data, ctx)
    assert method.send(server, 0, ctx).keys() == method.send(server, None, ctx).keys() == {"params", "buffers"}
    assert set(update.up) == set(method.reveals) == {"params", "buffers"}
    assert not any(tensor.any() for tensor in server["gradient"].values())


@dataclass(frozen=True)
class Checked(FedDyn):
    """Notes every g_i and compares h with their mean after each merge."""

    def __post_init__(self):
        object.__setattr__(self, "states", {})
        object.__setattr__(self, "rounds", [])

    def client_update(self, down, state, data, ctx):
        if ctx.client in self.states:
            assert digest(state) == digest(self.states[ctx.client]), "a client that was away lost its g"
        update = super().client_update(down, state, data, ctx)
        self.states[ctx.client] = update.state
        assert not update.state["gradient"]["head.weight"][ctx.unseen].any()
        return update

    def server_update(self, server, replies, ctx):
        new = super().server_update(server, replies, ctx)
        for name, h in new["gradient"].items():
            mean = sum(state["gradient"][name] for state in self.states.values()) / ctx.num_clients
            torch.testing.assert_close(h, mean, rtol=1e-4, atol=1e-6)
        held = new["params"]["head.weight"][ctx.unseen]
        assert torch.equal(held, server["params"]["head.weight"][ctx.unseen])
        assert not new["gradient"]["head.weight"][ctx.unseen].any()
        self.rounds.append(len(self.states))
        return new


def test_in_a_run_h_stays_the_mean_of_all_g_and_unseen_rows_stay_put(tmp_path: Path):
    method = Checked(local(), alpha=0.1)
    whole = replace(experiment(DYN, num_clients=6, rounds=3, cohort=0.4), method=method, rebuild=None)
    start(tmp_path / "run", whole)
    assert len(method.rounds) == 9 and method.rounds[0] < 6 == method.rounds[-1]
    assert all(state["gradient"]["head.weight"].any() for state in method.states.values())


def test_alpha_must_be_above_zero(tmp_path: Path):
    with pytest.raises(ConfigError, match="alpha"):
        fedloom.run("quickstart", method={"name": "feddyn", "alpha": 0.0}, out=tmp_path / "run")
