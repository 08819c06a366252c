"""FDSE: who holds what, what a round makes of it in numbers, what never leaves a client, and whole runs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from fedloom.core import ConfigError, ModelSpec, Reply
from fedloom.core.payload import digest
from fedloom.engine.checkpoint import newest
from fedloom.engine.store import ClientStore
from fedloom.local import SGD, LocalSGD
from fedloom.local.terms import CrossEntropy
from fedloom.merge.similarity import similar_means
from fedloom.methods.fdse import Fdse, fdse
from fedloom.methods.fedavg import FedAvg
from fedloom.models import NetworkSpec
from fedloom.models.eraser import erased, is_eraser, own, shared
from toys.federation import BlobPlan, experiment, local
from toys.running import start

NAME = "fedloom.methods.fdse:fdse"
BLOCK, COUNT = "body.layers.0", "num_batches_tracked"


def began(**options):
    """An experiment, a context of its server, and the server's first state."""
    whole = experiment(NAME, options=options, num_stages=1)
    ctx = whole.context(whole.net(), 0, round=0)
    return whole, ctx, whole.method.init_server(ctx)


def worked(whole, server, client, state=None, round=0):
    """One client's update from a server state."""
    ctx = whole.context(whole.net(), 0, round=round, client=client)
    data = whole.plan.train(client, 0, round, "train")
    return whole.method.client_update(whole.method.send(server, client, ctx), state or {}, data, ctx)


def replies_of(whole, server, clients, states=None, round=0):
    """Updates of some clients and the replies that they make."""
    updates = [worked(whole, server, k, (states or {}).get(k), round) for k in clients]
    return updates, [Reply(k, 1.0 + k, u.up, u.metrics) for k, u in zip(clients, updates, strict=True)]


def moved(server, **changes: Tensor):
    """The model of a server state with some parameters moved."""
    params = {name: t + changes[name] if name in changes else t for name, t in server["params"].items()}
    return {"params": params, "buffers": shared(server["buffers"])}


def test_the_statistics_of_the_erasers_norms_never_leave_a_client():
    whole, _, server = began()
    updates, _ = replies_of(whole, server, (0, 1))
    for update in updates:
        assert set(update.up) == {"params", "buffers"} <= set(whole.method.reveals)
        assert not any(is_eraser(name) for name in update.up["buffers"])
        assert set(update.up["params"]) == set(server["params"])
        assert set(update.state["norms"]) == {f"{BLOCK}.dse_bn.{n}" for n in ("running_mean", "running_var", COUNT)}
        assert update.state["norms"][f"{BLOCK}.dse_bn.running_mean"].any()


def test_a_client_is_sent_its_own_eraser_and_trains_with_its_own_statistics():
    whole, ctx, server = began()
    updates, replies = replies_of(whole, server, (0, 1))
    server = whole.method.server_update(server, replies, ctx)
    down = [whole.method.send(server, client, ctx) for client in (0, 1, 2, None)]
    name = f"{BLOCK}.dse_conv.weight"
    assert down[0]["params"][name] is server["eraser.0"][name] and down[1]["params"][name] is server["eraser.1"][name]
    assert not torch.equal(down[0]["params"][name], down[1]["params"][name])
    assert not any(is_eraser(n) for client in (0, 1) for n in down[client]["buffers"])
    assert all(down[2][f][n] is down[3][f][n] for f in ("params", "buffers") for n in server[f])
    again = [worked(whole, server, 0, state, round=1) for state in (updates[0].state, updates[1].state)]
    counts = [u.state["norms"][f"{BLOCK}.dse_bn.{COUNT}"] for u in (updates[0], again[0])]
    assert counts[1] == 2 * counts[0] > 0
    assert digest(again[0].state) != digest(again[1].state)


def test_a_round_of_the_server_in_numbers():
    _, ctx, server = began()
    method, zeros = fdse(local=local()), torch.zeros_like(server["params"]["head.bias"])
    up, right = zeros.clone(), zeros.clone()
    right[0], up[1] = 2.0, 4.0
    ups = [moved(server, **{"head.bias": right}), moved(server, **{"head.bias": up})]
    conv = f"{BLOCK}.dse_conv.weight"
    for k, tree in enumerate(ups):
        tree["params"][conv] = torch.zeros_like(server["params"][conv])
        tree["params"][conv][k] = 1.0
        norm = f"{BLOCK}.dfe_bn."
        tree["buffers"] = {f"{norm}running_mean": torch.full((8,), k + 1.0), f"{norm}running_var": torch.ones(8) * 3,
                           f"{norm}{COUNT}": torch.tensor(5 + k)}  # fmt: skip
    new = method.server_update(server, [Reply(k, 1 + 9.0 * k, tree, {}) for k, tree in enumerate(ups)], ctx)
    gain = new["params"]["head.bias"] - server["params"]["head.bias"]
    torch.testing.assert_close(gain[:2], torch.tensor([1.5, 1.5]))
    assert not gain[2:].any()
    assert new["params"]["head.weight"] is server["params"]["head.weight"]
    own_weights = torch.stack([new[f"eraser.{k}"][conv].flatten()[:2] for k in (0, 1)])
    torch.testing.assert_close(own_weights, torch.tensor([[0.8808, 0.1192], [0.1192, 0.8808]]), atol=5e-5, rtol=0)
    torch.testing.assert_close(new["params"][conv].flatten()[:2], torch.tensor([0.5, 0.5]))
    assert torch.equal(new["buffers"][f"{BLOCK}.dfe_bn.running_mean"], torch.full((8,), 1.5))
    assert new["buffers"][f"{BLOCK}.dfe_bn.{COUNT}"] == 11
    assert torch.equal(new["buffers"][f"{BLOCK}.dse_bn.running_var"], torch.ones(4))


