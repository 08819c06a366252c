from __future__ import annotations

import pytest
import torch
from torch import nn

from fedloom.core import ConfigError
from fedloom.core.moe import MoELayer, Slice, expert_parts, inputs_recorded, moe_layers, need_moe_layers
from toys.federation import expert_spec


def layer(experts: int = 2, hidden: int = 3) -> MoELayer:
    parts = tuple((Slice("up", (slice(e, e + 1),)), Slice("bias", (slice(e, e + 1),))) for e in range(experts))
    return MoELayer("block", parts, ("gate.weight",), 1, hidden)


def test_a_slice_is_a_view_of_its_tensor():
    tree = {"up": torch.arange(6.0).view(2, 3), "whole": torch.ones(2)}
    part = Slice("up", (slice(1, 2),)).of(tree)
    part.zero_()
    assert tree["up"].tolist() == [[0, 1, 2], [0, 0, 0]]
    assert Slice("whole").of(tree) is tree["whole"]


def test_a_larger_network_names_the_layer_with_a_prefix():
    found = layer().prefixed("backbone.")
    assert found.name == "backbone.block" and found.gate == ("backbone.gate.weight",)
    assert found.expert_names == ("backbone.up", "backbone.bias") and found.num_experts == 2
    assert found.experts[1][0].index == (slice(1, 2),)


def test_parts_of_experts_are_those_of_its_layers_and_those_that_modules_inside_name():
    module = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    assert expert_parts(module) == ()
    module.moe_layers = (layer(),)
    module[1][0].expert_parts = tuple((Slice("weight", (slice(e, e + 1),)), Slice("bias")) for e in range(2))
    found = expert_parts(module)
    assert found[:2] == layer().experts
    assert found[3] == (Slice("1.0.weight", (slice(1, 2),)), Slice("1.0.bias"))
    assert torch.equal(found[3][0].of(dict(module.named_parameters())), module[1][0].weight[1:])


def test_networks_without_experts_are_refused_in_words():
    with pytest.raises(ConfigError, match="method 'fedmoe' needs a network with mixture-of-experts layers, and Linear"):
        need_moe_layers(nn.Linear(2, 2), "fedmoe")


def test_layers_of_several_shapes_are_refused_in_words():
    module = nn.Linear(2, 2)
    module.moe_layers = (layer(2), layer(3))
    with pytest.raises(ConfigError, match=r"\(2, 3\), \(3, 3\)"):
        need_moe_layers(module, "fedmoe")


def test_inputs_are_recorded_inside_the_block_alone():
    network = expert_spec().classifier()
    x = torch.randn(5, 2)
    assert "expert_inputs" not in network(x)
    with inputs_recorded(network):
        assert network(x)["expert_inputs"].shape == (2, 5, 8)
    assert "expert_inputs" not in network(x)
    assert len(moe_layers(network)) == 2
