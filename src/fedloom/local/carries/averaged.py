"""The mean of one column of an output of the network over a client's training."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedloom.core.batches import Batch
from fedloom.core.context import Context, Outputs
from fedloom.core.tree import Tensors
from fedloom.local.parts import Ref


@dataclass(frozen=True)
class Averaged:
    """Running sum of out[output][:, column] over examples; `mean` reads the closed value."""

    output: str
    column: int = 0

    def init(self, ref: Ref, ctx: Context) -> Tensors:
        """Zeros."""
        device = ctx.net.forward.device
        return {"sum": torch.zeros((), device=device), "visits": torch.zeros((), device=device)}

    def update(self, value: Tensors, out: Outputs, batch: Batch, ref: Ref) -> Tensors:
        """Add the batch."""
        column = out[self.output][:, self.column]
        return {"sum": value["sum"] + column.float().sum(), "visits": value["visits"] + len(column)}

    def close_epoch(self, value: Tensors) -> Tensors:
        """The sum goes on."""
        return value

    def close(self, value: Tensors) -> Tensors:
        """Sum and number of examples."""
        return value


def mean(value: Tensors) -> float:
    """The mean over all examples; 0 without any."""
    return float(value["sum"] / value["visits"].clamp(min=1))
