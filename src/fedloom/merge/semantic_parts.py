"""What the semantic merge of experts is made of: similarities, directions, thresholds, gates and rules, by name.

Everything is in float64. P: the clients that take part in an expert; C: all clients that count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fedloom.core.errors import ConfigError, PayloadError
from fedloom.core.moe import MoELayer, Slice
from fedloom.core.payload import is_finite
from fedloom.core.tree import Tensors
from fedloom.merge.gram import Change, unchanged
from fedloom.merge.similarity import cosines

TOLERANCE = 1e-6  # of comparisons with a threshold


class LayerStatistics:
    """One layer's routing statistics, stacked over clients.

    taking: bool [C, E], the experts that each client takes part in, from "count" [C, E] and the fewest tokens n_min.
    """

    def __init__(
        self, statistics: Sequence[Tensors], who: Sequence[str], layers: Sequence[MoELayer], at: int, n_min: int
    ):
        self._statistics, self._who, self._at = statistics, who, at
        self._shapes = {
            "count": (len(layers), layers[at].num_experts),
            "centroid": (len(layers), layers[at].num_experts, layers[at].hidden),
            "hidden": (len(layers), layers[at].hidden),
            "tokens": (1,),
        }
        self.count = self.read("count")
        self.taking = self.count >= n_min

    def read(self, name: str) -> Tensor:
        """The statistic of that name: [C, E], [C, E, H], [C, H] or, for "tokens", [C].

        Raises `PayloadError` naming the client for a statistic that is missing, of another shape or not finite.
        """
        return torch.stack([self._one(name, i) for i in range(len(self._statistics))])

    def _one(self, name: str, client: int) -> Tensor:
        value = self._statistics[client].get(name)
        if value is None or tuple(value.shape) != self._shapes[name]:
            found = "is missing" if value is None else f"has shape {tuple(value.shape)}"
            raise PayloadError(
                f"{self._who[client]}: routing statistic '{name}' {found}, must have shape {self._shapes[name]}"
            )
        if not is_finite(value):
            raise PayloadError(f"{self._who[client]}: routing statistic '{name}' holds NaN or infinite values")
        return (value[0] if name == "tokens" else value[self._at]).double()


class Similarity(Protocol):
    """How alike the inputs of an expert are: [E, C, C] of a layer's statistics, at most 1."""

    def __call__(self, layer: LayerStatistics) -> Tensor:
        """Compare the clients' centroids."""
        ...


