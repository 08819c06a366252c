"""MoAFCL: clusters, means, the gate's data and assignments in numbers, and runs against FedAvg of one generator."""

from dataclasses import replace

import pytest
import torch

from fedloom.core import ConfigError, Reply
from fedloom.engine.checkpoint import newest
from fedloom.local.terms import CrossEntropy
from fedloom.methods.adapter_pool import TARGETS, AdapterPool
from fedloom.methods.clip_based import ClipMethod
from fedloom.methods.moafcl import moafcl
from fedloom.models.clip.context_generator import Generator, early_features
from toys.federation import experiment, local
from toys.running import rows, start

NAME = "fedloom.methods.moafcl:moafcl"
SMALL = {"context": 2, "gate_epochs": 5}


def setting(stage=0, client=None, exchange="train", **options):
    whole = experiment(NAME, options={**SMALL, **options}, num_clients=4)
    ctx = whole.context(whole.net(), stage, round=0, exchange=exchange, client=client)
    return whole, ctx, whole.method.init_server(ctx)


def reply(server, client, value, feature, pool, spread=0.0):
    """A client whose generator is `value` everywhere and whose features lie around `feature`."""
    params = {name: torch.full_like(tensor[0], value) for name, tensor in server["adapters"].items()}
    width = server["gate"]["hidden.weight"].shape[1]
    early = torch.full((3, width), float(feature)) + spread * torch.arange(3.0)[:, None]
    share = torch.zeros(pool).index_fill_(0, torch.tensor(client % pool), 1.0)
    return Reply(client, 5.0, {"params": params, "features": {"early": early}, "histogram": {"share": share}}, {})


def level(server, j):
    values = {tensor[j].mean().item() for tensor in server["adapters"].values()}
    assert len(values) == 1
    return values.pop()


def test_identical_clients_share_a_cluster_and_a_cluster_has_its_plain_mean():
    whole, ctx, server = setting(adapters=2)
    replies = [reply(server, k, v, f, 2) for k, v, f in [(0, 1.0, 4), (1, 10.0, -4), (2, 3.0, 4), (3, 20.0, -4)]]
    replies[2] = replies[2]._replace(weight=900.0)
    clusters = whole.method.pool.clusters(server, replies, [r.up["features"]["early"] for r in replies], ctx)
    assert clusters[0] == clusters[2] != clusters[1] == clusters[3]
    new = whole.method.server_update(server, replies, ctx)
    assert {level(new, 0), level(new, 1)} == {2.0, 15.0}


def test_an_empty_cluster_leaves_the_generator_as_it_was():
    whole, ctx, server = setting()
    replies = [reply(server, k, 7.0, 4, 5) for k in range(4)]
    new = whole.method.server_update(server, replies, ctx)
    kept = [j for j in range(5) if all(torch.equal(t[j], server["adapters"][n][j]) for n, t in new["adapters"].items())]
    assert len(kept) == 4 and level(new, next(j for j in range(5) if j not in kept)) == 7.0


def test_between_clusterings_clients_are_merged_as_they_were_assigned():
    whole, ctx, server = setting(stage=1)
    server["assigned"] = {"clients": torch.tensor([3, 1, 3, 0])}
    replies = [reply(server, k, float(k), 4 * k, 5) for k in range(3)]
    new = whole.method.server_update(server, replies, ctx)
    assert level(new, 3) == 1.0 and level(new, 1) == 1.0
    for j in (0, 2, 4):
        assert all(torch.equal(t[j], server["adapters"][n][j]) for n, t in new["adapters"].items())
    assert new["assigned"]["clients"][3] == 0


@pytest.mark.parametrize(("stage", "clustered"), [(0, True), (1, False), (2, True)])
def test_clients_are_clustered_at_every_so_many_stages(stage, clustered):
    whole, ctx, server = setting(stage=stage, cluster_every=2)
    server["assigned"] = {"clients": torch.tensor([4, 4, 4, 4])}
    replies = [reply(server, k, 1.0, 4 * k, 5) for k in range(3)]
    found = whole.method.pool.clusters(server, replies, [r.up["features"]["early"] for r in replies], ctx)
    assert sorted(found.tolist()) == ([0, 1, 2] if clustered else [4, 4, 4])


def test_each_client_gets_the_generator_that_most_of_its_features_choose():
    whole, ctx, server = setting(adapters=2, gate_epochs=0)
    gate = {name: torch.zeros_like(tensor) for name, tensor in server["gate"].items()}
    gate["hidden.weight"][0, 0], gate["out.weight"][1, 0] = 1.0, 1.0  # the second one where the first entry is above 0
    replies = [reply(server, k, 0.0, f, 2, spread=1.0) for k, f in [(0, -0.5), (2, -1.5)]]
    new = whole.method.server_update({**server, "gate": gate}, replies, ctx)
    assert new["assigned"]["clients"].tolist() == [1, 0, 0, 0]


