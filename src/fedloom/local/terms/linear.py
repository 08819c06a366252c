"""A linear term: a slope that tilts the loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.core.batches import Batch
from fedloom.core.context import Outputs
from fedloom.core.tree import Tensors
from fedloom.local.parts import Carried, Ref


@dataclass(frozen=True)
class LinearTerm:
    """-<s, w - w_anchor> over all parameters, the anchor being the downloaded model, so the gradient is -s everywhere.

    slope: key of `ref` with the tree s, of the parameters' names and shapes and on their device. Source: Acar et al.,
    "Federated Learning Based on Dynamic Regularization" (ICLR 2021), algorithm 1; there it is -<s, w>. The constant
    <s, w_anchor> that is added keeps the reported loss near that of the data, and has no gradient.
    """

    slope: str = "gradient"

    @property
    def needs(self) -> tuple[str, ...]:
        """The slope and the downloaded parameters."""
        return (self.slope, "anchor")

    def __call__(self, params: Tensors, out: Outputs, batch: Batch, ref: Ref, carry: Carried) -> Tensor:
        """Return the scalar; it does not depend on the batch."""
        slope, anchor = ref[self.slope], ref["anchor"]
        return -torch.stack([(slope[name] * (p - anchor[name])).sum() for name, p in params.items()]).sum()
