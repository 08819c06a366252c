"""The Fisher of channels against brute force and the identities of gates, and what a pass must leave alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedloom.core import Batches, ConfigError, Forward
from fedloom.core.payload import digest
from fedloom.core.seeds import seeded
from fedloom.local.gate_fisher import IMPORTANCES, gate_fisher, gate_gradients
from fedloom.local.passes import diagonal_fisher
from local.blobs import context, data
from local.gated import examples, gated_context, network

pytestmark = pytest.mark.usefixtures("no_global_draws")
NETWORKS = ["toy", "mlp", "small_cnn", "resnet8"]


def masked(ctx, keep: float = 0.6) -> torch.Tensor:
    total = ctx.net.module.channels.total
    return (torch.rand(total, generator=torch.Generator().manual_seed(3)) < keep).double()


def one_by_one(name: str, batches: Batches, gates: torch.Tensor, classes: int = 3) -> list[torch.Tensor]:
    """Gradients [C] of each example's loss by gates that all of its channels share."""
    net, found = network(name).eval(), []
    for batch in batches.epoch(batch_size=1, shuffle=False):
        shared = gates.clone().requires_grad_()
        with net.gated(shared):
            out = net(batch.x)["logits"][:, :classes]
        found.append(torch.autograd.grad(F.cross_entropy(out, batch.y), shared)[0])
    return found


@pytest.mark.parametrize("name", NETWORKS)
def test_it_is_the_mean_of_squared_gate_gradients_taken_one_by_one(name: str):
    ctx, batches = gated_context(name), examples(name, 6)
    for gates in (torch.ones(ctx.net.module.channels.total, dtype=torch.float64), masked(ctx)):
        found = gate_fisher(ctx, batches, gates, batch_size=4)
        expected = torch.stack(one_by_one(name, batches, gates)).square().mean(0)
        assert found.dtype == torch.float64 and found.device.type == "cpu" and found.any()
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-14)


def test_the_gate_of_an_inner_channel_is_that_of_its_norm():
    """At z = 1: dl/dz_j = gamma_j dl/dgamma_j + beta_j dl/dbeta_j for a channel with one norm and one reader."""
    ctx, batches = gated_context("resnet8"), examples("resnet8", 5)
    net, checked = ctx.net.module.eval(), 0
    (batch,) = batches.epoch(batch_size=5, shuffle=False)
    ones = torch.ones(net.channels.total, dtype=torch.float64)
    found = net.channels.split(gate_gradients(ctx, batch, ones).sum(0))
    F.cross_entropy(net(batch.x)["logits"][:, :3], batch.y, reduction="sum").backward()
    for group, gradients in zip(net.channels.groups, found, strict=True):
        if len(group.norms) == 1 and len(group.taps) == 1:
            norm = net.get_submodule(group.norms[0])
            expected = norm.weight * norm.weight.grad + norm.bias * norm.bias.grad
            torch.testing.assert_close(gradients, expected.detach(), rtol=0, atol=3e-9)
            checked += 1
    assert checked == 3


def test_the_gate_of_any_group_is_the_inner_product_over_its_taps():
    """sum over taps of <dl/dh_j, h_j>, residual streams included: one shared gate, so the square is of this sum."""
    ctx, batches = gated_context("resnet8"), examples("resnet8", 4)
    net = ctx.net.module.eval()
    (batch,) = batches.epoch(batch_size=4, shuffle=False)
    ones = torch.ones(net.channels.total, dtype=torch.float64)
    found = net.channels.split(gate_gradients(ctx, batch, ones))
    seen, handles = {}, []
    for tap in (tap for group in net.channels.groups for tap in group.taps):
        part = net.get_submodule(tap.module)
        if tap.side == "input":
            handles.append(part.register_forward_pre_hook(lambda m, i, tap=tap: seen.__setitem__(tap, i[0])))
        else:
            handles.append(part.register_forward_hook(lambda m, i, o, tap=tap: seen.__setitem__(tap, o)))
    loss = F.cross_entropy(net(batch.x)["logits"][:, :3], batch.y, reduction="sum")
    for handle in handles:
        handle.remove()
    slopes = dict(zip(seen, torch.autograd.grad(loss, list(seen.values())), strict=True))
    assert any(len(group.taps) > 1 for group in net.channels.groups)
    for group, gradients in zip(net.channels.groups, found, strict=True):
        each = [(slopes[tap] * seen[tap].detach()).flatten(2).sum(2) for tap in group.taps]
        torch.testing.assert_close(gradients, torch.stack(each).sum(0), rtol=0, atol=1e-10)


