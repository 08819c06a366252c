"""Cross-entropy of a client that holds some of the classes only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from fedloom.core.batches import Batch
from fedloom.core.context import Outputs
from fedloom.core.tree import Tensors
from fedloom.local.parts import Carried, Ref


@dataclass(frozen=True)
class HeldCrossEntropy:
    """Mean cross-entropy over the batch, in which the logits of the seen classes that the client lacks are `fill`.

    fill 0 is the published form: such a class stays in the softmax, with a logit that nothing moves, and draws the
    others above 0. fill -inf takes it out of the softmax. In both, no gradient reaches the class's row of the head.
    ref["held"]: bool [classes], on the run's device, true for the classes that the client has. Classes that have not
    arrived anywhere are never in the softmax.
    Source: Diao et al., "HeteroFL" (ICLR 2021), section 3, "masked cross-entropy".
    """

    fill: float = 0.0
    needs: ClassVar[tuple[str, ...]] = ("held",)

    def __call__(self, params: Tensors, out: Outputs, batch: Batch, ref: Ref, carry: Carried) -> Tensor:
        """Return mean_b -log softmax(filled logits)[y]."""
        logits = out["logits"].masked_fill(~ref["held"], self.fill)
        return F.cross_entropy(logits if ref["seen"] is None else logits + ref["seen"], batch.y)
