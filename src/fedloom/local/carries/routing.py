"""Which experts a client's samples used: totals on the device, read once at the end."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.core.batches import Batch
from fedloom.core.context import Context, Outputs
from fedloom.core.tree import Tensors
from fedloom.local.parts import Ref


@dataclass(frozen=True)
class RoutingUse:
    """Counts over all batches: "active" [experts], and scalars "entropy" (of the gate, nats), "fallback" (samples
    whose Shapley values gave no weights), "visits" (samples)."""

    experts: int

    def init(self, ref: Ref, ctx: Context) -> Tensors:
        """Zeros."""
        device = ctx.net.forward.device
        scalars = {name: torch.zeros(1, device=device) for name in ("entropy", "fallback", "visits")}
        return {"active": torch.zeros(self.experts, device=device), **scalars}

    def update(self, value: Tensors, out: Outputs, batch: Batch, ref: Ref) -> Tensors:
        """Add the batch."""
        log_gates = F.log_softmax(out["router_logits"].float(), 1)
        return {
            "active": value["active"] + out["active"].sum(0),
            "entropy": value["entropy"] - (log_gates.exp() * log_gates).sum(),
            "fallback": value["fallback"] + out["fallback"].sum(),
            "visits": value["visits"] + len(batch.y),
        }

    def close_epoch(self, value: Tensors) -> Tensors:
        """Totals go on."""
        return value

    def close(self, value: Tensors) -> Tensors:
        """The totals."""
        return value


def usage(value: Tensors) -> Tensor:
    """Fraction of samples with each expert active [experts]; 0 where there was no sample."""
    return value["active"] / value["visits"].clamp(min=1)


def routing_metrics(value: Tensors) -> dict[str, float]:
    """Mean number of active experts, mean gate entropy (nats), share of fallback weights, use of each expert."""
    visits = value["visits"].clamp(min=1)
    used = usage(value)
    parts = [used.sum(0, keepdim=True), value["entropy"] / visits, value["fallback"] / visits, used]
    names = ["active_experts", "gate_entropy", "fallback_weights", *(f"expert_{k}_usage" for k in range(len(used)))]
    return dict(zip(names, torch.cat(parts).tolist(), strict=True))