def test_counters_count_the_batches_of_all_clients_however_many_rounds():
    whole, ctx, server = began()
    states, seen = {}, 0
    for round in range(3):
        updates, replies = replies_of(whole, server, (0, 1, 2), states, round)
        states = {k: u.state for k, u in enumerate(updates)}
        server = whole.method.server_update(server, replies, ctx)
        seen += sum(2 * whole.plan.train(k, 0, round, "train").steps(8) for k in range(3))
        assert server["buffers"][f"{BLOCK}.dfe_bn.{COUNT}"] == seen


def test_an_absent_clients_eraser_stays_and_the_global_view_is_the_mean_of_all():
    whole, ctx, server = began()
    updates, replies = replies_of(whole, server, (0, 2))
    first = whole.method.server_update(server, replies, ctx)
    updates, replies = replies_of(whole, first, (1, 2), {2: updates[1].state})
    second = whole.method.server_update(first, replies, ctx)
    assert [field for field in second if field.startswith("eraser.")] == ["eraser.0", "eraser.1", "eraser.2"]
    assert all(second["eraser.0"][name] is tensor for name, tensor in first["eraser.0"].items())
    alike = similar_means([own(u.up["params"]) for u in updates], own(first["params"]), 0.5)
    for name in own(server["params"]):
        assert torch.equal(second["eraser.1"][name], alike[0][name])
        mean = torch.stack([second[f"eraser.{k}"][name].double() for k in range(3)]).mean(0)
        torch.testing.assert_close(second["params"][name], mean.float())


def test_there_is_no_regulariser_until_statistics_have_been_merged():
    whole, ctx, server = began(lam=0.5)
    plain = began(lam=0.0)[0]
    assert digest(worked(whole, server, 0).up) == digest(worked(plain, server, 0).up)
    updates, replies = replies_of(whole, server, (0, 1))
    server = whole.method.server_update(server, replies, ctx)
    with_it, without = (worked(kind, server, 1, updates[1].state, round=1) for kind in (whole, plain))
    assert digest(with_it.up) != digest(without.up)
    bias = f"{BLOCK}.dfe_bias"
    assert (with_it.up["params"][bias] - without.up["params"][bias]).abs().max() > 1e-3


def test_the_regulariser_draws_a_layers_statistics_to_those_that_were_sent():
    gaps = []
    for lam in (0.0, 5.0):
        whole, ctx, server = began(lam=lam, training={"optimizer": SGD(lr=0.05)})
        updates, replies = replies_of(whole, server, (0, 1))
        server = whole.method.server_update(server, replies, ctx)
        wanted = server["buffers"][f"{BLOCK}.dfe_bn.running_mean"]
        found = worked(whole, server, 0, updates[0].state, round=1).up["buffers"][f"{BLOCK}.dfe_bn.running_mean"]
        gaps.append(float((found - wanted).norm()))
    assert gaps[1] < 0.5 * gaps[0]


@dataclass(frozen=True)
class ErasedFedAvg(FedAvg):
    """FedAvg on the same network, which shares everything."""

    def module(self, spec: ModelSpec) -> nn.Module:
        return erased(spec.classifier(), seed=spec.seed)


def test_with_one_client_and_no_regulariser_it_is_fedavg_on_the_same_network(tmp_path):
    servers = []
    for kind in ("shared", "consensus", "mean"):
        whole = experiment(NAME, options={"lam": 0.0, "consensus": kind == "consensus"}, num_clients=1, cohort=1)
        if kind == "shared":
            avg = ErasedFedAvg(dataclasses.replace(local(), terms=(CrossEntropy(),)))
            whole = dataclasses.replace(whole, method=avg, rebuild=None)
        start(tmp_path / kind, whole)
        servers.append(newest(tmp_path / kind)[0])
    for server in servers[1:]:
        assert digest({"params": server["params"]}) == digest({"params": servers[0]["params"]})
        assert digest({"buffers": shared(server["buffers"])}) == digest({"buffers": shared(servers[0]["buffers"])})
    kept = ClientStore(tmp_path / "mean" / "clients").load(0, newest(tmp_path / "mean")[1].versions[0])
    assert digest({"norms": kept["norms"]}) == digest({"norms": own(servers[0]["buffers"])})


