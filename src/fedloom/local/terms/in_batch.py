"""The contrastive loss between the pictures of a batch and the sentences about their classes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.core.batches import Batch
from fedloom.core.context import Outputs
from fedloom.core.tree import Tensors
from fedloom.local.parts import Carried, Ref


@dataclass(frozen=True)
class InBatchContrast:
    """(CE(S, i) + CE(S^T, i)) / 2 with S_ij = exp(ls) f_i . t_{y_j}: picture i belongs to the sentence of picture i.

    "logits" [batch, classes] of the network hold exp(ls) f . t of every class that occurs in the batch. Other
    pictures of i's class count as negatives: of two equal rows each costs at least log 2. One picture alone costs 0.
    Source: Radford et al., "Learning Transferable Visual Models From Natural Language Supervision" (ICML 2021),
    figure 3.
    """

    def __call__(self, params: Tensors, out: Outputs, batch: Batch, ref: Ref, carry: Carried) -> Tensor:
        """Return the scalar."""
        scores = out["logits"][:, batch.y]
        own = torch.arange(len(scores), device=scores.device)
        return (F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own)) / 2