def test_a_random_assignment_is_drawn_anew():
    whole, ctx, server = setting(assign="random")
    replies = [reply(server, k, 0.0, k, 5) for k in range(4)]
    later = replace(ctx, stage=whole.plan.stage(1))
    drawn = [whole.method.server_update(server, replies, c)["assigned"]["clients"].tolist() for c in (ctx, ctx, later)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_what_the_gate_learns():
    histograms, clusters = torch.tensor([[0.25, 0.75], [0.5, 0.5]]), torch.tensor([0, 1])
    assert torch.equal(TARGETS["histogram"](histograms, clusters), histograms)
    assert torch.equal(TARGETS["cluster"](histograms, clusters), torch.eye(2))
    _, ctx, server = setting()
    with pytest.raises(ConfigError, match="Did you mean 'histogram'"):
        AdapterPool(target="histograms").updated(server, [reply(server, 0, 0.0, 1, 5)], ctx)


def test_a_client_uploads_a_histogram_that_sums_to_1_and_noisy_features():
    whole, ctx, server = setting(client=0, noise=0.5)
    data = whole.plan.train(0, 0, 0, "train")
    up = whole.method.client_update(whole.method.send(server, 0, ctx), {}, data, ctx).up
    clean = early_features(ctx, data)
    assert up["features"]["early"].shape == clean.shape == (len(data), 16)
    gap = (up["features"]["early"] - clean).abs()
    assert gap.mean().item() == pytest.approx(0.5, rel=0.2) and len(gap.unique()) > 0.9 * gap.numel()
    assert up["histogram"]["share"].sum().item() == pytest.approx(1)
    assert set(up) == set(whole.method.reveals)
    quiet, ctx, server = setting(client=0, noise=0.0)
    up = quiet.method.client_update(quiet.method.send(server, 0, ctx), {}, data, ctx).up
    assert torch.equal(up["features"]["early"], clean)


def test_a_client_receives_its_generator_and_everybody_predicts_alike():
    whole, ctx, server = setting(client=2)
    server["adapters"] = {
        n: t + torch.arange(5.0).view(-1, *[1] * (t.dim() - 1)) for n, t in server["adapters"].items()
    }
    server["assigned"] = {"clients": torch.tensor([0, 0, 4, 0])}
    down = whole.method.send(server, 2, ctx)
    assert all(torch.equal(down["params"][n], t[4]) for n, t in server["adapters"].items()) and "gate" in down
    view = whole.method.send(server, 2, replace(ctx, exchange="evaluate"))
    assert view.keys() == whole.method.send(server, None, ctx).keys() == {"params", "buffers"}
    assert "contexts" in view["params"]


def test_contexts_are_means_over_the_features_that_the_gate_gives():
    whole, ctx, server = setting(adapters=2, gate_epochs=0)
    replies = [reply(server, k, 0.01 * (k + 1), 4 - 8 * k, 2) for k in range(2)]
    new = whole.method.server_update(server, replies, ctx)
    for j in range(2):
        ctx.bind(whole.method.pool.generator(new, j))
        with ctx.evaluating():
            every = ctx.net.module.contexts(torch.cat([r.up["features"]["early"] for r in replies]))
        chosen = new["assigned"]["clients"][:2].repeat_interleave(3) == j
        expected = every[chosen if chosen.any() else slice(None)].mean(0)
        assert torch.allclose(new["contexts"]["contexts"][j], expected, atol=1e-5)


def test_there_is_one_exchange_per_stage_with_the_visits_of_all_rounds(tmp_path):
    plan = {"rounds": 3, "num_stages": 2, "cohort": 1.0}
    ours = start(tmp_path / "ours", experiment(NAME, options=SMALL, **plan))
    theirs = start(tmp_path / "theirs", experiment("fedloom.methods.fedclip:fedclip", **plan))
    assert ours["rounds"] == 2 and ours["sample_visits"] == theirs["sample_visits"]
    assert [row["round"] for row in rows(tmp_path / "ours")] == [0, 0]


def test_one_cluster_is_fedavg(tmp_path):
    plan, options = {"rounds": 1, "num_stages": 2}, {**SMALL, "training": {"epochs": 1}}
    whole = experiment(NAME, options={**options, "adapters": 1}, **plan)
    start(tmp_path / "ours", whole)
    loop = replace(local(epochs=1), terms=(CrossEntropy("current"),))
    method = ClipMethod(loop, True, build=Generator(2, 1))
    start(tmp_path / "avg", replace(whole, method=method, rebuild=None))
    ours, theirs = (newest(tmp_path / name)[0] for name in ("ours", "avg"))
    for name, tensor in theirs["params"].items():
        assert torch.equal(ours["adapters"][name][0], tensor)


def test_one_generator_has_the_weight_1():
    assert moafcl(local=local(), adapters=1).pool.size == 1
    whole, ctx, server = setting(adapters=1)
    x = torch.randn(4, 2)
    served = whole.method.deployed(whole.method.send(server, None, ctx), {}, ctx)
    with served.evaluating():
        out = served.apply(x)
    assert out["chosen"].tolist() == [0] * 4
    expected = 10 * out["feats"] @ out["texts"][0].T
    assert torch.allclose(out["logits"][:, list(ctx.stage.seen)], expected, atol=1e-4)
