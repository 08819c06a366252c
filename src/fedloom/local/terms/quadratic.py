"""A quadratic penalty for leaving a point, weighed parameter by parameter."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.core.batches import Batch
from fedloom.core.context import Outputs
from fedloom.core.errors import ConfigError
from fedloom.core.tree import Tensors
from fedloom.local.parts import Carried, Ref


@dataclass(frozen=True)
class QuadraticPenalty:
    """(weight / 2) * sum_i F_i (theta_i - theta*_i)^2, so the gradient is weight * F * (theta - theta*).

    importance, centre: keys of `ref` with the trees F and theta*, of the parameters' shapes and on their device.
    Parameters that one of the two does not name are free; where none is left the penalty is 0.
    Source: Kirkpatrick et al., "Overcoming catastrophic forgetting in neural networks" (PNAS 2017), eq. (3).
    """

    weight: float
    importance: str = "fisher"
    centre: str = "centre"

    def __post_init__(self) -> None:
        if not (math.isfinite(self.weight) and self.weight >= 0):
            raise ConfigError(f"the weight of a penalty must be a finite number of at least 0, got {self.weight}")

    @property
    def needs(self) -> tuple[str, ...]:
        """The two trees."""
        return (self.importance, self.centre)

    def __call__(self, params: Tensors, out: Outputs, batch: Batch, ref: Ref, carry: Carried) -> Tensor:
        """Return the scalar; it does not depend on the batch."""
        importance, centre = ref[self.importance], ref[self.centre]
        parts = []
        for name, param in params.items():
            if name in importance and name in centre:
                gap = param - centre[name]
                parts.append((gap * (importance[name] * gap.detach())).sum())
        # The factor F gap is held constant, which spares half of the backward pass: the gradient of this sum is F gap,
        # and its value twice the one that belongs to it.
        twice = torch.stack(parts).sum() if parts else torch.zeros(())
        return self.weight * (twice - 0.5 * twice.detach())
