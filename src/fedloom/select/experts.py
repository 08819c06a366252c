"""Which experts a client holds: scores of its experts -> a set per layer, and swaps that similar clients suggest.

Source: Mei et al., "FedMoE: Personalized Federated Learning via Heterogeneous Mixture of Experts" (arXiv 2408.11304),
for the idea of a search by activation and of a global recommendation; the rules are our own readings. Scores are
[L, E]: of L layers with E experts each, not negative. top_k: experts per token, for each layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.core.errors import ConfigError

Choose = Callable[[Tensor, Sequence[int]], Tensor]
TOLERANCE = 1e-9


@dataclass(frozen=True)
class Covering:
    """The smallest set per layer that covers the share `rho` of its scores, cut to a budget over all layers.

    rho: in (0, 1]. budget: largest share of all experts of the network, in (0, 1]; it is filled by descending score.
    Every layer keeps its top_k best experts, whatever the budget.
    """

    rho: float = 0.9
    budget: float = 0.5

    def __post_init__(self) -> None:
        for name, value in (("rho", self.rho), ("budget", self.budget)):
            if not 0 < value <= 1:
                raise ConfigError(f"{name} must be above 0 and at most 1, got {value}")

    def __call__(self, scores: Tensor, top_k: Sequence[int]) -> Tensor:
        """Return bool [L, E]."""
        limit = math.floor(self.budget * scores.numel() + TOLERANCE)
        return within_budget(scores, covering(scores, self.rho), limit, top_k)


def covering(scores: Tensor, rho: float) -> Tensor:
    """bool [L, E]: per layer the fewest experts whose scores sum to rho of the layer's sum; none of score 0.

    Of equal scores the lower index comes first.
    """
    ordered, order = scores.double().sort(dim=1, descending=True, stable=True)
    shares = ordered / ordered.sum(1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    before = shares.cumsum(1) - shares
    wanted = (before < rho - TOLERANCE) & (ordered > 0)
    return torch.zeros_like(wanted).scatter_(1, order, wanted)


def most_used(scores: Tensor, top_k: Sequence[int]) -> Tensor:
    """bool [L, E]: the top_k best of each layer, the lower index first among equals."""
    order = scores.sort(dim=1, descending=True, stable=True).indices
    best = torch.arange(scores.shape[1]) < torch.tensor(list(top_k))[:, None]
    return torch.zeros_like(best).scatter_(1, order, best)


def within_budget(scores: Tensor, wanted: Tensor, limit: int, top_k: Sequence[int]) -> Tensor:
    """bool [L, E]: the top_k best of each layer, and of the other wanted ones the best, `limit` experts in all."""
    floor = most_used(scores, top_k)
    others = (wanted & ~floor).flatten()
    order = scores.flatten().masked_fill(~others, -torch.inf).sort(descending=True, stable=True).indices
    room = min(max(0, limit - int(floor.sum())), int(others.sum()))
    chosen = floor.flatten()
    chosen[order[:room]] = True
    return chosen.view_as(wanted)


def recommended(use: Tensor, held: Tensor, top_k: Sequence[int]) -> tuple[Tensor, Tensor]:
    """One swap per client: the expert that clients like it use most, for the one that it uses least itself.

    use: [N, L, E], how much every client uses each expert. held: bool [N, L, E]. The similarity of two clients is the
    cosine of their flattened use. What is proposed is the expert not held with the largest mean use over the other
    clients, weighted by similarity; it replaces the client's least used expert where that one's use is lower, unless
    its layer would be left with fewer than top_k.
    Returns the new held and use: a client is taken to use what it was given as much as those like it do, so no later
    call swaps it out for something that they use less.
    """
    flat, sets = use.double().flatten(1), held.flatten(1).clone()
    units = flat / torch.linalg.vector_norm(flat, dim=1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    alike = (units @ units.T).fill_diagonal_(0)
    proposals = alike @ flat / alike.sum(1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    new = use.flatten(1).clone()
    for client, proposal in enumerate(proposals):
        swap = _swap(flat[client], sets[client], proposal, held[client].sum(1).tolist(), top_k)
        if swap is not None:
            out, into = swap
            sets[client, out], sets[client, into] = False, True
            new[client, into] = proposal[into].to(new.dtype)
    return sets.view_as(held), new.view_as(use)


def _swap(
    use: Tensor, held: Tensor, proposal: Tensor, counts: Sequence[int], top_k: Sequence[int]
) -> tuple[int, int] | None:
    """Positions (out, in) among [L * E], or None where nothing is to be gained. counts: held experts per layer."""
    if bool(held.all()):
        return None
    into = int(proposal.masked_fill(held, -torch.inf).argmax())
    experts = len(use) // len(counts)
    spare = torch.tensor([count > k for count, k in zip(counts, top_k, strict=True)])
    spare[into // experts] = True
    removable = held & spare.repeat_interleave(experts)
    out = int(use.masked_fill(~removable, torch.inf).argmin())
    return (out, into) if bool(use[out] < proposal[into]) else None
