"""SCAFFOLD: the numbers of algorithm 1 (option II), the invariants of c and c_i, and whole runs against FedAvg."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

import fedloom
from fedloom.core import ConfigError, Reply, Stage
from fedloom.local import SGD, AdamW, LocalSGD, Phase, Schedule
from fedloom.methods.scaffold import Correction, Scaffold, refreshed, scaffold, total_rate

STAGE = Stage(index=0, count=1, rounds=1, classes=(0, 1), seen=(0, 1))


def context(clients=1):
    return SimpleNamespace(stage=STAGE, round=0, global_round=0, total_rounds=1, num_clients=clients)


CTX = context()


def tree(value):
    return {"w": torch.tensor(value, dtype=torch.float64)}


@dataclass(frozen=True)
class Quadratic:
    """Stands for LocalSGD on f_i(y) = a_i (y - b_i)^2 / 2, with (a_i, b_i) as the data; two real steps."""

    optimizer: SGD = field(default_factory=lambda: SGD(lr=0.1))
    schedule: Schedule = field(default_factory=Schedule)
    transforms: tuple = ()
    phases: tuple = ()

    def __call__(self, down, data, ctx, ref):
        params = down["params"]
        for _ in range(2):
            grads = {"w": data[0] * (params["w"] - data[1])}
            for transform in self.transforms:
                grads = transform(grads, params, ref)
            params = {"w": params["w"] - self.optimizer.lr * grads["w"]}
        return SimpleNamespace(params=params, buffers={}, metrics={}, steps=2)


def server_state(params, control):
    return {"params": tree(params), "buffers": {}, "control": tree(control)}


def reply(client, params=0.0, change=0.0, weight=1.0):
    return Reply(
        client=client, weight=weight, up={"params": tree(params), "buffers": {}, "control": tree(change)}, metrics={}
    )


def simulate(method, data, cohorts):
    """Runs the cohorts and yields (server, client controls) after each."""
    ctx = context(len(data))
    server, states = server_state(1.0, 0.0), [{"control": tree(0.0)} for _ in data]
    for cohort in cohorts:
        replies = []
        for i in cohort:
            update = method.client_update(method.send(server, i, ctx), states[i], data[i], ctx)
            states[i] = update.state
            replies.append(Reply(client=i, weight=1.0, up=update.up, metrics={}))
        server = method.server_update(server, replies, ctx)
        yield server, [state["control"]["w"].item() for state in states]


def test_option_two_in_numbers():
    correction = {"w": tree(0.1)["w"] - tree(0.2)["w"]}
    new = refreshed(tree(0.2), correction, tree(1.0), tree(0.8), rate=2 * 0.1)
    assert new["w"].item() == pytest.approx(1.1, abs=1e-12)


def test_a_round_without_rate_keeps_the_control():
    assert refreshed(tree(0.2), tree(-0.1), tree(1.0), tree(1.0), rate=0.0)["w"].item() == 0.2


def test_the_step_adds_c_and_takes_c_i_away():
    assert Correction()(tree(3.0), tree(0.0), {"correction": tree(0.1 - 0.2)})["w"].item() == pytest.approx(2.9)


def test_one_client_round_in_numbers():
    method = scaffold(local=Quadratic())
    down = {"params": tree(1.0), "buffers": {}, "control": tree(0.1)}
    update = method.client_update(down, {"control": tree(0.2)}, (2.0, 0.0), CTX)
    # y1 = 1 - .1 (2 - .1) = .81, y2 = .81 - .1 (1.62 - .1) = .658, c_i+ = .2 - .1 + .342 / .2 = 1.81 = mean(2, 1.62)
    assert update.up["params"]["w"].item() == pytest.approx(0.658)
    assert update.state["control"]["w"].item() == pytest.approx(1.81)
    assert update.up["control"]["w"].item() == pytest.approx(1.61)


def test_the_server_takes_the_cohorts_share_of_all_clients():
    replies = [reply(i, change=0.9) for i in range(5)]
    server = scaffold(local=LocalSGD()).server_update(server_state(0, 0.5), replies, context(20))
    assert server["control"]["w"].item() == pytest.approx(0.5 + 0.225)


@pytest.mark.parametrize(("rate", "expected"), [(1.0, 3.0), (0.5, 2.0), (2.0, 5.0)])
def test_server_step_uses_the_uniform_mean(rate, expected):
    method = scaffold(local=LocalSGD(), server_lr=rate)
    replies = [reply(0, params=2.0, weight=10.0), reply(1, params=4.0, weight=90.0)]
    assert method.server_update(server_state(1.0, 0.0), replies, context(2))["params"]["w"].item() == pytest.approx(
        expected
    )


def test_full_participation_keeps_c_the_mean_of_all_c_i():
    data = [(1.0, 0.0), (2.0, 3.0), (0.5, -1.0)]
    for server, controls in simulate(scaffold(local=Quadratic()), data, [range(3)] * 6):
        assert server["control"]["w"].item() == pytest.approx(sum(controls) / 3, abs=1e-12)
        assert len(set(controls)) == 3


def test_partial_participation_freezes_the_absent_and_keeps_the_mean():
    data, before = [(1.0, 0.0), (2.0, 3.0), (0.5, -1.0), (1.5, 2.0)], [0.0] * 4
    cohorts = [(0, 1), (1, 3), (2, 3), (0, 2)]
    for cohort, (server, controls) in zip(cohorts, simulate(scaffold(local=Quadratic()), data, cohorts), strict=True):
        changed = {i for i in range(4) if controls[i] != before[i]}
        assert changed == set(cohort)
        assert server["control"]["w"].item() == pytest.approx(sum(controls) / 4, abs=1e-12)
        before = controls


def test_drift_is_removed_at_the_optimum():
    """Clients of different curvature pull FedAvg off the optimum (sum a b / sum a = 2.2); SCAFFOLD reaches it."""
    *_, (server, _) = simulate(scaffold(local=Quadratic()), [(1.0, -1.0), (4.0, 3.0)], [range(2)] * 300)
    assert server["params"]["w"].item() == pytest.approx(2.2, abs=1e-6)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("name", ["constant", "cosine"])
def test_total_rate_is_how_far_torch_moves_under_a_constant_gradient(momentum, nesterov, name):
    optimizer = SGD(lr=0.1, momentum=momentum, nesterov=nesterov and momentum > 0)
    local = LocalSGD(optimizer=optimizer, schedule=Schedule(name=name, per="step"))
    y = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
    torch_sgd = torch.optim.SGD([y], lr=0.1, momentum=momentum, nesterov=optimizer.nesterov)
    for step in range(7):
        torch_sgd.param_groups[0]["lr"] = 0.1 * local.schedule.factor(CTX, step, 7)
        y.grad = torch.ones_like(y)
        torch_sgd.step()
    assert total_rate(local, CTX, 7) == pytest.approx(-y.item(), rel=1e-9)


def test_total_rate_without_momentum_is_k_times_eta():
    assert total_rate(LocalSGD(optimizer=SGD(lr=0.1)), CTX, 2) == pytest.approx(0.2)


def test_other_optimisers_and_phases_are_refused_in_words():
    with pytest.raises(ConfigError, match=r"sgd.*AdamW"):
        scaffold(local=LocalSGD(optimizer=AdamW()))
    with pytest.raises(ConfigError, match="phases"):
        scaffold(local=LocalSGD(phases=(Phase(trainable=("head.*",)),)))


def test_every_upload_is_declared_and_the_global_view_is_the_model():
    method = scaffold(local=Quadratic())
    server = server_state(1.0, 0.0)
    update = method.client_update(method.send(server, 0, CTX), {"control": tree(0.0)}, (1.0, 0.0), CTX)
    assert set(update.up) == set(method.reveals)
    assert set(method.send(server, None, CTX)) == {"params", "buffers"}


def quickstart(out, method, *, training, tasks=2):
    """Run the quickstart with plain SGD and one epoch of large batches; gives the run."""
    training = {"local_epochs": 1, "batch_size": 64, "optimizer": {"momentum": 0.0}, **training}
    return fedloom.run("quickstart", method=method, out=out, stream={"tasks": tasks}, training=training)


def test_the_first_round_is_fedavg_with_uniform_weights_and_the_second_is_not(tmp_path):
    uniform = {"name": "fedavg", "uniform": True}
    for rounds, same in ((1, True), (2, False)):
        training = {"rounds": rounds, "cohort": 0.5}
        ours = quickstart(tmp_path / f"ours{rounds}", "scaffold", training=training, tasks=1)
        theirs = quickstart(tmp_path / f"theirs{rounds}", uniform, training=training, tasks=1)
        assert (ours.summary["params_sha256"] == theirs.summary["params_sha256"]) is same


def test_a_run_keeps_unseen_rows_at_zero_absent_clients_frozen_and_c_the_mean(tmp_path, monkeypatch):
    servers, states = [], {}
    train, merge = Scaffold.client_update, Scaffold.server_update

    def client_update(self, down, state, data, ctx):
        if ctx.client in states:
            assert all(torch.equal(tensor, states[ctx.client][name]) for name, tensor in state["control"].items())
        update = train(self, down, state, data, ctx)
        states[ctx.client] = update.state["control"]
        assert not update.state["control"]["head.weight"][ctx.unseen].any()
        return update

    def server_update(self, server, replies, ctx):
        new = merge(self, server, replies, ctx)
        assert not new["control"]["head.weight"][ctx.unseen].any()
        for name, c in new["control"].items():
            mean = sum(control[name] for control in states.values()) / 10
            torch.testing.assert_close(c, mean, rtol=1e-4, atol=1e-5)
        servers.append(new)
        return new

    monkeypatch.setattr(Scaffold, "client_update", client_update)
    monkeypatch.setattr(Scaffold, "server_update", server_update)
    quickstart(tmp_path / "run", "scaffold", training={"rounds": 2, "cohort": 0.5})
    assert len(servers) == 4
    assert servers[-1]["control"]["head.weight"].any(dim=1).all()


def test_a_run_with_another_optimiser_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"optimizer\.name: sgd"):
        fedloom.run("quickstart", method="scaffold", out=tmp_path / "run", training={"optimizer": {"name": "adamw"}})
