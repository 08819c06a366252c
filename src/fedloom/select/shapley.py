"""Exact Shapley values of the expert game and the adaptive choice of experts, for a whole batch at once.

The game of FedFMX (Yuan et al., "FedFMX", arXiv 2606.28835, eq. 5): players are the experts of one sample and
v(S) = mean of `gain` over S - sum of `cost` over S for a non-empty S, v(empty) = `empty_value`. The paper asks
for an average over coalitions; the mean game has a closed form, so it costs O(experts) for any pool.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedloom.core.errors import ConfigError


def shapley_values(gain: Tensor, cost: Tensor, empty_value: float | Tensor = 0.0) -> Tensor:
    """Shapley values phi [batch, experts] of v(S) = mean(gain over S) - sum(cost over S).

    gain, cost: [batch, experts]. empty_value: v(empty); it shifts every value by -empty_value / experts.
    With K experts, abar the mean gain and H_K = 1 + 1/2 + ... + 1/K:
    phi_k = (abar - empty_value)/K + lambda_K (gain_k - abar) - cost_k, lambda_K = 1/K + (H_K - 1)/(K - 1),
    lambda_1 = 1. Raises `ConfigError` when the shapes differ.
    """
    _check(gain, cost)
    experts = gain.shape[1]
    mean = gain.mean(1, keepdim=True)
    return (mean - empty_value) / experts + mean_game_slope(experts) * (gain - mean) - cost


def mean_game_slope(experts: int) -> float:
    """lambda_K: how much of an expert's gain above the pool's mean its Shapley value keeps (1 at K = 1 and 2)."""
    if experts == 1:
        return 1.0
    harmonic = sum(1 / j for j in range(1, experts + 1))
    return 1 / experts + (harmonic - 1) / (experts - 1)


class Marginals(NamedTuple):
    """Marginal values along the order of falling phi; column j is the coalition of the first j + 1 experts.

    order: expert index per place, ties by lowest index. dv: v(S_j) - v(S_{j-1}). before: mean of dv over the
    earlier places (0 at the first place, where it is not defined).
    """

    order: Tensor
    dv: Tensor
    before: Tensor


def marginals(phi: Tensor, gain: Tensor, cost: Tensor, empty_value: float | Tensor = 0.0) -> Marginals:
    """Sort by phi and compute every marginal value with cumulative sums; all [batch, experts].

    dv_1 = gain_1 - cost_1 - empty_value; dv_j = (gain_j - mean of the gains before it)/j - cost_j.
    """
    _check(gain, cost)
    order = phi.sort(dim=1, descending=True, stable=True).indices
    gain, cost = gain.gather(1, order), cost.gather(1, order)
    place = torch.arange(1, gain.shape[1] + 1, device=gain.device, dtype=gain.dtype)
    earlier = (place - 1).clamp(min=1)
    dv = (gain - (gain.cumsum(1) - gain) / earlier) / place - cost
    dv[:, 0] -= empty_value
    return Marginals(order, dv, (dv.cumsum(1) - dv) / earlier)


def keep_until(trigger: Tensor, order: Tensor, *, keep_trigger: bool = True) -> Tensor:
    """Keep the places up to the first trigger of each row, as a mask over experts [batch, experts].

    trigger: bool per place; the first place never counts. keep_trigger: whether the triggering expert stays.
    """
    stopped = trigger.long()
    stopped[:, 0] = 0
    passed = stopped.cumsum(1)
    kept = (passed - stopped if keep_trigger else passed) == 0
    return torch.zeros_like(kept).scatter_(1, order, kept)


def select_experts(phi: Tensor, gain: Tensor, cost: Tensor, mu: float, empty_value: float | Tensor = 0.0) -> Tensor:
    """Adaptive expert set, the literal stop rule: a bool mask [batch, experts].

    Experts join by falling phi; the smallest j >= 2 with dv_j <= mu * mean(dv_1 .. dv_{j-1}) stops the row and
    the triggering expert is kept, so two experts or more are active (one where there is only one). Never
    triggered keeps all. phi, gain, cost: [batch, experts]; mu in [0, 1].
    """
    check_mu(mu)
    order, dv, before = marginals(phi, gain, cost, empty_value)
    return keep_until(dv <= mu * before, order)


def check_mu(mu: float) -> None:
    """Raise `ConfigError` unless mu is in [0, 1]."""
    if not 0 <= mu <= 1:
        raise ConfigError(f"mu must be in [0, 1], got {mu}")


def _check(gain: Tensor, cost: Tensor) -> None:
    if gain.dim() != 2 or gain.shape != cost.shape or gain.shape[1] < 1:
        raise ConfigError(
            f"gain and cost must both be [batch, experts], got {tuple(gain.shape)} and {tuple(cost.shape)}"
        )
