"""Which single weights a sparse network keeps: adaptive pruning by gain in loss per time.

Source: Jiang et al., "Model Pruning Enables Efficient Federated Learning on Edge Devices" (PruneFL; TNNLS 2022, arXiv
1909.12326), algorithm 1: of the masks that keep what must stay, the one with the largest Gamma = (sum g_j^2) /
(c + sum t_j) over the kept weights j is found greedily. Trees here are name -> tensor of a layer's weights; masks are
bool, true where a weight is kept. Everything is deterministic: among equals the lowest index comes first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from fedloom.core.errors import ConfigError
from fedloom.core.tree import Tensors


def greedy(gains: Tensor, times: Tensor, stay: Tensor, fixed: float, most: int) -> Tensor:
    """bool [n]: the weights that are kept: those that stay, and the candidates that join them.

    gains: g_j^2 [n], not negative. times: t_j [n], above 0. stay: bool [n]. fixed: c. In falling order of g^2 / t, the
    other weights join while their own ratio is above that of all who are in, Gamma; they join up to `most` weights in
    all. No gain in no time counts as Gamma = 0.
    """
    gains, times = gains.double(), times.double()
    gain, time = float(gains.where(stay, 0).sum()), fixed + float(times.where(stay, 0).sum())
    ratios, start = gains / times, gain / time if time else 0.0
    may = ((ratios > start) & ~stay).nonzero().flatten()  # Gamma only rises: nobody below its start ever joins
    order = may[ratios[may].sort(descending=True, stable=True).indices]
    after = (gain + gains[order].cumsum(0)) / (time + times[order].cumsum(0))
    gamma = torch.cat([gains.new_full((1,), start), after])[: len(order)]
    count = int((ratios[order] > gamma).cumprod(0).sum())
    kept = stay.clone()
    kept[order[: max(0, min(count, most - int(stay.sum())))]] = True
    return kept


@dataclass(frozen=True)
class Reconfiguration:
    """How masks are made and changed.

    share: in [0, 1], of a layer's active weights the smallest that must prove themselves again at age 0; it halves
    every `half_life` units of age. fixed: c, the part of the time that no weight takes, as a share of the time of all
    weights. max_density: share in (0, 1] of all weights that may be active.
    """

    share: float = 0.3
    half_life: float = 10_000.0
    fixed: float = 0.1
    max_density: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1 or not self.half_life > 0 or not self.fixed >= 0:
            raise ConfigError(
                "adaptive pruning needs adjust_share in [0, 1], half_life above 0 and fixed_time of at least 0, got "
                f"{self.share}, {self.half_life} and {self.fixed}"
            )
        if not 0 < self.max_density <= 1:
            raise ConfigError(f"max_density must be a share of the weights in (0, 1], got {self.max_density}")

    def initial(self, weights: Tensors) -> dict[str, Tensor]:
        """Masks of the floor(max_density n) largest of the n weights of every layer."""
        return {
            name: _ranked(weight.abs(), torch.ones_like(weight, dtype=torch.bool), _floor(self.max_density, weight))
            for name, weight in weights.items()
        }

    def staying(self, weights: Tensors, masks: Tensors, age: float) -> dict[str, Tensor]:
        """Masks of the active weights that stay unasked: all of a layer but the floor(share n) smallest of n."""
        share, found = self.share * 0.5 ** (age / self.half_life), {}
        for name, mask in masks.items():
            active = int(mask.sum())
            found[name] = _ranked(weights[name].abs(), mask, active - math.floor(round(share * active, 9)))
        return found

    def __call__(
        self, weights: Tensors, masks: Tensors, gains: Tensors, times: Mapping[str, float], age: float
    ) -> dict[str, Tensor]:
        """New masks. The candidates are the weights that do not stay, and every inactive one.

        weights, masks: of the layers. gains: g^2 for active and inactive weights, not negative. times: t of every
        weight of a layer, above 0. age: rounds gone by.
        At most floor(max_density n) of all n weights are active, and those that stay.
        """
        names, stay = sorted(masks), self.staying(weights, masks, age)
        flat = torch.cat([stay[name].flatten() for name in names])
        gain = torch.cat([gains[name].flatten() for name in names])
        time = torch.cat([torch.full((masks[name].numel(),), times[name], dtype=torch.float64) for name in names])
        kept = greedy(gain, time, flat, self.fixed * float(time.sum()), _floor(self.max_density, flat))
        parts = torch.split(kept, [masks[name].numel() for name in names])
        return {name: part.view(masks[name].shape) for name, part in zip(names, parts, strict=True)}


def steady(sizes: Sequence[int], change: float = 0.1, calm: int = 5) -> bool:
    """Whether a number of active weights has settled: its last `calm` changes were each less than `change` of it."""
    last = sizes[-calm - 1 :]
    return len(last) > calm and all(abs(after - before) < change * before for before, after in pairwise(last))


def _ranked(values: Tensor, among: Tensor, count: int) -> Tensor:
    """Mask of the `count` largest values where `among` is true, which they are in that many places at least."""
    flat = values.masked_fill(~among, -1.0).flatten()
    if not count:
        return torch.zeros_like(among)
    least = flat.kthvalue(len(flat) - count + 1).values  # linear in time, where a sort of a large layer takes seconds
    mask = flat > least
    mask[(flat == least).nonzero().flatten()[: count - int(mask.sum())]] = True
    return mask.view(values.shape)


def _floor(share: float, tensor: Tensor) -> int:
    # Rounded first: 0.29 * 100 is 28.999999999999996 in floating point, and that is 29.
    return math.floor(round(share * tensor.numel(), 9))
