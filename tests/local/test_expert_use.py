"""The importance of experts against sums over single tokens, and what single experts make of their inputs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedloom.core import Batches, Context, Stage
from fedloom.core.context import Net
from fedloom.core.moe import MoELayer, inputs_recorded, moe_layers
from fedloom.core.seeds import generator
from fedloom.local.expert_use import expert_importance, expert_outputs
from fedloom.models.moe_lm.block import MoEBlock
from fedloom.models.moe_lm.layers import find_layers
from toys.federation import expert_spec


def context(**options: int) -> Context:
    net = Net(expert_spec(**options).classifier)
    ctx = Context(net=net, stage=Stage(0, 1, 1, tuple(range(6)), tuple(range(6))), num_classes=6)
    ctx.bind(*ctx.init_state().values())
    return ctx


def data(count: int = 21) -> Batches:
    x, y = 3 * torch.randn(count, 2, generator=generator("use")), torch.arange(count) % 6
    return Batches(x, y, torch.arange(count), key=("use",), prepare=lambda x, rng: x)


@torch.no_grad()
def by_hand(ctx: Context, x: torch.Tensor) -> torch.Tensor:
    """Token by token, from the tensors of the experts."""
    layers, params = moe_layers(ctx.net.module), dict(ctx.net.module.named_parameters())
    total = torch.zeros(len(layers), layers[0].num_experts, dtype=torch.float64)
    with ctx.evaluating(), inputs_recorded(ctx.net.module):
        out = ctx.apply(x)
    for at, layer in enumerate(layers):
        for t, hidden in enumerate(out["expert_inputs"][at]):
            shares = (params[layer.gate[0]] @ hidden).softmax(0)
            for e in shares.topk(layer.top_k).indices.tolist():
                up, up_bias, down, down_bias = (part.of(params)[0] for part in layer.experts[e])
                made = down @ (up @ hidden + up_bias).relu() + down_bias
                total[at, e] += float(shares[e] * made.norm())
                assert out["dispatched"][at, t, e]
    return total


@pytest.mark.parametrize("top_k", [1, 2])
def test_importance_is_the_sum_over_tokens_of_gate_times_norm_divided_by_that_of_the_layer(top_k):
    ctx, client = context(top_k=top_k), data()
    found = expert_importance(ctx, client, batch_size=8)
    total = by_hand(ctx, client.stored(torch.arange(len(client)))[0])
    torch.testing.assert_close(found.double(), total / total.sum(1, keepdim=True), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.sum(1), torch.ones(2))


def test_the_scale_of_a_clients_outputs_does_not_matter():
    ctx, client = context(layers=1), data()
    before = expert_importance(ctx, client)
    state = ctx.init_state()
    scaled = {n: 7 * t if ".experts.down" in n else t for n, t in state["params"].items()}
    ctx.bind(scaled, state["buffers"])
    torch.testing.assert_close(expert_importance(ctx, client), before)
    assert int((before > 0).sum()) > 1


def test_batches_and_the_networks_mode_do_not_matter_and_nothing_is_trained():
    ctx, client = context(), data()
    ctx.net.train(True)
    torch.testing.assert_close(expert_importance(ctx, client, 4), expert_importance(ctx, client, 21))
    assert ctx.net.module.training and client.visits.count == 0


def test_experts_that_are_not_allowed_have_no_importance():
    ctx = context()
    allowed = torch.tensor([[True, False, True, False], [False, True, True, False]])
    with ctx.net.module.restricted(allowed):
        found = expert_importance(ctx, data())
    assert not found[~allowed].any()
    torch.testing.assert_close(found.sum(1), torch.ones(2))


def test_a_client_without_tokens_has_zeros():
    assert not expert_importance(context(), data(0)).any()


class Holder(nn.Module):
    """A network that is one block."""

    def __init__(self, block: nn.Module):
        super().__init__()
        self.block = block

    @property
    def layer(self) -> MoELayer:
        return find_layers(self)[0]


@torch.no_grad()
def test_gates_times_what_single_experts_make_is_what_the_block_makes():
    torch.manual_seed(0)
    net, hidden = Holder(MoEBlock(8, 8, 4, top_k=2, combine="probability")), torch.randn(9, 8)
    _, weights, chosen = net.block.router(hidden)
    made = torch.stack([expert_outputs(net, net.layer, e, hidden) for e in range(4)])
    mixed = sum(weights[:, j, None] * made[chosen[:, j], torch.arange(9)] for j in range(2))
    torch.testing.assert_close(mixed, net.block(hidden))


@torch.no_grad()
def test_experts_that_are_modules_are_called_one_by_one():
    torch.manual_seed(0)
    block = nn.Module()
    block.router, block.experts = (
        nn.Linear(8, 3, bias=False),
        nn.ModuleDict({f"e{k}": nn.Linear(8, 8) for k in range(3)}),
    )
    net, hidden = Holder(block), torch.randn(5, 8)
    for k in range(3):
        assert torch.equal(expert_outputs(net, net.layer, k, hidden), block.experts[f"e{k}"](hidden))
