"""The proximal term of FedProx."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedloom.core import tree
from fedloom.core.batches import Batch
from fedloom.core.context import Outputs
from fedloom.core.errors import ConfigError
from fedloom.core.tree import Tensors
from fedloom.local.parts import Carried, Ref


@dataclass(frozen=True)
class Proximal:
    """(mu / 2) * ||w - w_anchor||^2 over the parameters of the anchor: the downloaded model, or a part of it.

    The norm is squared, so the gradient is mu * (w - w_anchor). Source: Li et al., "Federated Optimization in
    Heterogeneous Networks" (MLSys 2020), eq. (2).
    """

    mu: float
    needs: ClassVar[tuple[str, ...]] = ("anchor",)

    def __post_init__(self) -> None:
        if not (math.isfinite(self.mu) and self.mu >= 0):
            raise ConfigError(f"mu must be a finite number of at least 0, got {self.mu}")

    def __call__(self, params: Tensors, out: Outputs, batch: Batch, ref: Ref, carry: Carried) -> Tensor:
        """Return the scalar; it does not depend on the batch."""
        anchor = ref["anchor"]
        return 0.5 * self.mu * tree.sq_norm({name: p - anchor[name] for name, p in params.items() if name in anchor})
