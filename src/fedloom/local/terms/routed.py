"""Cross-entropy of routed experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from fedloom.core.batches import Batch
from fedloom.core.context import Outputs
from fedloom.core.errors import ConfigError
from fedloom.core.tree import Tensors
from fedloom.local.parts import Carried, Ref
from fedloom.local.terms.cross_entropy import SCOPES


@dataclass(frozen=True)
class RoutedCrossEntropy:
    """1/B sum_b sum_k w_bk CE(expert k, sample b), softmax over the classes of `scope`.

    Reads from `out` "expert_logits" [experts, batch, classes] and "weights" [batch, experts], which are constants;
    an expert of weight 0 gets no gradient. Source: FedFMX (arXiv 2606.28835), eq. (8).
    """

    scope: str = "seen"

    def __post_init__(self) -> None:
        if self.scope not in SCOPES:
            raise ConfigError(f"label scope must be one of {', '.join(SCOPES)}, got '{self.scope}'")

    def __call__(self, params: Tensors, out: Outputs, batch: Batch, ref: Ref, carry: Carried) -> Tensor:
        """Return the scalar."""
        mask = ref[self.scope]
        logits = out["expert_logits"] if mask is None else out["expert_logits"] + mask
        experts, count, _ = logits.shape
        labels = batch.y.expand(experts, -1).reshape(-1)
        losses = F.cross_entropy(logits.flatten(0, 1), labels, reduction="none").view(experts, count)
        return (out["weights"].detach().T * losses).sum() / count
