"""Which experts a task has used most, to be left alone by the next ones."""

from __future__ import annotations

import torch
from torch import Tensor


def most_used(usage: Tensor, frozen: Tensor, count: int) -> Tensor:
    """The frozen experts, bool [layers, experts], and of the others in each layer the `count` of largest usage.

    usage: [layers, experts], of equal ones the first counts. One expert of a layer always stays free.
    Source: Yu et al., "Boosting Continual Learning of Vision-Language Models via Mixture-of-Experts Adapters" (CVPR
    2024), the incremental activate-freeze strategy.
    """
    order = usage.masked_fill(frozen, -torch.inf).argsort(dim=1, descending=True, stable=True)
    room = ((~frozen).sum(1, keepdim=True) - 1).clamp(max=count)
    chosen = torch.arange(usage.shape[1]) < room
    return frozen | torch.zeros_like(frozen).scatter(1, order, chosen)
