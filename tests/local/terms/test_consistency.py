from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fedloom.core import ConfigError
from fedloom.local.terms.consistency import StatisticsConsistency, statistics_gap

ZERO = torch.tensor([[0.0, 0.0], [1.0, 1.0]])


def value(term: StatisticsConsistency, found: dict[str, Tensor], wanted: dict[str, Tensor]) -> Tensor:
    out = {"logits": torch.zeros(1, 1), **{f"moments/{name}": tensor for name, tensor in found.items()}}
    return term({}, out, None, {"statistics": wanted}, {})


def test_the_gap_in_numbers():
    """|(3, 4)|^2 / 2 + ((5 + 1 - 2) / 2)^2 = 12.5 + 4."""
    assert statistics_gap(torch.tensor([[3.0, 4.0], [5.0, 1.0]]), ZERO).item() == 16.5


def test_variances_count_by_their_sum_alone():
    assert statistics_gap(torch.tensor([[0.0, 0.0], [0.25, 1.75]]), ZERO).item() == 0.0


def test_layers_are_weighed_by_the_softmax_of_their_depth_in_the_order_of_the_outputs():
    far = torch.tensor([[2.0, 0.0], [1.0, 1.0]])  # gap 2
    found, wanted = {"b": far, "a": ZERO}, {"a": ZERO, "b": ZERO}
    for beta in (0.0, 0.1, 1.0):
        first = 1 / (1 + math.exp(beta))
        assert value(StatisticsConsistency(3.0, beta), found, wanted).item() == pytest.approx(3.0 * first * 2.0)
    swapped = {"a": ZERO, "b": far}
    last = math.e / (1 + math.e)
    assert value(StatisticsConsistency(1.0, 1.0), swapped, wanted).item() == pytest.approx(2.0 * last)


def test_its_gradient_is_the_formulas():
    x = torch.randn(6, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    wanted = ZERO.double() + 0.5
    found = torch.stack([x.mean(0), x.var(0)])
    (grad,) = torch.autograd.grad(value(StatisticsConsistency(0.7, 0.1), {"a": found}, {"a": wanted}), x)
    centred, excess = x.detach() - x.detach().mean(0), (x.detach().var(0) - wanted[1]).sum()
    by_hand = 2 * (x.detach().mean(0) - wanted[0]) / 6 / 2 + 2 * excess / 4 * 2 * centred / 5
    torch.testing.assert_close(grad, 0.7 * by_hand)


def test_bad_weights_are_refused_by_name():
    with pytest.raises(ConfigError, match=r"lam must be a finite number of at least 0, got -0\.1"):
        StatisticsConsistency(-0.1, 0.1)
    with pytest.raises(ConfigError, match="beta must be a finite number of at least 0, got nan"):
        StatisticsConsistency(0.1, math.nan)
