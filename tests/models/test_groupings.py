"""Readings of "channel": which groups they decide on, what switches one off, and what a channel costs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fedloom.core import ConfigError
from fedloom.models import NetworkSpec
from fedloom.models.channels import Axis, Channels, Group
from fedloom.models.compact import prunable
from fedloom.models.groupings import GROUPINGS, by_layer, channel_macs, coupled, internal, switched_off
from toys.pruned import SHAPES, SMALL, compact, inputs, network, some


def bind(module: Any, params: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, param in module.named_parameters():
            param.copy_(params[name])


def test_coupled_takes_the_table_as_it_is() -> None:
    module = network("resnet8")
    table = module.channels
    assert coupled(module) is module and module.channels is table
    assert list(GROUPINGS.values()) == [coupled, internal, by_layer]


def test_resnet18_has_1920_channels_inside_blocks_and_4800_outputs_of_layers() -> None:
    with torch.device("meta"):
        spec = NetworkSpec("resnet18", 10, (3, 32, 32))
        inner = internal(prunable(spec.classifier())).channels
        outputs = by_layer(prunable(spec.classifier())).channels
    assert inner.total == 1920 and len(inner.groups) == 8
    assert all(name.endswith("conv1") for name in inner.names)
    assert outputs.total == 4800 and len(outputs.groups) == 20  # a batch norm of each: 9600 weights and biases
    assert set(outputs.axes.values()) == {(Axis(name),) for name in outputs.names}


def test_inside_blocks_the_residual_streams_stay_whole_and_the_compact_network_agrees() -> None:
    module = internal(network("resnet8")).eval()
    table, x = module.channels, inputs("resnet8")[0]
    assert table.axes["backbone.blocks.1.conv1.weight"][:2] == (Axis("backbone.blocks.1.conv1"), None)
    assert table.axes["backbone.blocks.1.conv2.weight"][:2] == (None, Axis("backbone.blocks.1.conv1"))
    mask = some(table)
    small = compact(module, mask)
    assert small.backbone.stem.out_channels == 16 and small.num_features == 64
    with module.gated(mask.double()):
        torch.testing.assert_close(small(x)["logits"], module(x)["logits"], rtol=0, atol=1e-12)


def test_a_network_whose_layers_all_share_their_outputs_has_no_inner_channel() -> None:
    group = Group("stream", 2, (), (), ("a.weight", "b.weight"))
    with pytest.raises(ConfigError, match=r"has no group that one layer writes; take method\.groups coupled"):
        internal(SimpleNamespace(channels=Channels((group,), {})))


@pytest.mark.parametrize("grouping", [coupled, by_layer])
@pytest.mark.parametrize("name", SMALL)
def test_what_is_switched_off_puts_out_what_gates_of_zero_do(name: str, grouping: Any) -> None:
    module = grouping(network(name))
    mask, (x, _) = some(module.channels), inputs(name)
    params = {n: p.detach().clone() for n, p in module.named_parameters()}
    for training in (False, True):
        module.train(training)
        bind(module, params)
        with module.gated(mask.double()):
            gated = module(x)["logits"]
        bind(module, switched_off(params, module.channels, mask))
        torch.testing.assert_close(module(x)["logits"], gated, rtol=0, atol=1e-12)
    assert not torch.equal(gated, torch.zeros_like(gated))


def test_switching_off_changes_norms_alone_and_not_what_it_is_given() -> None:
    module = network("resnet8")
    params = {n: p.detach().clone() for n, p in module.named_parameters()}
    before = {n: t.clone() for n, t in params.items()}
    mask = some(module.channels)
    found = switched_off(params, module.channels, mask)
    assert all(torch.equal(params[n], before[n]) for n in params)
    changed = {n for n in params if found[n] is not params[n]}
    assert changed == {
        f"{norm}.{leaf}" for g in module.channels.groups for norm in g.norms for leaf in ("weight", "bias")
    }
    (stem, *_), (kept, *_) = module.channels.groups, module.channels.split(mask)
    for norm in stem.norms:
        assert torch.equal(found[f"{norm}.weight"] != 0, kept)


def macs(module: Any, shape: tuple[int, ...]) -> float:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module.eval()(torch.zeros(1, *shape))
    return counter.get_total_flops() / 2


@pytest.mark.parametrize("name", SMALL)
def test_a_channel_costs_what_the_network_without_it_saves(name: str) -> None:
    module = network(name, torch.float32).train()
    table, shape = module.channels, SHAPES[name]
    costs = channel_macs(module, table, shape)
    assert costs.dtype == torch.float64 and costs.shape == (table.total,) and module.training
    assert all(not part._forward_hooks for part in module.modules())
    whole = macs(module, shape)
    for k, found in enumerate(table.split(costs)):
        one_less = tuple(size - (i == k) for i, size in enumerate(table.sizes))
        assert set(found.tolist()) == {whole - macs(module.rebuild(one_less), shape)}


def test_an_output_costs_the_operations_of_its_own_layer() -> None:
    module = by_layer(network("resnet8", torch.float32))
    costs = dict(
        zip(module.channels.names, module.channels.split(channel_macs(module, module.channels, (3, 8, 8))), strict=True)
    )
    assert set(costs["backbone.stem"].tolist()) == {27.0 * 64}
    assert set(costs["backbone.blocks.1.shortcut.0"].tolist()) == {16.0 * 16}
