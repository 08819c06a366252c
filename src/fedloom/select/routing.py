"""Routing of training samples to experts, and mixing of experts at test time.

Slots of FedFMX: which experts a sample trains (`Stop`), how much each counts (`RoutingWeights`), and how their
outputs are mixed when there is no label (`Mix`). `FisherShapley` is the decision that joins them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.core.batches import Batch
from fedloom.core.context import Outputs
from fedloom.core.errors import ConfigError, unknown
from fedloom.core.tree import Tensors
from fedloom.select.fisher import head_gradients
from fedloom.select.shapley import check_mu, keep_until, marginals, select_experts, shapley_values
from fedloom.select.utility import Utility

Weigh = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
EmptyValue = Callable[[Tensor | None, int], "float | Tensor"]
Fallback = Callable[[Tensor, Tensor], Tensor]


class Stop(Protocol):
    """Chooses the experts that a sample trains."""

    def __call__(self, phi: Tensor, gain: Tensor, cost: Tensor, empty_value: float | Tensor) -> Tensor:
        """Return a bool mask [batch, experts]; every row keeps at least one expert."""
        ...


@dataclass(frozen=True)
class AdaptiveStop:
    """The paper's rule, read literally: stop at dv_j <= mu * mean of the earlier dv, trigger kept."""

    mu: float

    def __post_init__(self) -> None:
        check_mu(self.mu)

    def __call__(self, phi: Tensor, gain: Tensor, cost: Tensor, empty_value: float | Tensor) -> Tensor:
        """Return the mask."""
        return select_experts(phi, gain, cost, self.mu, empty_value)


@dataclass(frozen=True)
class ExclusiveStop:
    """The same inequality, but the triggering expert is left out: one expert or more."""

    mu: float

    def __post_init__(self) -> None:
        check_mu(self.mu)

    def __call__(self, phi: Tensor, gain: Tensor, cost: Tensor, empty_value: float | Tensor) -> Tensor:
        """Return the mask."""
        order, dv, before = marginals(phi, gain, cost, empty_value)
        return keep_until(dv <= self.mu * before, order, keep_trigger=False)


@dataclass(frozen=True)
class MagnitudeStop:
    """Stop at dv_j <= m - (1 - mu) |m| with m the mean of the earlier dv: a larger mu stops earlier for any sign."""

    mu: float

    def __post_init__(self) -> None:
        check_mu(self.mu)

    def __call__(self, phi: Tensor, gain: Tensor, cost: Tensor, empty_value: float | Tensor) -> Tensor:
        """Return the mask."""
        order, dv, before = marginals(phi, gain, cost, empty_value)
        return keep_until(dv <= before - (1 - self.mu) * before.abs(), order)


@dataclass(frozen=True)
class TopExperts:
    """The `count` experts of largest phi (all of a smaller pool), ties by lowest index."""

    count: int

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ConfigError(f"the number of experts to select must be at least 1, got {self.count}")

    def __call__(self, phi: Tensor, gain: Tensor, cost: Tensor, empty_value: float | Tensor) -> Tensor:
        """Return the mask."""
        order = phi.sort(dim=1, descending=True, stable=True).indices[:, : self.count]
        return torch.zeros_like(phi, dtype=torch.bool).scatter_(1, order, True)


MOST_EXPERTS = 10_000


STOPS: dict[str, Callable[[float], Stop]] = {
    "literal": AdaptiveStop,
    "exclude_trigger": ExclusiveStop,
    "abs": MagnitudeStop,
}


def stop_rule(rule: str | int, mu: float) -> Stop:
    """A rule by name, Top-k by number, or "all"; raises `ConfigError` for an unknown name."""
    if rule == "all":
        return TopExperts(MOST_EXPERTS)
    if isinstance(rule, int):
        return TopExperts(rule)
    if rule not in STOPS:
        raise ConfigError(unknown("stop rule", rule, (*STOPS, "all")) + " A number k selects the top k experts.")
    return STOPS[rule](mu)


