"""What clients agree on about routing: weights per expert from overlap and margin, and a common distribution.

Source: Fang et al., "Aggregation Alignment for Federated Learning with Mixture-of-Experts under Data Heterogeneity"
(FedAlign-MoE, arXiv 2603.21276): a client counts for an expert by how far its use of it overlaps with the others' and
by how sure its gate is, normalised over clients. Everything is in float64, stacked: C clients, L layers, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

FLOOR = 1e-6  # of the common distribution, whose logarithm is taken
TINY = 1e-12
STEPS, CLOSE = 10, 1e-9  # of the fixed point

Overlap = Callable[[Tensor, Tensor], Tensor]
Combine = Callable[[Tensor, Tensor], Tensor]
Pool = Callable[[Tensor], Tensor]
Reference = Callable[[Tensor, Tensor, Tensor | None, Pool], Tensor]


def normalized_product(a: Tensor, b: Tensor) -> Tensor:
    """2ab / (a^2 + b^2): 1 where equal, 0 where one is 0, or both are."""
    total = a.square() + b.square()
    return torch.where(total > 0, 2 * a * b / total.where(total > 0, 1.0), 0.0)


def product(a: Tensor, b: Tensor) -> Tensor:
    """ab, the literal reading; a reference common to all clients cancels out of the weights, and use alone counts."""
    return a * b


def minimum(a: Tensor, b: Tensor) -> Tensor:
    """min(a, b), the intersection of histograms."""
    return torch.minimum(a, b)


OVERLAPS: dict[str, Overlap] = {"normalized_product": normalized_product, "product": product, "min": minimum}


def current_mean(means: Tensor, sizes: Tensor, old: Tensor | None, pool: Pool) -> Tensor:
    """sum_i n_i pbar_i / N."""
    return torch.einsum("c,cle->le", sizes / sizes.sum(), means)


def prev_global(means: Tensor, sizes: Tensor, old: Tensor | None, pool: Pool) -> Tensor:
    """The consensus of the round before; the mean of this round where there is none."""
    return current_mean(means, sizes, old, pool) if old is None else old


def leave_one_out(means: Tensor, sizes: Tensor, old: Tensor | None, pool: Pool) -> Tensor:
    """The mean of the other clients [C, L, E]; a client alone is compared with itself."""
    if len(means) == 1:
        return means
    weighted = sizes[:, None, None] * means
    return (weighted.sum(0) - weighted) / (sizes.sum() - sizes)[:, None, None]


def fixed_point(means: Tensor, sizes: Tensor, old: Tensor | None, pool: Pool) -> Tensor:
    """The consensus that is its own reference, by at most ten steps from the mean."""
    found = current_mean(means, sizes, old, pool)
    for _ in range(STEPS):
        found, before = pool(found), found
        if bool((found - before).abs().max() < CLOSE):
            break
    return found


REFERENCES: dict[str, Reference] = {
    "current_mean": current_mean,
    "prev_global": prev_global,
    "leave_one_out": leave_one_out,
    "fixed_point": fixed_point,
}


def overlap_times_margin(overlap: Tensor, margin: Tensor) -> Tensor:
    """o m."""
    return overlap * margin


def overlap_only(overlap: Tensor, margin: Tensor) -> Tensor:
    """o."""
    return overlap


def margin_only(overlap: Tensor, margin: Tensor) -> Tensor:
    """m."""
    return margin


def equal(overlap: Tensor, margin: Tensor) -> Tensor:
    """1: every client counts the same."""
    return torch.ones_like(overlap)


COMBINES: dict[str, Combine] = {
    "product": overlap_times_margin,
    "o_only": overlap_only,
    "m_only": margin_only,
    "uniform": equal,
}


class Agreement(NamedTuple):
    """overlap o, weights omega [C, L, E], of which the latter sum to 1 over clients; clients omega-bar [C, L], their
    means over experts by p_g, which sum to 1, too; routing p_g [L, E], at least 1e-6."""

    overlap: Tensor
    weights: Tensor
    clients: Tensor
    routing: Tensor


@dataclass(frozen=True)
class RoutingConsensus:
    """s = combine(o, m) n^size_power; omega_i(e) = s_i(e) / sum_j s_j(e); p_g(e) = sum_i omega_i(e) pbar_i(e).

    overlap: o_i(e) of pbar_i(e) and the reference. softmax: s is first made a softmax over each client's experts.
    renormalised: p_g is divided by its sum, which omega makes other than 1. ema: share of the consensus before in p_g.
    """

    overlap: Overlap = normalized_product
    reference: Reference = current_mean
    combine: Combine = overlap_times_margin
    size_power: float = 0.0
    softmax: bool = False
    renormalised: bool = True
    ema: float = 0.0

    def __call__(
        self,
        means: Tensor,
        margins: Tensor,
        sizes: Tensor,
        old: Tensor | None = None,
        measured: Tensor | None = None,
    ) -> Agreement:
        """The agreement of at least one client.

        means, margins: pbar and m [C, L, E]. sizes: n [C], above 0. old: p_g of the round before. measured: overlaps
        [C, L, E] that the clients have measured, in the place of `overlap`.
        """
        means, margins, sizes = means.double(), margins.double(), sizes.double()

        def weighed(overlap: Tensor) -> tuple[Tensor, Tensor]:
            weights = self._weights(overlap, margins, sizes)
            return weights, self._pooled(weights, means)

        def compared(reference: Tensor) -> Tensor:
            if measured is not None:
                return measured.double()
            return self.overlap(means, reference.expand_as(means))

        reference = self.reference(means, sizes, old, lambda q: weighed(compared(q))[1])
        overlap = compared(reference.double())
        weights, routing = weighed(overlap)
        if old is not None and self.ema:
            routing = self.ema * old.double() + (1 - self.ema) * routing
        clients = (routing * weights).sum(2)
        return Agreement(overlap, weights, clients / clients.sum(0), routing)

    def _weights(self, overlap: Tensor, margins: Tensor, sizes: Tensor) -> Tensor:
        scores = self.combine(overlap, margins)
        if self.softmax:
            scores = scores.softmax(2)
        scores = scores * sizes[:, None, None] ** self.size_power
        total = scores.sum(0)
        by_size = (sizes / sizes.sum())[:, None, None].expand_as(scores)
        return torch.where(total < TINY, by_size, scores / total.where(total >= TINY, 1.0))

    def _pooled(self, weights: Tensor, means: Tensor) -> Tensor:
        found = (weights * means).sum(0)
        if self.renormalised:
            found = found / found.sum(1, keepdim=True).clamp(min=TINY)
        found = found.clamp(min=FLOOR)
        return found / found.sum(1, keepdim=True) if self.renormalised else found


class Known(NamedTuple):
    """Of the clients that have uploaded statistics, each of its last round: means [K, L, E], omega [K, L, E], and how
    many took part in it [K]."""

    means: Tensor
    weights: Tensor
    participants: Tensor


Strength = Callable[[Known, Tensor, Overlap], Tensor]


def by_overlap(known: Known, routing: Tensor, overlap: Overlap) -> Tensor:
    """The overlap of each client's distribution with the consensus: who uses an expert as all do is held to it."""
    return overlap(known.means, routing.expand_as(known.means))


def constant(known: Known, routing: Tensor, overlap: Overlap) -> Tensor:
    """1."""
    return torch.ones_like(known.means)


def by_weight(known: Known, routing: Tensor, overlap: Overlap) -> Tensor:
    """C omega_i(e): 1 for a client that counts as much as the others."""
    return known.participants[:, None, None] * known.weights


def by_consistency(known: Known, routing: Tensor, overlap: Overlap) -> Tensor:
    """1 - std_i pbar_i(e) / mean_i pbar_i(e), the same for all clients: little where they differ."""
    spread = known.means.std(0, correction=0) / (known.means.mean(0) + TINY)
    return (1 - spread).expand_as(known.means)


STRENGTHS: dict[str, Strength] = {
    "overlap": by_overlap,
    "const": constant,
    "omega": by_weight,
    "consistency": by_consistency,
}


def strengths(form: Strength, least: float, known: Known, routing: Tensor, overlap: Overlap) -> Tensor:
    """alpha [K, L, E] of the regulariser: the form's value, clipped to [least, 1]."""
    return form(known, routing, overlap).clamp(least, 1)
