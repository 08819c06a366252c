"""Merging the experts of mixture-of-experts layers over the clients that use them alike.

Per layer and expert e, over the participants P, the clients with n_i(e) >= n_min tokens:

    S_ij = exp(-|mu_i(e) - mu_j(e)|^2 / (2 sigma^2))        (do its inputs mean the same?)
    D_ij = cos(Delta_i(e), Delta_j(e)),  Delta_i = theta_i - theta_g    (did they change it in the same direction?)
    gamma_ij = S_ij max(0, D_ij) where S_ij >= tau_S and D_ij >= tau_D, else 0;  gamma_ii = 1
    c_i = sum_j pi_j gamma_ij / sum_j pi_j;   a_i = pi_i c_i / sum_k pi_k c_k
    theta_g(e) <- theta_g(e) + sum_i a_i Delta_i(e)

Source: Fang et al., "Aggregation Alignment for Federated Learning with Mixture-of-Experts under Data Heterogeneity"
(arXiv 2603.21276), which compares experts of the same index and takes updates from clients that are aligned; it gives
no formulas for how pairs become one expert.
Decisions: one client takes part alone with a = 1; no surviving pair leaves a_i in proportion to pi_i^2; a centroid of
zeros was withheld and is like nobody's (S_ij = 0); an expert without participants keeps its old bits, so what weight
decay did to it is discarded; D = 0 where an update is zero; comparisons with a threshold allow 1e-6. As the shares sum
to 1, the result is computed as the mean of the values with weights a_i.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from fedloom.core.errors import ConfigError, PayloadError
from fedloom.core.moe import MoELayer, Slice
from fedloom.core.payload import is_finite
from fedloom.core.tree import Tensors
from fedloom.merge.accumulate import Accumulator
from fedloom.merge.gram import Gram
from fedloom.merge.matching import located
from fedloom.merge.semantic_parts import (
    TOLERANCE,
    Direction,
    LayerStatistics,
    Prior,
    RegionGate,
    Rule,
    Similarity,
    Threshold,
    by_samples,
    consensus,
    gated,
    mean_std,
    rbf,
    whole,
)
from fedloom.merge.sources import Source, sources


class Region(NamedTuple):
    """How C clients came together in L layers of E experts; float64.

    shares: a_i [C, L, E], 0 where a client takes no part. similarity, direction, gates: S, D and gamma [L, E, C, C], 0
    outside the participants. prior: pi_i [C, L, E], 0 where a client takes no part. thresholds: tau_S and tau_D
    [2, L, E], -1 where there has been no pair yet.
    """

    shares: Tensor
    similarity: Tensor
    direction: Tensor
    gates: Tensor
    prior: Tensor
    thresholds: Tensor

    @classmethod
    def empty(cls, clients: int, layers: Sequence[MoELayer]) -> Region:
        """A region in which nobody takes part, to be filled."""
        depth, experts = len(layers), layers[0].num_experts if layers else 0

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64)

        one, pair = (clients, depth, experts), (depth, experts, clients, clients)
        return cls(zeros(*one), zeros(*pair), zeros(*pair), zeros(*pair), zeros(*one), zeros(2, depth, experts) - 1)

    def personal(self, client: int) -> Tensor:
        """Shares [C, L, E] of client i's own experts: gamma_ij pi_j / sum_k gamma_ik pi_k; the common ones where it
        takes no part."""
        own = self.gates[:, :, client, :].permute(2, 0, 1) * self.prior
        takes = self.prior[client] > 0
        return torch.where(takes, own / own.sum(0).where(takes, 1.0), self.shares)


@dataclass(frozen=True)
class SemanticMerge:
    """The merge; the slots hold values of the tables in `semantic_parts`.

    rule: "personalized" of `RULES` merges the common expert by consensus; a client's own is
    `experts_by_shares(trees, region.personal(i), ...)`. n_min: fewest tokens with which a client takes part in an
    expert, at least 1. sketch: 0 for exact cosines, else the length of random projections of the updates that they
    are taken of.
    """

    similarity: Similarity = rbf
    direction: Direction = whole
    threshold: Threshold = mean_std
    region: RegionGate = gated
    rule: Rule = consensus
    prior: Prior = by_samples
    n_min: int = 1
    sketch: int = 0

    def __post_init__(self) -> None:
        if self.n_min < 1:
            raise ConfigError(
                f"n_min, the fewest tokens of a client that takes part, must be at least 1, got {self.n_min}"
            )
        if self.sketch < 0:
            raise ConfigError(f"sketch must be 0 (exact cosines) or the length of the projections, got {self.sketch}")

    def __call__(
        self,
        trees: Sequence[Tensors],
        weights: Sequence[float],
        old: Tensors,
        layers: Sequence[MoELayer],
        statistics: Sequence[Tensors],
        *,
        who: Sequence[object] | None = None,
        before: Tensor | None = None,
    ) -> tuple[dict[str, Tensor], Region]:
        """Merge the experts of the layers.

        trees: per client, its parameters as values (not differences), possibly lazy and with other tensors beside the
        experts; one that lacks a tensor of an expert takes no part in it. weights: n_i; clients with 0 are dropped.
        old: the server's, from which updates count. statistics: per client "count" [L, E] and what the similarity
        reads: "centroid" [L, E, H], "hidden" [L, H], "tokens" [1]. who: client ids for messages. before: thresholds of
        the region of the round before, for thresholds that follow earlier ones.
        Returns the tensors that hold experts, dtype in = dtype out, and the region, in the order of `trees`. A tensor
        none of whose experts had a participant is the old object. Raises `PayloadError` naming client and tensor for
        names, shapes, dtypes and values that do not fit.
        """
        region = Region.empty(len(trees), layers)
        parts = self._merged(trees, weights, old, layers, statistics, region, who, before)
        return _assembled(parts, old), region

    def stream(
        self,
        trees: Sequence[Tensors],
        weights: Sequence[float],
        old: Tensors,
        layers: Sequence[MoELayer],
        statistics: Sequence[Tensors],
        *,
        who: Sequence[object] | None = None,
        before: Tensor | None = None,
        region: Region | None = None,
    ) -> Iterator[tuple[Slice, Tensor]]:
        """The same expert by expert, to be written into a file: in memory there is one merged expert.

        region: `Region.empty(len(trees), layers)`, filled while the experts pass.
        """
        filled = region or Region.empty(len(trees), layers)
        for part, value in self._merged(trees, weights, old, layers, statistics, filled, who, before):
            yield part, part.of(old) if value is None else value

    @torch.no_grad()
    def _merged(
        self,
        trees: Sequence[Tensors],
        weights: Sequence[float],
        old: Tensors,
        layers: Sequence[MoELayer],
        statistics: Sequence[Tensors],
        region: Region,
        who: Sequence[object] | None,
        before: Tensor | None,
    ) -> Iterator[tuple[Slice, Tensor | None]]:
        """Every slice with its new value; None where nobody takes part. Fills the region."""
        job = _Job(_checked(trees, weights, old, layers, statistics, who), old, region)
        if before is not None:
            region.thresholds.copy_(before)
        mine, names = [statistics[c.position] for c in job.clients], [c.label for c in job.clients]
        for at, layer in enumerate(layers):
            stats = LayerStatistics(mine, names, layers, at, self.n_min) if mine else None
            if stats is None:
                yield from ((part, None) for parts in layer.experts for part in parts)
            else:
                yield from self._layer(job, at, layer, stats)

    def _layer(
        self, job: _Job, at: int, layer: MoELayer, stats: LayerStatistics
    ) -> Iterator[tuple[Slice, Tensor | None]]:
        similarity = self.similarity(stats)
        prior = self.prior(torch.tensor([client.weight for client in job.clients], dtype=torch.float64), stats.count)
        gram, accumulator = Gram(self.direction.change, self.sketch), Accumulator()
        for e, parts in enumerate(layer.experts):
            has = [bool(stats.taking[i, e]) and _has(client, parts) for i, client in enumerate(job.clients)]
            taking = [i for i, it_has in enumerate(has) if it_has]
            if not taking or not parts:  # frozen experts have no parts
                yield from ((part, None) for part in parts)
                continue
            owners = [job.clients[i] for i in taking]
            values = [[_read(owner, part, job.old) for owner in owners] for part in parts]
            alike = similarity[e][taking][:, taking]
            cosine = self._cosines(gram, owners, values, parts, job.old)
            shares = self._shares(job, (at, e), [owner.position for owner in owners], alike, cosine, prior[taking, e])
            for part, tensors in zip(parts, values, strict=True):
                yield part, _mean(part, owners, tensors, shares.tolist(), part.of(job.old), accumulator)

    def _cosines(
        self,
        gram: Gram,
        owners: Sequence[Source],
        values: Sequence[Sequence[Tensor]],
        parts: Sequence[Slice],
        old: Tensors,
    ) -> Tensor:
        """D [P, P]; 0 where an update is zero, 1 on the diagonal."""
        if len(owners) == 1:
            return torch.ones(1, 1, dtype=torch.float64)
        chosen = self.direction.parts(parts, old)
        products = gram([values[parts.index(part)] for part in chosen], [part.of(old) for part in chosen])
        if not is_finite(products):
            raise _not_finite(parts, owners, values)
        norms = products.diagonal().clamp(min=0).sqrt()
        scale = norms[:, None] * norms
        cosine = torch.where(scale > 0, products / scale.where(scale > 0, 1.0), 0.0).clamp(-1, 1)
        return cosine.fill_diagonal_(1.0)

    def _shares(
        self, job: _Job, at: tuple[int, int], positions: Sequence[int], alike: Tensor, cosine: Tensor, prior: Tensor
    ) -> Tensor:
        """a [P] of one expert, written into the region with all that led to it."""
        passes, region = torch.ones_like(alike, dtype=torch.bool), job.region
        pairs = torch.triu_indices(len(positions), len(positions), 1)
        if len(positions) > 1:
            last = region.thresholds[:, *at].tolist()
            found = self.threshold(alike[*pairs], cosine[*pairs], (last[0], last[1]) if last[0] >= 0 else None)
            region.thresholds[:, *at] = torch.tensor(found, dtype=torch.float64)
            passes = (alike >= found[0] - TOLERANCE) & (cosine >= found[1] - TOLERANCE)
        gates = self.region(alike, cosine, passes).fill_diagonal_(1.0)
        shares = self.rule(gates, prior)
        index = torch.tensor(positions)
        for matrix, value in ((region.similarity, alike), (region.direction, cosine), (region.gates, gates)):
            matrix[at][index[:, None], index] = value
        region.shares[index, *at], region.prior[index, *at] = shares, prior
        return shares


class _Job(NamedTuple):
    """What one merge works on, and the region that it fills."""

    clients: Sequence[Source]
    old: Tensors
    region: Region


@torch.no_grad()
def experts_by_shares(
    trees: Sequence[Tensors],
    shares: Tensor,
    old: Tensors,
    layers: Sequence[MoELayer],
    *,
    who: Sequence[object] | None = None,
) -> dict[str, Tensor]:
    """The experts as means over clients with the shares [C, L, E], such as those of `Region.personal`.

    An expert whose shares are all 0 keeps its old slice. Arguments, result and errors are those of `SemanticMerge`.
    """
    clients = sources(trees, [1.0] * len(trees), old, who)
    return _assembled(_by_shares(clients, shares.tolist(), old, layers), old)


def _by_shares(
    clients: Sequence[Source], shares: Sequence[Sequence[Sequence[float]]], old: Tensors, layers: Sequence[MoELayer]
) -> Iterator[tuple[Slice, Tensor | None]]:
    accumulator = Accumulator()
    for at, layer in enumerate(layers):
        for e, parts in enumerate(layer.experts):
            owners = [client for client in clients if shares[client.position][at][e] > 0]
            taken = [shares[client.position][at][e] for client in owners]
            for part in parts:
                tensors = [_read(owner, part, old) for owner in owners]
                yield part, _mean(part, owners, tensors, taken, part.of(old), accumulator) if owners else None


def _checked(
    trees: Sequence[Tensors],
    weights: Sequence[float],
    old: Tensors,
    layers: Sequence[MoELayer],
    statistics: Sequence[Tensors],
    who: Sequence[object] | None,
) -> list[Source]:
    if len(statistics) != len(trees):
        raise PayloadError(f"{len(trees)} trees but {len(statistics)} clients' routing statistics")
    names = frozenset(old)
    missing = [name for layer in layers for name in layer.expert_names if name not in names]
    if missing:
        raise PayloadError(f"the server holds no tensor '{missing[0]}' of the network's experts")
    return sources(trees, weights, old, who)


def _has(client: Source, parts: Sequence[Slice]) -> bool:
    return all(part.name in client.names for part in parts)


def _read(client: Source, part: Slice, old: Tensors) -> Tensor:
    """A client's value of one slice; of a lazy tree no more than the slice stays in memory."""
    tree, place = located(client.tree, part)
    value = replace(client, tree=tree).read_like(place.name, old[place.name])
    if not place.index:
        return value
    return value[place.index] if type(tree) is dict else value[place.index].clone()


