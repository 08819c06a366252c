"""How much a client's fusion looks at each shared prompt, over its training."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedloom.core.batches import Batch
from fedloom.core.context import Context, Outputs
from fedloom.core.tree import Tensors
from fedloom.local.parts import Ref


@dataclass(frozen=True)
class AttentionMass:
    """Mean over examples of the output "attention" [1 + n] without its first entry, the client's own prompt.

    ref["prompts"]: the shared prompts [n, ...], which say how many there are. Closed: {"mean": [n]}, zeros without a
    batch.
    """

    needs = ("prompts",)

    def init(self, ref: Ref, ctx: Context) -> Tensors:
        """Zeros."""
        count, device = len(ref["prompts"]), ctx.net.forward.device
        return {"sum": torch.zeros(count, device=device), "visits": torch.zeros((), device=device)}

    def update(self, value: Tensors, out: Outputs, batch: Batch, ref: Ref) -> Tensors:
        """Add the batch."""
        return {
            "sum": value["sum"] + len(batch.y) * out["attention"][1:].float(),
            "visits": value["visits"] + len(batch.y),
        }

    def close_epoch(self, value: Tensors) -> Tensors:
        """The sum goes on."""
        return value

    def close(self, value: Tensors) -> Tensors:
        """The mean."""
        return {"mean": (value["sum"] / value["visits"].clamp(min=1)).cpu()}
