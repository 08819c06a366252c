"""Statistics measured anew: those of a hand count, with nothing else touched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedloom.core import Batches, Context
from fedloom.core.seeds import generator, seeded
from fedloom.local.statistics import measured_statistics
from local.blobs import context, data

NORM = "body.layers.1"


class Dropped(nn.Module):
    """Dropout before and after a batch norm, and a batch norm that does not train."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.norm, self.after = nn.Dropout(0.5), nn.BatchNorm1d(2, momentum=0.3), nn.Dropout(0.5)
        with seeded("dropped"):
            self.frozen, self.head = nn.BatchNorm1d(2), nn.Linear(2, 6)
        self.frozen.running_mean.fill_(3.0)
        for param in self.frozen.parameters():
            param.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.after(self.frozen(self.norm(self.before(x)))))


def bound(factory: Any = None) -> Context:
    ctx = context(factory)
    with seeded("statistics"):
        state = {
            f: {n: t + torch.rand(t.shape).to(t.dtype) for n, t in tree.items()} for f, tree in ctx.init_state().items()
        }
    ctx.bind(state["params"], state["buffers"])
    return ctx


def rows(batches: Batches) -> Tensor:
    return torch.cat([batch.x for batch in batches.epoch(batch_size=64, purpose="look", shuffle=False)])


def test_they_are_means_over_batches_by_their_examples_of_the_batches_own_moments() -> None:
    ctx, examples = bound(), data(22)
    linear = ctx.net.module.body.layers[0]
    order = torch.randperm(22, generator=generator(ctx.seed_for("statistics")))
    inside = [linear(part).detach() for part in rows(examples)[order].split(8)]
    found = measured_statistics(ctx, examples, batch_size=8)
    assert [len(part) for part in inside] == [8, 8, 6]
    torch.testing.assert_close(found[f"{NORM}.running_mean"], torch.cat(inside).mean(0))
    torch.testing.assert_close(found[f"{NORM}.running_var"], sum(len(h) * h.var(0) for h in inside) / 22)
    assert found[f"{NORM}.num_batches_tracked"] == 3


def test_data_that_are_stored_class_by_class_have_the_variance_of_all() -> None:
    ctx = bound()
    x = torch.cat([torch.randn(64, 2, generator=generator("class", k)) + 20 * k for k in range(4)])
    sorted_ = Batches(x, torch.arange(4).repeat_interleave(64), torch.arange(256), key=(0,), prepare=lambda x, rng: x)
    whole = ctx.net.module.body.layers[0](x).detach().var(0)
    found = measured_statistics(ctx, sorted_, batch_size=64)[f"{NORM}.running_var"]
    assert bool(((found / whole - 1).abs() < 0.15).all())


def test_only_the_norms_that_are_asked_for_are_measured() -> None:
    ctx = bound()
    before = {name: tensor.clone() for name, tensor in ctx.net.take()[1].items()}
    found = measured_statistics(ctx, data(22), only=[])
    assert all(torch.equal(found[name], before[name]) for name in before)


def test_of_one_batch_they_are_the_moments_of_all_examples() -> None:
    ctx, examples = bound(), data(22)
    inside = ctx.net.module.body.layers[0](rows(examples)).detach()
    found = measured_statistics(ctx, examples)
    torch.testing.assert_close(found[f"{NORM}.running_mean"], inside.mean(0))
    torch.testing.assert_close(found[f"{NORM}.running_var"], inside.var(0))


def test_nothing_is_dropped_out_or_drawn_and_frozen_norms_keep_theirs(no_global_draws: None) -> None:
    ctx, examples = bound(Dropped), data(20)
    found = measured_statistics(ctx, examples)
    torch.testing.assert_close(found["norm.running_mean"], rows(examples).mean(0))
    torch.testing.assert_close(found["norm.running_var"], rows(examples).var(0))
    assert set(found) == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    frozen = ctx.net.module.frozen
    assert frozen.running_mean.tolist() == [3.0, 3.0] and frozen.num_batches_tracked == 0


@pytest.mark.parametrize("training", [False, True])
def test_weights_mode_momentum_and_the_training_stream_stay_as_they_were(training: bool) -> None:
    ctx, seen = bound(Dropped), []
    examples = Batches(
        *(data(20)._x, data(20)._y, torch.arange(20)),
        key=("local",),
        prepare=lambda x, rng: seen.append(rng) or x,
    )
    params = {n: p.detach().clone() for n, p in ctx.net.module.named_parameters()}
    ctx.net.train(training)
    measured_statistics(ctx, examples)
    module = ctx.net.module
    assert all(torch.equal(p, params[n]) for n, p in module.named_parameters())
    assert module.norm.training is module.after.training is training and not module.frozen.training
    assert module.norm.momentum == 0.3
    assert seen == [None] and (examples.visits.count, examples.visits.passes) == (0, 20)


def test_without_examples_they_are_those_that_were_bound() -> None:
    ctx = bound()
    before = {n: b.clone() for n, b in ctx.net.module.named_buffers()}
    found = measured_statistics(ctx, data(0))
    assert found.keys() == before.keys() and all(torch.equal(found[n], before[n]) for n in found)
