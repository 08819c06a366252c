"""Cross-entropy with a label scope."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from fedloom.core.batches import Batch
from fedloom.core.context import Outputs
from fedloom.core.errors import ConfigError
from fedloom.core.tree import Tensors
from fedloom.local.parts import Carried, Ref

SCOPES = ("seen", "current", "all")


@dataclass(frozen=True)
class CrossEntropy:
    """Mean cross-entropy over the batch, with the softmax taken over the classes of `scope`.

    scope: "seen" (every class that has arrived), "current" (only those of the client's task, the trick of the
    LANDER family: old rows then get no gradient) or "all" (the full width, arrived or not).
    """

    scope: str = "seen"
    weight: float = 1.0

    def __post_init__(self) -> None:
        if self.scope not in SCOPES:
            raise ConfigError(f"label scope must be one of {', '.join(SCOPES)}, got '{self.scope}'")

    def __call__(self, params: Tensors, out: Outputs, batch: Batch, ref: Ref, carry: Carried) -> Tensor:
        """Return weight * mean_b -log softmax(logits)[y]."""
        mask = ref[self.scope]
        logits = out["logits"] if mask is None else out["logits"] + mask
        loss = F.cross_entropy(logits, batch.y)
        return loss if self.weight == 1.0 else self.weight * loss