def test_clients_alike_are_fedavg_with_uniform_weights():
    """Equal moves have one direction, which is their mean, and equal erasers are alike."""
    _, ctx, server = began()
    end = worked(*began(lam=0.0)[::2], 0)
    new = fdse(local=local()).server_update(server, [Reply(k, 1.0 + k, end.up, {}) for k in range(3)], ctx)
    for name, tensor in end.up["params"].items():
        torch.testing.assert_close(new["params"][name], tensor, rtol=1e-6, atol=1e-7)


def test_recalibration_pools_the_erasers_statistics_of_the_global_view():
    whole, ctx, server = began(recalibrate=True, training={"batch_size": 1000})
    assert [trip.exchange for trip in whole.method.plan(ctx.stage)] == ["train", "train", "recalibrate"]
    assert [t.exchange for t in fdse(local=local()).plan(ctx.stage)] == ["train", "train"]
    server = whole.method.server_update(server, replies_of(whole, server, (0, 1))[1], ctx)
    exchange = whole.method.exchanges()["recalibrate"]
    replies, inputs = [], []
    for client in range(4):
        data = whole.plan.train(client, 0, None, "recalibrate")
        at = whole.context(whole.net(), 0, exchange="recalibrate", client=client)
        update = exchange.work(exchange.send(server, client, at), {}, data, at)
        assert set(update.up) == {"norms"} and update.state == {} and data.visits.count == 0
        assert at.net.module.get_submodule(f"{BLOCK}.dse_bn").momentum == 0.1
        replies.append(Reply(client, float(len(data)), update.up, {}))
        inputs.append(data.stored(torch.arange(len(data)))[0])
    new = exchange.absorb(server, replies, ctx)
    assert {f: digest({f: t}) for f, t in new.items() if f != "buffers"} == {
        f: digest({f: t}) for f, t in server.items() if f != "buffers"
    }
    assert digest({"b": shared(new["buffers"])}) == digest({"b": shared(server["buffers"])})
    weight = server["params"][f"{BLOCK}.dfe_conv.weight"][:, :, 0, 0]
    cores = [x @ weight.T for x in inputs]
    mean = torch.cat(cores).mean(0)
    spread = sum(len(core) * (core.var(0) + (core.mean(0) - mean) ** 2) for core in cores) / sum(map(len, cores))
    torch.testing.assert_close(new["buffers"][f"{BLOCK}.dse_bn.running_mean"], mean)
    torch.testing.assert_close(new["buffers"][f"{BLOCK}.dse_bn.running_var"], spread)


def test_a_client_with_one_example_measures_nothing():
    whole, _, server = began(recalibrate=True)
    at = whole.context(whole.net(), 0, exchange="recalibrate", client=0)
    update = whole.method.measure(
        whole.method.send(server, None, at), {}, whole.plan.train(0, 0, None, "x").part(0, 1), at
    )
    assert update.weight == 0.0 and update.up == {}


def test_clients_learn_in_a_run(tmp_path):
    options = {"recalibrate": True, "training": {"epochs": 3}}
    summary = start(tmp_path / "run", experiment(NAME, options=options, num_stages=1, rounds=4, cohort=1.0))
    assert summary["per_client_accuracy_mean"] > 0.9 and summary["final_accuracy"] > 0.9
    assert summary["pass_visits"] == sum(BlobPlan(num_stages=1).size(k, 0) for k in range(4))


def test_a_residual_network_trains_a_round_and_predicts_personally():
    spec = NetworkSpec("resnet8", 6, (3, 8, 8))
    method = Fdse(LocalSGD())
    module = method.module(spec)
    plain = sum(p.numel() for p in spec.classifier().parameters())
    assert 0.5 < sum(p.numel() for p in module.parameters()) / plain < 0.6
    out = module.train()(torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0)))
    assert sum(name.startswith("moments/") for name in out) == 9


def test_networks_without_batch_normalisation_are_refused_before_the_run():
    with pytest.raises(ConfigError, match=r"batch normalisation.*model\.name"):
        fdse(local=local()).module(NetworkSpec("small_cnn", 6, (3, 8, 8)))


def test_the_plan_of_the_toys_gives_every_client_both_domains():
    """What the tests above rest on: no client is of one domain, so an eraser is a client's, not a domain's."""
    assert all(len(BlobPlan(num_stages=1).train(k, 0, 0, "train").by_domain()) == 2 for k in range(4))
