"""Experts that are held still while their layer trains."""

import pytest
import torch
from torch import nn

from fedloom.core import ConfigError
from fedloom.local.frozen_experts import frozen_experts


class Stacked(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(3, 2, 2)), nn.Parameter(torch.ones(3))


def gradients(net):
    net.zero_grad()
    (net.weight.square().sum() + net.bias.square().sum()).backward()
    return net.weight.grad.flatten(1).abs().sum(1).tolist(), net.bias.grad.tolist()


def test_frozen_entries_get_no_gradient_inside_the_block_alone():
    net, mask = Stacked(), torch.tensor([True, False, True])
    with frozen_experts(net, {"weight": mask, "bias": mask}):
        assert gradients(net) == ([0, 8, 0], [0, 2, 0])
    assert gradients(net) == ([8, 8, 8], [2, 2, 2])


def test_an_unknown_parameter_is_refused():
    with pytest.raises(ConfigError, match="Stacked has no parameter 'weights'"):
        frozen_experts(Stacked(), {"weights": torch.zeros(3)}).__enter__()