@dataclass(frozen=True)
class FixedValue:
    """v(empty) as a number; 0 is the usual convention and fits the paper's sentence about mu."""

    value: float = 0.0

    def __call__(self, mask: Tensor | None, num_classes: int) -> float | Tensor:
        """Return the number."""
        return self.value


@dataclass(frozen=True)
class ChanceValue:
    """v(empty) = -ln(classes in the label scope), the loss of the uniform predictor."""

    def __call__(self, mask: Tensor | None, num_classes: int) -> float | Tensor:
        """Return a number or a scalar tensor (no host synchronisation); mask: additive class mask or None."""
        return -math.log(num_classes) if mask is None else -(mask == 0).sum().log()


def empty_rule(value: str | float) -> EmptyValue:
    """v(empty) as "chance" or as a finite number."""
    if value == "chance":
        return ChanceValue()
    if isinstance(value, str) or not math.isfinite(value):
        raise ConfigError(f"empty_value must be a finite number or chance, got {value!r}")
    return FixedValue(float(value))


@dataclass(frozen=True)
class SoftmaxWeights:
    """softmax(phi / temperature) over the active experts; does not depend on v(empty)."""

    temperature: float = 1.0

    def __call__(self, phi: Tensor, active: Tensor) -> Tensor:
        """Return weights [batch, experts] that sum to 1."""
        return (phi / self.temperature).masked_fill(~active, -torch.inf).softmax(1)


def uniform_weights(phi: Tensor, active: Tensor) -> Tensor:
    """Equal weights over the active experts."""
    return active / active.sum(1, keepdim=True)


def top_weight(phi: Tensor, active: Tensor) -> Tensor:
    """All weight on the active expert of largest phi."""
    best = phi.masked_fill(~active, -torch.inf).argmax(1)
    return F.one_hot(best, phi.shape[1]).to(phi.dtype)


def no_weight(phi: Tensor, active: Tensor) -> Tensor:
    """The literal formula with a guard against 0/0: such samples train no expert."""
    return torch.zeros_like(phi)


FALLBACKS: dict[str, Callable[[float], Fallback]] = {
    "softmax": SoftmaxWeights,
    "uniform": lambda tau: uniform_weights,
    "top1": lambda tau: top_weight,
    "skip": lambda tau: no_weight,
}