def test_a_closed_channel_has_a_score_although_its_weights_have_none():
    ctx, batches = gated_context("resnet8"), examples("resnet8", 60)
    gates = masked(ctx, 0.5)
    scores, weights = (gate_fisher(ctx, batches, gates, importance=IMPORTANCES[n]) for n in ("gate", "weight_sum"))
    closed = gates == 0
    for part, off in zip(ctx.net.module.channels.split(scores), ctx.net.module.channels.split(closed), strict=True):
        assert (part[off] > 0).double().mean() >= 0.8
    assert not weights[closed].any() and (weights[~closed] > 0).double().mean() >= 0.8


def test_a_gate_before_the_relu_has_no_gradient_at_zero():
    """Why the gates follow the ReLU: its derivative at 0 is 0."""
    net, (x, y) = network("toy").eval(), examples("toy", 6).stored(torch.arange(6))
    gates = torch.zeros(8, dtype=torch.float64, requires_grad=True)
    handle = net.body.layers[1].register_forward_hook(lambda m, i, o: o * gates)
    loss = F.cross_entropy(net(x)["logits"], y)
    handle.remove()
    assert not torch.autograd.grad(loss, gates)[0].any()
    with net.gated(gates):
        loss = F.cross_entropy(net(x)["logits"], y)
    assert torch.autograd.grad(loss, gates)[0].any()


def test_the_square_of_the_mean_gradient_is_another_and_smaller_thing():
    ctx, batches = gated_context("mlp"), examples("mlp", 10)
    gates = torch.ones(12, dtype=torch.float64)
    ones = torch.stack(one_by_one("mlp", batches, gates))
    means = [part.mean(0).square() * len(part) / 10 for part in ones.split([4, 4, 2])]
    found = gate_fisher(ctx, batches, gates, importance=IMPORTANCES["batch_grad"], batch_size=4)
    torch.testing.assert_close(found, torch.stack(means).sum(0))
    assert found.sum() < gate_fisher(ctx, batches, gates).sum()
    single = gate_fisher(ctx, batches, gates, importance=IMPORTANCES["batch_grad"], batch_size=1)
    torch.testing.assert_close(single, gate_fisher(ctx, batches, gates))


def test_labels_of_the_model_give_the_expectation_over_its_prediction():
    ctx, gates = gated_context("mlp"), torch.ones(12, dtype=torch.float64)
    x = examples("mlp", 1).stored(torch.tensor([0]))[0]
    many = Batches(x.expand(3000, 2), torch.zeros(3000, dtype=torch.long), torch.arange(3000), key=(0,), prepare=_plain)
    given = {"samples": 3000, "batch_size": 500}
    found = gate_fisher(ctx, many, gates, importance=IMPORTANCES["model_labels"], **given)
    shares = network("mlp").eval()(x)["logits"][0, :3].softmax(0).detach()
    singles = [Batches(x, torch.tensor([c]), torch.arange(1), key=(0,), prepare=_plain) for c in range(3)]
    per_class = [one_by_one("mlp", single, gates)[0] for single in singles]
    expected = sum(p * g.square() for p, g in zip(shares, per_class, strict=True))
    torch.testing.assert_close(found, expected, rtol=0.15, atol=1e-12)
    assert torch.equal(found, gate_fisher(ctx, many, gates, importance=IMPORTANCES["model_labels"], **given))


def _plain(x, rng):
    return x


@pytest.mark.parametrize("name", ["toy", "resnet8"])
def test_weight_scores_are_the_diagonal_fisher_of_the_filters_of_a_channel(name: str):
    ctx, batches = gated_context(name), examples(name, 5)
    channels = ctx.net.module.channels
    fisher = diagonal_fisher(ctx, batches)
    ones = torch.ones(channels.total, dtype=torch.float64)
    total = channels.split(gate_fisher(ctx, batches, ones, importance=IMPORTANCES["weight_sum"]))
    mean = channels.split(gate_fisher(ctx, batches, ones, importance=IMPORTANCES["weight_mean"]))
    for group, summed, averaged in zip(channels.groups, total, mean, strict=True):
        rows = torch.cat([fisher[name].flatten(1) for name in group.writers], 1)
        torch.testing.assert_close(summed, rows.sum(1))
        torch.testing.assert_close(averaged, rows.mean(1))


