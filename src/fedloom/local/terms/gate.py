"""Terms of a gate over experts: load balance and distillation from a routing that knows the label.

Both read "router_logits" [batch, experts] from `out`, already divided by the gate's temperature; p is their softmax.
Source: FedFMX (arXiv 2606.28835), eqs. (9)-(10), whose gradients reach the backbone, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.core.batches import Batch
from fedloom.core.context import Outputs
from fedloom.core.errors import ConfigError
from fedloom.core.tree import Tensors
from fedloom.local.parts import Carried, Ref


def sample_balance(router_logits: Tensor) -> Tensor:
    """mean_b sum_k p_bk ln p_bk, in [-ln K, 0]: the paper's form. Every sample may still pick the same experts."""
    log_probs = F.log_softmax(router_logits, 1)
    return (log_probs.exp() * log_probs).sum(1).mean()


def batch_balance(router_logits: Tensor) -> Tensor:
    """sum_k pbar_k ln pbar_k of the batch mean pbar, in [-ln K, 0]: balances the load over the batch."""
    log_mean = F.log_softmax(router_logits, 1).logsumexp(0) - math.log(len(router_logits))
    return (log_mean.exp() * log_mean).sum()


def switch_balance(router_logits: Tensor) -> Tensor:
    """K sum_k f_k pbar_k, f_k the share of samples whose largest gate is k (a constant); 1 when balanced.

    Source: Fedus et al., "Switch Transformers" (JMLR 2022), eq. (4), without its factor alpha.
    """
    experts = router_logits.shape[1]
    share = F.one_hot(router_logits.detach().argmax(1), experts).to(router_logits.dtype).mean(0)
    return experts * torch.dot(share, router_logits.softmax(1).mean(0))


BALANCES: dict[str, Callable[[Tensor], Tensor]] = {
    "sample": sample_balance,
    "batch": batch_balance,
    "switch": switch_balance,
}


def gate_probabilities(out: Outputs) -> dict[str, Tensor]:
    """p as the routing of one layer, "gate" [1, batch, experts]: what `RoutingStability` and `RoutingAverage` read."""
    return {"gate": out["router_logits"].softmax(1)[None]}


@dataclass(frozen=True)
class GateBalance:
    """weight * form(router logits): pushes the gate towards using all experts."""

    weight: float
    form: Callable[[Tensor], Tensor] = sample_balance

    def __post_init__(self) -> None:
        _check_weight("beta", self.weight)

    def __call__(self, params: Tensors, out: Outputs, batch: Batch, ref: Ref, carry: Carried) -> Tensor:
        """Return the scalar."""
        return self.weight * self.form(out["router_logits"])


@dataclass(frozen=True)
class GateDistillation:
    """weight * mean_b KL(q_b || p_b), with q = out["teacher_gates"] [batch, experts] a constant."""

    weight: float

    def __post_init__(self) -> None:
        _check_weight("gamma", self.weight)

    def __call__(self, params: Tensors, out: Outputs, batch: Batch, ref: Ref, carry: Carried) -> Tensor:
        """Return the scalar."""
        log_gates = F.log_softmax(out["router_logits"], 1)
        return self.weight * F.kl_div(log_gates, out["teacher_gates"].detach(), reduction="batchmean")


def _check_weight(name: str, weight: float) -> None:
    if not (math.isfinite(weight) and weight >= 0):
        raise ConfigError(f"{name} must be a finite number of at least 0, got {weight}")