@dataclass(frozen=True)
class UniformWeights:
    """Every active expert counts the same: routing without the Shapley weights."""

    def __call__(self, phi: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights [batch, experts], 0 outside `active`, and that no row [batch] used a fallback."""
        return uniform_weights(phi, active), torch.zeros_like(active[:, 0])


@dataclass(frozen=True)
class RoutingWeights:
    """w = max(phi, 0) / sum of max(phi, 0) over the active experts; `fallback` where that sum is 0.

    With v(empty) = 0 all values being nonpositive is the normal case early in training, and the paper's formula
    is then 0/0: the network would never start to learn.
    """

    fallback: Fallback = SoftmaxWeights()

    def __call__(self, phi: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights [batch, experts], 0 outside `active`, and which rows [batch] used the fallback."""
        positive = phi.relu() * active
        total = positive.sum(1, keepdim=True)
        empty = total <= 0
        weights = torch.where(empty, self.fallback(phi, active), positive / total.masked_fill(empty, 1.0))
        return weights, empty.squeeze(1)


WEIGHINGS: dict[str, Callable[[Fallback], Weigh]] = {
    "shapley": RoutingWeights,
    "uniform": lambda fallback: UniformWeights(),
}


@dataclass(frozen=True)
class FisherShapley:
    """Decision: FRES -> expert game -> Shapley values -> active experts, weights and teacher gates.

    Reads from `out` "features" [experts, batch, dim] and "expert_logits" [experts, batch, classes]; from `carry`
    fisher/experts as it was before this batch; from `ref` the mask of `scope` (the one of the loss) and
    "fisher_rows" (ids of the existing head rows, or None). `utility` says what an expert gains and costs (eqs. 3-5),
    the Shapley values follow (eq. 6). Adds phi, active (bool), weights and teacher_gates = softmax(phi / tau)
    [batch, experts], fallback (bool) [batch], and delta_sq [experts, batch, classes], the squared logit gradients
    that update the Fisher.
    """

    utility: Utility
    stop: Stop
    weigh: Weigh = RoutingWeights()
    empty_value: EmptyValue = FixedValue()
    tau: float = 1.0
    scope: str = "seen"
    needs: ClassVar[tuple[str, ...]] = ("fisher_rows",)

    def __post_init__(self) -> None:
        if not (math.isfinite(self.tau) and self.tau > 0):
            raise ConfigError(f"tau_r must be a finite number above 0, got {self.tau}")

    def __call__(self, out: Outputs, batch: Batch, ref: Mapping[str, Any], carry: Mapping[str, Tensors]) -> Outputs:
        """Return the names to add to `out`."""
        mask = ref[self.scope]
        logits = out["expert_logits"] if mask is None else out["expert_logits"] + mask
        loss, delta_sq = head_gradients(logits, batch.y)
        gain, cost = self.utility(loss.T, out["features"], delta_sq, carry["fisher"]["experts"], ref["fisher_rows"])
        empty_value = self.empty_value(mask, logits.shape[-1])
        phi = shapley_values(gain, cost, empty_value)
        active = self.stop(phi, gain, cost, empty_value)
        weights, fallback = self.weigh(phi, active)
        return {
            "phi": phi,
            "active": active,
            "weights": weights,
            "fallback": fallback,
            "teacher_gates": (phi / self.tau).softmax(1),
            "delta_sq": delta_sq,
        }


class Mix(Protocol):
    """Joins the experts' outputs by the gate alone."""

    def __call__(self, expert_logits: Tensor, router_logits: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return scores [batch, classes].

        expert_logits [experts, batch, classes]; router_logits [batch, experts], already divided by the gate's
        temperature; mask: additive class mask, applied here because the two mixtures differ in when.
        """
        ...


@dataclass(frozen=True)
class MixLogits:
    """Weighted sum of logits over the `top` experts of the gate, whose probabilities are renormalised."""

    top: int = 2

    def __post_init__(self) -> None:
        _check_top(self.top)

    def __call__(self, expert_logits: Tensor, router_logits: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return scores [batch, classes]."""
        # Masked after mixing: a gate that underflows to 0 times -inf would be NaN.
        mixed = torch.einsum("kbc,bk->bc", expert_logits, top_gates(router_logits, self.top))
        return mixed if mask is None else mixed + mask


@dataclass(frozen=True)
class MixProbabilities:
    """Log of the weighted sum of class probabilities over the `top` experts, softmax inside the mask."""

    top: int = 2

    def __post_init__(self) -> None:
        _check_top(self.top)

    def __call__(self, expert_logits: Tensor, router_logits: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return scores [batch, classes]."""
        log_probs = F.log_softmax(expert_logits if mask is None else expert_logits + mask, -1)
        log_gates = top_gates(router_logits, self.top).log()
        return (log_probs + log_gates.T.unsqueeze(-1)).logsumexp(0)


MIXES: dict[str, Callable[[int], Mix]] = {"logits": MixLogits, "probabilities": MixProbabilities}


def top_gates(router_logits: Tensor, top: int) -> Tensor:
    """softmax over the `top` largest router logits of each row, 0 elsewhere; ties by lowest index."""
    if top >= router_logits.shape[1]:
        return router_logits.softmax(1)
    # Ranks by comparison, not by a stable sort, which ONNX cannot express.
    mine, other = router_logits.unsqueeze(2), router_logits.unsqueeze(1)
    earlier = torch.ones(mine.shape[1], mine.shape[1], dtype=torch.bool, device=mine.device).tril(-1)
    rank = ((other > mine) | ((other == mine) & earlier)).sum(2)
    return router_logits.masked_fill(rank >= top, -torch.inf).softmax(1)


def _check_top(top: int) -> None:
    if top < 1:
        raise ConfigError(f"inference_experts must be at least 1, got {top}")
