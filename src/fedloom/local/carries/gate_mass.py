"""How much each expert of a vision-language network was used: sums of its gates."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedloom.core.batches import Batch
from fedloom.core.context import Context, Outputs
from fedloom.core.tree import Tensors
from fedloom.local.parts import Ref


@dataclass(frozen=True)
class GateMass:
    """Sums "image" and "text" [layers, experts] of the gates of all pictures, and of all sentences of all batches.

    A gate is 0 where an expert was not chosen; where k = 1 this counts choices. Modalities without adapters are absent.
    """

    def init(self, ref: Ref, ctx: Context) -> Tensors:
        """Nothing yet: the first batch tells the shapes."""
        return {}

    def update(self, value: Tensors, out: Outputs, batch: Batch, ref: Ref) -> Tensors:
        """Add the batch."""
        found = {name: out[f"{name}_gates"].float().sum(1) for name in ("image", "text") if f"{name}_gates" in out}
        return {name: mass + value.get(name, torch.zeros_like(mass)) for name, mass in found.items()}

    def close_epoch(self, value: Tensors) -> Tensors:
        """Totals go on."""
        return value

    def close(self, value: Tensors) -> Tensors:
        """The totals."""
        return value
