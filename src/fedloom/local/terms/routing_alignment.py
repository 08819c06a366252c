"""A pull of the gates' distributions to a consensus, expert by expert.

Source: Fang et al., FedAlign-MoE (arXiv 2603.21276), whose clients add a divergence from the global distribution with a
weight per expert. Reads "routing", "selected" and "token_mask" from `out` (see `fedloom.core.moe`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fedloom.core.batches import Batch
from fedloom.core.context import Outputs
from fedloom.core.errors import ConfigError
from fedloom.core.tree import Tensors
from fedloom.local.parts import Carried, Ref

LEAST = -80.0  # of log-probabilities: e^-80 is 0 to fp32, and 0 ln 0 is then 0
BELOW_ONE = 1 - 1e-6

Divergence = Callable[[Tensor, Tensor], Tensor]
Direction = Callable[[Divergence, Tensor, Tensor], Tensor]
Values = tuple[Tensor, Tensor, Tensor]
Level = Callable[[Tensor, Tensor, Tensor], Values]


def generalized(log_a: Tensor, log_b: Tensor) -> Tensor:
    """a ln(a/b) - a + b: at least 0, and 0 for a = b alone; over all experts the sum is KL(a || b)."""
    return log_a.exp() * (log_a - log_b) - log_a.exp() + log_b.exp()


def pointwise(log_a: Tensor, log_b: Tensor) -> Tensor:
    """a ln(a/b), the literal reading; it may be negative, and then rewards leaving the consensus."""
    return log_a.exp() * (log_a - log_b)


def bernoulli(log_a: Tensor, log_b: Tensor) -> Tensor:
    """a ln(a/b) + (1-a) ln((1-a)/(1-b)): whether the expert is chosen, on its own."""
    a, b = log_a.exp().clamp(max=BELOW_ONE), log_b.exp().clamp(max=BELOW_ONE)
    return a * (log_a - log_b) + (1 - a) * (torch.log1p(-a) - torch.log1p(-b))


class Form(NamedTuple):
    """A divergence of two probabilities; renormalised: of both divided by their sums over the masked experts."""

    between: Divergence
    renormalised: bool = False


FORMS = {
    "generalized": Form(generalized),
    "pointwise": Form(pointwise),
    "bernoulli": Form(bernoulli),
    "renorm_topk": Form(generalized, renormalised=True),
}


def forward(between: Divergence, local: Tensor, goal: Tensor) -> Tensor:
    """D(local, goal)."""
    return between(local, goal)


def reverse(between: Divergence, local: Tensor, goal: Tensor) -> Tensor:
    """D(goal, local)."""
    return between(goal, local)


def js(between: Divergence, local: Tensor, goal: Tensor) -> Tensor:
    """The mean of D(local, m) and D(goal, m), with m the mean of both."""
    middle = torch.logaddexp(local, goal) - math.log(2)
    return 0.5 * (between(local, middle) + between(goal, middle))


DIRECTIONS: dict[str, Direction] = {"forward": forward, "reverse": reverse, "js": js}


def by_token(log_probs: Tensor, selected: Tensor, real: Tensor) -> Values:
    """Every token is compared on its own."""
    return log_probs, selected, real


def by_batch(log_probs: Tensor, selected: Tensor, real: Tensor) -> Values:
    """The mean distribution of the batch's tokens is compared: tokens may differ as long as their mean does not."""
    mean = (log_probs.exp() * real[:, None]).sum(1, keepdim=True) / real.sum().clamp(min=1)
    log_mean = mean.clamp(min=math.exp(LEAST)).log()
    return log_mean, largest(log_mean, _chosen(selected)), real.amax(0, keepdim=True)


LEVELS: dict[str, Level] = {"token": by_token, "batch": by_batch}


def largest(values: Tensor, k: Tensor | int) -> Tensor:
    """Bool [L, T, E]: the k largest of each row, ties to the lower index; k an int or [L, 1, 1]."""
    ranks: Tensor = values.detach().argsort(dim=2, descending=True, stable=True).argsort(dim=2)
    return ranks < k


def _chosen(selected: Tensor) -> Tensor:
    """The number of experts that each layer's gate chooses per token [L, 1, 1]."""
    return selected.sum(2, keepdim=True).amax(1, keepdim=True)


@dataclass(frozen=True)
class RoutingAlignment:
    """weight * mean_l mean_t sum_e alpha(e) D(p(e|t), p_g(e)) [e in mask], over tokens t that are no padding.

    ref["consensus"]: "routing" p_g and "alpha", both [L, E]; with the mask they are constants. form, direction: of D.
    level: what is compared, a token or the batch. mask: whose largest experts count, "local" (those of p), "global"
    (of p_g) or "union". top: how many, None for as many as the gate chooses, 0 for all of them. layers: "mean" or "sum"
    over the layers.
    """

    weight: float
    form: Form = FORMS["generalized"]
    direction: Direction = forward
    level: Level = by_token
    mask: str = "local"
    top: int | None = None
    layers: str = "mean"

    needs: ClassVar[tuple[str, ...]] = ("consensus",)

    def __post_init__(self) -> None:
        if not (math.isfinite(self.weight) and self.weight >= 0):
            raise ConfigError(f"the weight of the routing alignment must be finite and at least 0, got {self.weight}")

    def __call__(self, params: Tensors, out: Outputs, batch: Batch, ref: Ref, carry: Carried) -> Tensor:
        """Return the scalar."""
        goal = ref["consensus"]["routing"].log().unsqueeze(1)
        real = out["token_mask"].to(goal.dtype)
        log_probs, selected, real = self.level(out["routing"].clamp(min=LEAST), out["selected"], real)
        mask = self._mask(log_probs, goal, selected)
        if self.form.renormalised:
            log_probs, goal = _renormalised(log_probs, mask), _renormalised(goal.expand_as(log_probs), mask)
        found = self.direction(self.form.between, log_probs, goal)
        per_token = (ref["consensus"]["alpha"].unsqueeze(1) * found * mask).sum(2)
        per_layer = (per_token * real).sum(1) / real.sum().clamp(min=1)
        total: Tensor = per_layer.mean() if self.layers == "mean" else per_layer.sum()
        return self.weight * total

    def _mask(self, log_probs: Tensor, goal: Tensor, selected: Tensor) -> Tensor:
        if self.top == 0:
            return torch.ones_like(selected)
        k = _chosen(selected) if self.top is None else self.top
        local = selected if self.top is None else largest(log_probs, k)
        if self.mask == "local":
            return local
        common = largest(goal, k).expand_as(local)
        return common | local if self.mask == "union" else common


def _renormalised(log_probs: Tensor, mask: Tensor) -> Tensor:
    found: Tensor = log_probs - log_probs.masked_fill(~mask, LEAST).logsumexp(2, keepdim=True)
    return found.clamp(min=LEAST)
