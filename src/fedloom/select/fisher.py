"""Fisher-informed routing signals of FedFMX in closed form, without a backward pass.

For a linear softmax head with logits W [h; 1] the gradient of the cross-entropy is the outer product
g = delta [h; 1]^T with delta = softmax(logits) - onehot(label), so squared norms and Fisher-weighted norms of all
experts are two batched products. Heads that are not linear (cosine, weight-normalised) do not have this form.
Source: Yuan et al., "FedFMX", arXiv 2606.28835, eqs. (2)-(4).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.core.errors import ConfigError

TRACE_EPS = 1e-8
STD_EPS = 1e-8
ZERO_NORM = 1e-12


def fres(features: Tensor, logits: Tensor, labels: Tensor, fisher: Tensor) -> tuple[Tensor, Tensor]:
    """Stability cost and raw plasticity gain of every expert on every sample, each [batch, experts].

    features [experts, batch, dim]: inputs of the heads. logits [experts, batch, classes]: in the label scope of
    the loss; -inf marks a class outside it. labels: int64 [batch]. fisher [experts, classes, dim + 1]: already
    mapped (see `FisherMap`), bias last.
    With g the head's gradient: cost = 1/2 sum_i fisher_i g_i^2 / ||g||^2 and gain = ||g||^2 / (sum_i fisher_i +
    1e-8). Both are 0 where the gradient is 0. Raises `ConfigError` when the shapes do not fit.
    """
    experts, batch, dim = features.shape
    want = (experts, logits.shape[-1], dim + 1)
    if logits.shape[:2] != (experts, batch) or fisher.shape != want or labels.shape != (batch,):
        raise ConfigError(
            f"fres needs features [experts, batch, dim], logits [experts, batch, classes], labels [batch] and fisher "
            f"[experts, classes, dim + 1], got {tuple(features.shape)}, {tuple(logits.shape)}, "
            f"{tuple(labels.shape)} and {tuple(fisher.shape)}"
        )
    return signals(features, head_gradients(logits, labels)[1], fisher)


def head_gradients(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy [experts, batch] and squared gradients by the logits, delta^2 [experts, batch, classes]."""
    log_probs = F.log_softmax(logits, -1)
    index = labels.expand(logits.shape[0], -1).unsqueeze(-1)
    delta = log_probs.exp().scatter_(-1, index, 0.0)
    # p - 1 of the label as minus the others' sum: exact where p itself rounds to 1
    delta.scatter_(-1, index, -delta.sum(-1, keepdim=True))
    return -log_probs.gather(-1, index).squeeze(-1), delta.square_()


def signals(features: Tensor, delta_sq: Tensor, fisher: Tensor) -> tuple[Tensor, Tensor]:
    """`fres` from squared logit gradients [experts, batch, classes]; both results [batch, experts]."""
    feature_sq = features.square()
    norm_sq = delta_sq.sum(-1) * (feature_sq.sum(-1) + 1)
    spread = torch.bmm(delta_sq, fisher)
    weighted = torch.linalg.vecdot(spread[..., :-1], feature_sq) + spread[..., -1]
    cost = torch.where(norm_sq < ZERO_NORM, 0.0, 0.5 * weighted / norm_sq.clamp(min=ZERO_NORM))
    gain = norm_sq / (fisher.sum((1, 2)) + TRACE_EPS).unsqueeze(1)
    return cost.T, gain.T


def shares(gain: Tensor) -> Tensor:
    """Divide gains by their sum over the experts; 1/experts each where all are 0. [batch, experts]."""
    total = gain.sum(1, keepdim=True)
    return torch.where(total > 0, gain / total.clamp(min=torch.finfo(gain.dtype).tiny), 1 / gain.shape[1])


def across_experts(fisher: Tensor) -> Tensor:
    """z-score of each entry over the experts: keeps which expert is rigid. 0 where all experts agree."""
    return _z_score(fisher, fisher[:1], (0,))


def per_expert(fisher: Tensor) -> Tensor:
    """z-score over the entries of each expert; its trace is then nearly the same for all."""
    return _z_score(fisher, fisher[:, :1, :1], (1, 2))


def pooled(fisher: Tensor) -> Tensor:
    """z-score over all entries of all experts."""
    return _z_score(fisher, fisher[:1, :1, :1], (0, 1, 2))


def per_trace(fisher: Tensor) -> Tensor:
    """Scale each expert to a mean entry of 1; an expert whose trace is 0 stays 0."""
    mean = fisher.mean((1, 2), keepdim=True)
    return fisher / mean.clamp(min=torch.finfo(fisher.dtype).tiny)


def unscaled(fisher: Tensor) -> Tensor:
    """The entries as they are."""
    return fisher


def relu_above(z: Tensor) -> Tensor:
    """max(0, 1 + z)."""
    return (1 + z).relu()


def unmapped(z: Tensor) -> Tensor:
    """The values as they are; only for scales that are never negative."""
    return z


SCALES: dict[str, Callable[[Tensor], Tensor]] = {
    "experts": across_experts,
    "per_expert": per_expert,
    "pooled": pooled,
    "trace": per_trace,
    "none": unscaled,
}
SQUASHES: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "softplus": F.softplus,
    "relu": relu_above,
    "identity": unmapped,
}


@dataclass(frozen=True)
class FisherMap:
    """Fisher entries -> comparable, nonnegative weights: a scale (A1) followed by a squash (A2).

    The paper says "standardise" and "map" without a formula. Default: z-score across experts (population
    standard deviation + 1e-8), then a sigmoid, so that an untrained pool has 0.5 everywhere and a cost of 0.25.
    """

    scale: Callable[[Tensor], Tensor] = across_experts
    squash: Callable[[Tensor], Tensor] = torch.sigmoid

    def __post_init__(self) -> None:
        if self.squash is unmapped and self.scale not in (per_trace, unscaled):
            raise ConfigError("fisher_squash 'identity' needs fisher_scale 'trace' or 'none': z-scores can be negative")

    def __call__(self, fisher: Tensor, rows: Tensor | None = None) -> Tensor:
        """Map [experts, classes, dim + 1].

        rows: int64 ids of the classes whose head rows exist, None for all. Other rows take no part in any
        statistic and come out as 0, so that a trace equals that of a head which grows.
        """
        if rows is None:
            return self.squash(self.scale(fisher))
        mapped = self.squash(self.scale(fisher.index_select(1, rows)))
        return torch.zeros_like(fisher).index_copy_(1, rows, mapped)


def _z_score(values: Tensor, origin: Tensor, dims: tuple[int, ...]) -> Tensor:
    # Shifted by one of the values: equal values then give exactly 0, where rounding of the mean would not.
    shifted = values - origin
    centred = shifted - shifted.mean(dims, keepdim=True)
    # Not torch.std: over a short leading dimension it is 20 times slower than these passes.
    return centred / (centred.square().mean(dims, keepdim=True).sqrt() + STD_EPS)