def _mean(
    part: Slice,
    owners: Sequence[Source],
    values: Sequence[Tensor],
    shares: Sequence[float],
    old: Tensor,
    accumulator: Accumulator,
) -> Tensor:
    merged = accumulator.mean_of(values, shares, old)
    if not is_finite(merged):
        raise _not_finite([part], owners, [values])
    return merged


def _not_finite(parts: Sequence[Slice], owners: Sequence[Source], values: Sequence[Sequence[Tensor]]) -> PayloadError:
    """The error for products or means that are not finite: names the first client that caused it."""
    for part, tensors in zip(parts, values, strict=True):
        for owner, tensor in zip(owners, tensors, strict=True):
            if not is_finite(tensor):
                return PayloadError(f"{owner.label}: '{part.name}' holds NaN or infinite values")
    return PayloadError(
        f"the updates of '{parts[0].name}' are too large to be compared although every client's is finite"
    )


def _assembled(parts: Iterator[tuple[Slice, Tensor | None]], old: Tensors) -> dict[str, Tensor]:
    """Whole tensors of their slices; a slice without a value is the old one."""
    merged: dict[str, Tensor] = {}
    fresh: set[str] = set()
    for part, value in parts:
        if part.name not in merged:
            merged[part.name] = old[part.name]
        if value is None:
            continue
        if not part.index:
            merged[part.name] = value
            continue
        if part.name not in fresh:
            merged[part.name] = merged[part.name].detach().clone(memory_format=torch.contiguous_format)
            fresh.add(part.name)
        merged[part.name][part.index] = value
    return merged
