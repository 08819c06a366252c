"""Shapley values against enumeration, and the adaptive choice against a scalar loop."""

import math
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.core import ConfigError
from fedloom.select.shapley import mean_game_slope, select_experts, shapley_values

GAIN = torch.tensor([[-0.5, -1.0, -2.0, -4.0]], dtype=torch.float64)
COST = 0.6 * torch.tensor([[0.4, 0.1, 0.2, 0.05]], dtype=torch.float64)


def value(subset, gain, cost, empty):
    if not subset:
        return empty
    return sum(gain[k] for k in subset) / len(subset) - sum(cost[k] for k in subset)


def enumerated(gain, cost, empty):
    """Definition: weighted marginal values over all coalitions of the others."""
    players = range(len(gain))
    phi = []
    for k in players:
        others = [j for j in players if j != k]
        total = 0.0
        for size in range(len(gain)):
            weight = math.factorial(size) * math.factorial(len(gain) - size - 1) / math.factorial(len(gain))
            for subset in combinations(others, size):
                total += weight * (value((*subset, k), gain, cost, empty) - value(subset, gain, cost, empty))
        phi.append(total)
    return phi


def chosen(phi, gain, cost, mu, empty):
    """The literal stop rule for one sample, with v evaluated by definition."""
    order = sorted(range(len(phi)), key=lambda k: (-phi[k], k))
    values = [empty] + [value(order[:j], gain, cost, empty) for j in range(1, len(order) + 1)]
    dv = [b - a for a, b in pairwise(values)]
    for j in range(2, len(order) + 1):
        if dv[j - 1] <= mu * sum(dv[: j - 1]) / (j - 1):
            return set(order[:j])
    return set(order)


def draw(batch, experts, seed=0):
    rng = torch.Generator().manual_seed(seed)
    gain = torch.randn(batch, experts, generator=rng, dtype=torch.float64)
    return gain, torch.rand(batch, experts, generator=rng, dtype=torch.float64)


@pytest.mark.parametrize("experts", range(1, 11))
@pytest.mark.parametrize("empty", [0.0, -2.3, 1.5])
def test_equals_enumeration(experts, empty):
    gain, cost = draw(3, experts, experts)
    phi = shapley_values(gain, cost, empty)
    for b in range(1 if experts > 8 else 3):
        want = torch.tensor(enumerated(gain[b].tolist(), cost[b].tolist(), empty), dtype=torch.float64)
        assert (phi[b] - want).abs().max() < 1e-12


@settings(max_examples=50, deadline=None)
@given(experts=st.integers(1, 64), empty=st.floats(-10, 10), seed=st.integers(0, 1000))
def test_values_sum_to_the_worth_of_all_experts(experts, empty, seed):
    gain, cost = draw(4, experts, seed)
    total = gain.mean(1) - cost.sum(1) - empty
    assert torch.allclose(shapley_values(gain, cost, empty).sum(1), total, atol=1e-9)


@pytest.mark.parametrize(("experts", "slope"), [(1, 1), (2, 1), (3, 0.75), (4, 0.611111), (6, 0.456667), (8, 0.370408)])
def test_slope(experts, slope):
    assert mean_game_slope(experts) == pytest.approx(slope, abs=1e-6)


@pytest.mark.parametrize(
    ("empty", "want"),
    [
        (0.0, [0.131528, 0.005972, -0.665139, -1.797361]),
        (-math.log(10), [0.707174, 0.581618, -0.089493, -1.221715]),
    ],
)
def test_worked_example(empty, want):
    phi = shapley_values(GAIN, COST, empty)
    assert phi[0].tolist() == pytest.approx(want, abs=1e-6)


@pytest.mark.parametrize(
    ("empty", "mu", "experts"),
    [
        (0.0, 0.0, 2),
        (0.0, 0.5, 3),
        (0.0, 1.0, 3),
        (-math.log(10), 0.0, 2),
        (-math.log(10), 0.5, 2),
        (-math.log(10), 1.0, 2),
    ],
)
def test_worked_stops(empty, mu, experts):
    active = select_experts(shapley_values(GAIN, COST, empty), GAIN, COST, mu, empty)
    assert active[0].tolist() == [k < experts for k in range(4)]


@pytest.mark.parametrize("experts", [2, 3, 4, 7])
@pytest.mark.parametrize("mu", [0.0, 0.5, 1.0])
def test_selection_equals_scalar_loop(experts, mu):
    gain, cost = draw(840, experts, experts)  # 12 cases: 10,080 samples
    empty = -0.7 if mu else 0.0
    phi = shapley_values(gain, cost, empty)
    active = select_experts(phi, gain, cost, mu, empty)
    rows = zip(phi.tolist(), gain.tolist(), cost.tolist(), active.tolist(), strict=True)
    for p, a, c, mask in rows:
        assert {k for k, on in enumerate(mask) if on} == chosen(p, a, c, mu, empty)
    assert active.sum(1).min() >= 2 and active.sum(1).max() <= experts


def test_empty_value_leaves_order_and_softmax_alone():
    gain, cost = draw(100, 5)
    a, b = shapley_values(gain, cost), shapley_values(gain, cost, -2.3)
    assert torch.equal(a.argsort(1), b.argsort(1))
    assert torch.allclose(a.softmax(1), b.softmax(1), atol=1e-12)
    assert torch.allclose(b - a, torch.full_like(a, 2.3 / 5))


def test_without_cost_it_is_the_mean_game():
    gain, cost = draw(20, 4)
    assert torch.equal(shapley_values(gain, 0 * cost), shapley_values(gain, torch.zeros_like(cost)))
    assert torch.allclose(shapley_values(gain, cost), shapley_values(gain, 0 * cost) - cost)


@pytest.mark.parametrize("empty", [0.0, -1.0])
def test_one_expert(empty):
    gain, cost = draw(6, 1)
    phi = shapley_values(gain, cost, empty)
    assert torch.allclose(phi, gain - cost - empty)
    assert select_experts(phi, gain, cost, 0.5, empty).all()


def test_ties_go_to_the_lowest_index():
    gain, cost = torch.zeros(1, 4), torch.full((1, 4), 0.1)
    active = select_experts(shapley_values(gain, cost), gain, cost, 0.0)
    assert active.tolist() == [[True, True, False, False]]


def test_huge_and_equal_values_give_no_nan():
    gain = torch.tensor([[-1e30, -1e30], [0.0, 0.0], [-1e-30, 1e-30]])
    phi = shapley_values(gain, torch.zeros_like(gain))
    assert phi.isfinite().all()
    assert (select_experts(phi, gain, torch.zeros_like(gain), 0.5).sum(1) == 2).all()


def test_empty_batch():
    gain = torch.zeros(0, 4)
    assert select_experts(shapley_values(gain, gain), gain, gain, 0.5).shape == (0, 4)


@pytest.mark.parametrize("cost", [torch.zeros(2, 3), torch.zeros(4)])
def test_shapes_that_differ_are_named(cost):
    with pytest.raises(ConfigError, match=r"gain and cost must both be \[batch, experts\]"):
        shapley_values(torch.zeros(2, 4), cost)


@pytest.mark.parametrize("mu", [-0.1, 1.1, float("nan")])
def test_mu_out_of_range(mu):
    with pytest.raises(ConfigError, match=r"mu must be in \[0, 1\]"):
        select_experts(GAIN, GAIN, COST, mu)
