from __future__ import annotations

from fedloom.models.moe_lm.layers import active_parameters
from toys.federation import expert_spec


def test_one_token_uses_the_top_k_of_the_experts():
    for options in ({}, {"top_k": 2}, {"experts": 6, "layers": 1}):
        network = expert_spec(**options).classifier()
        layers = network.moe_layers
        own = sum(part.of(dict(network.named_parameters())).numel() for layer in layers for part in layer.experts[0])
        every = sum(parameter.numel() for parameter in network.parameters())
        unused = layers[0].num_experts - layers[0].top_k
        assert active_parameters(network) == network.active_parameters() == every - unused * own
