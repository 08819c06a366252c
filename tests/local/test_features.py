"""The pass that reads features, and their sums per class."""

import pytest
import torch
from torch import nn

from fedloom.core import ConfigError, Net
from fedloom.local import SGD, LocalSGD
from fedloom.local.features import class_sums, feats_needed, features, head_width
from local.blobs import context, data
from toys.federation import BlobSpec


class Plain(nn.Module):
    """Logits alone."""

    class_rows = {"head.weight": 0}

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(2, 6)

    def forward(self, x):
        return self.head(x)


def bound(factory=None):
    ctx = context(factory)
    state = ctx.init_state()
    ctx.bind(state["params"], state["buffers"])
    return ctx


def test_gives_the_features_of_every_example_in_stored_order_and_evaluation_mode():
    ctx, examples = bound(), data(20)
    ctx.net.train(True)
    before = {name: tensor.clone() for name, tensor in ctx.net.module.state_dict().items()}
    found, labels = features(ctx, examples, batch_size=7)
    x, y = examples.stored(torch.arange(20))
    module = BlobSpec().classifier().eval()
    torch.testing.assert_close(found, module.body(x).detach())
    assert torch.equal(labels, y) and not found.requires_grad
    assert ctx.net.module.training, "the mode is as it was"
    assert all(torch.equal(tensor, before[name]) for name, tensor in ctx.net.module.state_dict().items())


def test_the_pass_does_not_change_what_training_sees():
    loop, ctx = LocalSGD(SGD(lr=0.1), epochs=2, batch_size=8), context()
    down, plain, read = ctx.init_state(), data(20), data(20)
    without = loop(down, plain, ctx)
    ctx.bind(down["params"], down["buffers"])
    features(ctx, read)
    after = loop(down, read, ctx)
    assert all(torch.equal(after.params[name], tensor) for name, tensor in without.params.items())
    assert all(torch.equal(after.buffers[name], tensor) for name, tensor in without.buffers.items())


def test_without_examples_there_are_no_features():
    found, labels = features(bound(), data(0))
    assert found.shape == (0, 0) and labels.shape == (0,)


def test_class_sums_in_numbers():
    rows = torch.tensor([[1.0, 2.0], [3.0, 4.0], [-1.0, 0.5]])
    sums, counts = class_sums(rows, torch.tensor([2, 0, 2]), 4)
    assert sums.tolist() == [[3.0, 4.0], [0.0, 0.0], [0.0, 2.5], [0.0, 0.0]]
    assert counts.tolist() == [1, 0, 2, 0] and counts.dtype == torch.int64


def test_a_network_without_features_is_refused_in_words():
    with pytest.raises(ConfigError, match="the network gives only logits; let it return a mapping"):
        features(bound(Plain), data())
    loop, ctx = LocalSGD(decisions=(feats_needed,)), context(Plain)
    with pytest.raises(ConfigError, match="needs features"):
        loop(ctx.init_state(), data(), ctx)


def test_the_check_adds_nothing_to_training():
    ctx = context()
    plain, checked = (LocalSGD(decisions=d)(ctx.init_state(), data(), ctx) for d in ((), (feats_needed,)))
    assert all(torch.equal(plain.params[name], tensor) for name, tensor in checked.params.items())


def test_the_width_is_that_of_the_linear_head():
    ctx = context()
    assert head_width(ctx) == 8
    with pytest.raises(ConfigError, match="0 matrices of this one have a row per class"):
        head_width(context(lambda: nn.Linear(2, 6)))


def test_a_transposed_head_has_its_width_in_front():
    class Transposed(nn.Module):
        class_rows = {"head": 1}

        def __init__(self):
            super().__init__()
            self.head = nn.Parameter(torch.zeros(5, 6))

    ctx = context(Transposed)
    assert isinstance(ctx.net, Net) and head_width(ctx) == 5
