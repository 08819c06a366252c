"""A pull of the routers' mean choice to what it was before.

A divergence is of distributions p and q [..., E], p the current one, and gives [...].
Source: Guo et al., "Fed-Duet" (ICLR 2026): KL of the routing to its running average at the end of the task before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedloom.core.batches import Batch
from fedloom.core.context import Outputs
from fedloom.core.errors import pick
from fedloom.core.tree import Tensors
from fedloom.local.parts import Carried, Ref
from fedloom.local.tower_routing import LEAST, Routing, check_weight, nothing, probabilities

Divergence = Callable[[Tensor, Tensor], Tensor]


def kl(p: Tensor, q: Tensor) -> Tensor:
    """sum_e p ln(p / q) - p + q, the divergence of distributions; no summand is negative, whatever the rounding."""
    p, q = p.clamp(min=LEAST), q.clamp(min=LEAST)
    return (p * (p / q).log() - p + q).clamp(min=0).sum(-1)


def reverse_kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(q || p)."""
    return kl(q, p)


def js(p: Tensor, q: Tensor) -> Tensor:
    """The mean of KL(p || m) and KL(q || m), with m the mean of both; at most ln 2."""
    middle = (p + q) / 2
    return (kl(p, middle) + kl(q, middle)) / 2


def weighted_l2(p: Tensor, q: Tensor) -> Tensor:
    """sum_e max(p, q) (p - q)^2 with the weight a constant: the form of Fed-Duet's release of 2025."""
    return (torch.maximum(p, q).detach() * (p - q).square()).sum(-1)


DIVERGENCES: dict[str, Divergence] = {"kl": kl, "reverse_kl": reverse_kl, "js": js, "weighted_l2": weighted_l2}


@dataclass(frozen=True)
class RoutingStability:
    """weight * mean over all layers of form(batch mean of the routing, target), a key of `DIVERGENCES`.

    routing: reads the outputs, by default those of two towers, "image" and "text". ref["routing_target"]: its names ->
    [layers, E], a constant; an empty one, that of the first task, gives 0, and so do routers that are held still.
    """

    form: str
    weight: float
    routing: Routing = probabilities

    needs: ClassVar[tuple[str, ...]] = ("routing_target",)

    def __post_init__(self) -> None:
        pick("stability", self.form, DIVERGENCES)
        check_weight("gamma", self.weight)

    def __call__(self, params: Tensors, out: Outputs, batch: Batch, ref: Ref, carry: Carried) -> Tensor:
        """Return the scalar."""
        target = ref["routing_target"]
        routed = self.routing(out) if target else {}
        if not any(probs.requires_grad for probs in routed.values()):
            return nothing(out)
        current = {name: probs.mean(1) for name, probs in routed.items() if name in target}
        form = DIVERGENCES[self.form]
        found = [form(mean, target[name].detach()) for name, mean in current.items()]
        return self.weight * torch.cat(found).mean() if found else nothing(out)