def test_classes_outside_the_scope_do_not_count():
    batches = examples("toy", 8)
    gates = torch.ones(8, dtype=torch.float64)
    seen = gate_fisher(gated_context("toy"), batches, gates)
    torch.testing.assert_close(seen, torch.stack(one_by_one("toy", batches, gates)).square().mean(0))
    full = gate_fisher(gated_context("toy"), batches, gates, scope="all")
    torch.testing.assert_close(full, torch.stack(one_by_one("toy", batches, gates, 6)).square().mean(0))
    assert not torch.equal(seen, full)


@pytest.mark.parametrize("importance", sorted(IMPORTANCES))
def test_the_network_and_what_training_sees_stay_as_they_were(importance: str):
    ctx, batches = gated_context("resnet8"), examples("resnet8", 6)
    state = ctx.init_state()
    live = ctx.bind(state["params"], state["buffers"])
    order = [batch.index.tolist() for batch in examples("resnet8", 6).epoch(0, 4)]
    gates = masked(ctx)
    for training in (True, False):
        ctx.net.train(training)
        scores = gate_fisher(ctx, batches, gates, importance=IMPORTANCES[importance])
        assert scores.shape == gates.shape and scores.isfinite().all() and (scores >= 0).all()
        assert ctx.net.module.training is training
    params, buffers = ctx.net.take()
    assert digest({"params": params, "buffers": buffers}) == digest(state)
    assert all(param.grad is None for param in live.values()) and not gates.requires_grad
    assert [batch.index.tolist() for batch in batches.epoch(0, 4)] == order
    assert (batches.visits.count, batches.visits.passes) == (6, 12)


def test_of_many_examples_a_draw_of_the_clients_own_is_measured_without_augmentation():
    drawn = []
    batches = examples("toy", 40, prepare=lambda x, rng: drawn.append(rng) or x)
    gates = torch.ones(8, dtype=torch.float64)
    found = [gate_fisher(gated_context("toy", client=c), batches, gates, samples=10) for c in (0, 1, 0)]
    assert torch.equal(found[0], found[2]) and not torch.equal(found[0], found[1])
    assert batches.visits.passes == 30 and set(drawn) == {None}
    everything = gate_fisher(gated_context("toy", client=0), batches, gates, samples=40)
    assert torch.equal(everything, gate_fisher(gated_context("toy", client=1), batches, gates))


def test_no_example_gives_zeros():
    found = gate_fisher(gated_context("toy"), examples("toy", 6).part(0, 0), torch.ones(8))
    assert torch.equal(found, torch.zeros(8, dtype=torch.float64))


def test_what_cannot_be_measured_is_refused():
    with pytest.raises(ConfigError, match="fisher_samples must be at least 1, got 0"):
        gate_fisher(gated_context("toy"), examples("toy", 6), torch.ones(8), samples=0)
    with seeded("plain"):
        plain = context(lambda: nn.Linear(2, 6))
    with pytest.raises(ConfigError, match="Linear has no channel gates; build it with `prunable`"):
        gate_fisher(plain, data(), torch.ones(8))


def test_scores_are_those_of_single_precision_networks_too_also_under_autocast_and_checkpointing():
    batches, gates = examples("resnet8", 8, dtype=torch.float32), None
    found = {}
    for key, forward in {
        "fp32": Forward(),
        "checkpointing": Forward(grad_checkpointing=True),
        "bf16": Forward(precision="bf16"),
    }.items():
        ctx = gated_context("resnet8", torch.float32, forward=forward)
        gates = masked(ctx)
        found[key] = gate_fisher(ctx, batches, gates)
    exact = gate_fisher(gated_context("resnet8"), examples("resnet8", 8), gates)
    torch.testing.assert_close(found["fp32"], exact, rtol=1e-3, atol=1e-7)
    torch.testing.assert_close(found["checkpointing"], found["fp32"])
    assert F.cosine_similarity(found["bf16"], exact, dim=0) > 0.99