def rbf(layer: LayerStatistics) -> Tensor:
    """S_ij = exp(-|mu_i - mu_j|^2 / (2 sigma^2)); sigma^2: the median squared distance within the layer.

    The median is over pairs of all participants' centroids of the layer, of whatever client and expert; where it is 0,
    S = 1.
    """
    centroids, known = _centroids(layer)
    between = torch.pdist(centroids[known]).square().sort().values
    middle = (between[(len(between) - 1) // 2] + between[len(between) // 2]) / 2 if len(between) else 0.0
    by_expert = centroids.transpose(0, 1).contiguous()
    gaps = torch.cdist(by_expert, by_expert, compute_mode="donot_use_mm_for_euclid_dist").square()
    return _where_known(torch.exp(-gaps / (2 * middle)) if middle > 0 else torch.ones_like(gaps), known)


def cosine_centered(layer: LayerStatistics) -> Tensor:
    """Cosine of mu_i - h and mu_j - h with h the mean hidden state of all clients' tokens, at least 0.

    h never is the mean over clients of one expert: identical clients would give 0 / 0.
    """
    centroids, known = _centroids(layer)
    tokens = layer.read("tokens")
    mean = tokens @ layer.read("hidden") / tokens.sum().clamp(min=1.0)
    return _cosines(centroids - mean, known)


def cosine_raw(layer: LayerStatistics) -> Tensor:
    """Cosine of the centroids as they are, at least 0."""
    return _cosines(*_centroids(layer))


def no_similarity(layer: LayerStatistics) -> Tensor:
    """S = 1: centroids are not read."""
    count, experts = layer.taking.shape
    return torch.ones(experts, count, count, dtype=torch.float64)


SIMILARITIES: Mapping[str, Similarity] = {
    "rbf": rbf,
    "cosine_centered": cosine_centered,
    "cosine_raw": cosine_raw,
    "none": no_similarity,
}


def _centroids(layer: LayerStatistics) -> tuple[Tensor, Tensor]:
    """Centroids [C, E, H] and which are known [C, E]: zeros stand for one that was withheld."""
    centroids = layer.read("centroid")
    return centroids, layer.taking & (centroids != 0).any(2)


def _where_known(similarity: Tensor, known: Tensor) -> Tensor:
    """0 for pairs of which one centroid is unknown, 1 on the diagonal."""
    both = known.T[:, :, None] & known.T[:, None, :]
    return similarity.where(both, 0.0).where(~torch.eye(similarity.shape[1], dtype=torch.bool), 1.0)


def _cosines(vectors: Tensor, known: Tensor) -> Tensor:
    return _where_known(torch.stack([cosines(expert) for expert in vectors.transpose(0, 1)]).clamp(0, 1), known)


class Direction(NamedTuple):
    """What of the clients' updates is compared, by cosine: which of an expert's tensors, and f of every entry."""

    parts: Callable[[Sequence[Slice], Tensors], Sequence[Slice]]
    change: Change


def _all(parts: Sequence[Slice], old: Tensors) -> Sequence[Slice]:
    return parts


def _last(parts: Sequence[Slice], old: Tensors) -> Sequence[Slice]:
    """The last matrix and what follows it (its bias); the last tensor where there is no matrix."""
    # one row of a stacked tensor is a tensor of one dimension less; the rows of an adapter's factor are a matrix
    stacked = [bool(part.index) and len(part.of(old)) == 1 for part in parts]
    matrices = [i for i, part in enumerate(parts) if old[part.name].dim() - stacked[i] >= 2]
    return parts[matrices[-1] if matrices else -1 :]


DIRECTIONS: Mapping[str, Direction] = {
    "whole": Direction(_all, unchanged),
    "last_tensor": Direction(_last, unchanged),
    "sign": Direction(_all, torch.sign),
}
whole = DIRECTIONS["whole"]


class Threshold(Protocol):
    """(S, D) of the pairs of an expert [n], n >= 1, and the thresholds of the round before -> those of this round.

    before: (tau_S, tau_D), None where the expert has had no pair yet.
    """

    def __call__(
        self, similarity: Tensor, direction: Tensor, before: tuple[float, float] | None
    ) -> tuple[float, float]:
        """Thresholds tau_S and tau_D in [0, 1]."""
        ...


@dataclass(frozen=True)
class MeanStd:
    """clip(mean - beta std, 0, 1) over this round's pairs, with the population's standard deviation."""

    beta: float = 1.0

    def __call__(
        self, similarity: Tensor, direction: Tensor, before: tuple[float, float] | None
    ) -> tuple[float, float]:
        """Thresholds of this round's pairs."""
        return self._one(similarity), self._one(direction)

    def _one(self, pairs: Tensor) -> float:
        return _clip(pairs.mean() - self.beta * pairs.std(correction=0))


mean_std = MeanStd()


@dataclass(frozen=True)
class Quantile:
    """The q-th quantile of this round's pairs, clipped to [0, 1]."""

    q: float = 0.25

    def __post_init__(self) -> None:
        _in_unit("the quantile of the threshold", self.q)

    def __call__(
        self, similarity: Tensor, direction: Tensor, before: tuple[float, float] | None
    ) -> tuple[float, float]:
        """Thresholds of this round's pairs."""
        return _clip(similarity.quantile(self.q)), _clip(direction.quantile(self.q))


@dataclass(frozen=True)
class Ema:
    """decay * before + (1 - decay) * clip(mean - beta std, 0, 1): thresholds that move slowly over rounds."""

    beta: float = 1.0
    decay: float = 0.9

    def __post_init__(self) -> None:
        _in_unit("the decay of the threshold", self.decay)

    def __call__(
        self, similarity: Tensor, direction: Tensor, before: tuple[float, float] | None
    ) -> tuple[float, float]:
        """Thresholds between those before and those of this round's pairs."""
        now = MeanStd(self.beta)(similarity, direction, None)
        if before is None:
            return now
        first, second = (self.decay * old + (1 - self.decay) * new for old, new in zip(before, now, strict=True))
        return first, second


@dataclass(frozen=True)
class Const:
    """Fixed thresholds."""

    similarity: float = 0.5
    direction: float = 0.0

    def __post_init__(self) -> None:
        _in_unit("the threshold of similarities", self.similarity)
        _in_unit("the threshold of directions", self.direction)

    def __call__(
        self, similarity: Tensor, direction: Tensor, before: tuple[float, float] | None
    ) -> tuple[float, float]:
        """The fixed ones."""
        return self.similarity, self.direction


THRESHOLDS: Mapping[str, Callable[..., Threshold]] = {
    "mean_std": MeanStd,
    "quantile": Quantile,
    "ema": Ema,
    "const": Const,
}


class RegionGate(Protocol):
    """(S, D, passes) [P, P] -> gamma [P, P] beside the diagonal; passes: both are at or above their thresholds."""

    def __call__(self, similarity: Tensor, direction: Tensor, passes: Tensor) -> Tensor:
        """Gate the pairs."""
        ...


def gated(similarity: Tensor, direction: Tensor, passes: Tensor) -> Tensor:
    """S max(0, D) where the pair passes, else 0."""
    return similarity * direction.clamp(min=0) * passes


def mean_gate(similarity: Tensor, direction: Tensor, passes: Tensor) -> Tensor:
    """(S + max(0, D)) / 2 where the pair passes, else 0."""
    return (similarity + direction.clamp(min=0)) / 2 * passes


def hard_only(similarity: Tensor, direction: Tensor, passes: Tensor) -> Tensor:
    """1 where the pair passes, else 0."""
    return passes.double()


def soft_only(similarity: Tensor, direction: Tensor, passes: Tensor) -> Tensor:
    """S max(0, D), whatever the thresholds."""
    return similarity * direction.clamp(min=0)


REGIONS: Mapping[str, RegionGate] = {
    "gated": gated,
    "mean": mean_gate,
    "hard_only": hard_only,
    "soft_only": soft_only,
}


class Prior(Protocol):
    """(weights of the clients [C], tokens of each per expert [C, E]) -> pi [C, E]."""

    def __call__(self, weights: Tensor, count: Tensor) -> Tensor:
        """How much a client counts before anything is compared."""
        ...


def by_samples(weights: Tensor, count: Tensor) -> Tensor:
    """pi_i = n_i."""
    return weights[:, None].expand_as(count)


def by_tokens(weights: Tensor, count: Tensor) -> Tensor:
    """pi_i = n_i(e), the tokens that the expert processed for the client."""
    return count


PRIORS: Mapping[str, Prior] = {"samples": by_samples, "tokens": by_tokens}


class Rule(Protocol):
    """(gamma [P, P], pi [P]) -> shares a [P], which sum to 1."""

    def __call__(self, gates: Tensor, prior: Tensor) -> Tensor:
        """Shares of the clients in the expert."""
        ...


def consensus(gates: Tensor, prior: Tensor) -> Tensor:
    """a_i = pi_i c_i / sum_k pi_k c_k with c_i = sum_j pi_j gamma_ij / sum_j pi_j."""
    shares = prior * (gates @ prior)
    return shares / shares.sum()


def component(gates: Tensor, prior: Tensor) -> Tensor:
    """pi over the largest connected component of gamma > 0, 0 outside; ties: the larger pi, then the first client."""
    reach = (gates > 0).double() + torch.eye(len(gates), dtype=torch.float64)
    for _ in range(max(len(gates) - 1, 1).bit_length()):  # powers 2, 4, ... of the graph: paths of that length
        reach = (reach @ reach).clamp(max=1)
    members = reach > 0
    sizes = [(int(row.sum()), float(prior[row].sum()), -i) for i, row in enumerate(members)]
    inside = members[-max(sizes)[2]]
    return prior.where(inside, 0.0) / prior[inside].sum()


RULES: Mapping[str, Rule] = {"consensus": consensus, "component": component, "personalized": consensus}


def _clip(value: Tensor) -> float:
    return float(value.clamp(0, 1))


def _in_unit(what: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ConfigError(f"{what} must be in [0, 1], got {value}")
