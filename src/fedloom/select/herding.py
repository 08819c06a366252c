"""Which examples of a class to keep, so that their mean stays near the mean of all."""

from __future__ import annotations

import torch
from torch import Tensor


def herd(features: Tensor, count: int) -> Tensor:
    """Pick examples greedily: the k-th brings the mean of the first k picks nearest to the mean of all features.

    features [n, d]: of one class, finite, of unit length in iCaRL (normalise them before). Returns int64
    [min(count, n)]: positions, the best first, none twice. The first pick is the example nearest to the mean, the picks
    for a smaller count begin those for a larger one, and of equally good examples the one of lowest position is taken.
    Distances are computed in float64.
    Source: Rebuffi et al., "iCaRL: Incremental Classifier and Representation Learning" (CVPR 2017), algorithm 4.
    Differs, as its authors' code does: means are not scaled to unit length again.
    """
    rows = features.detach().double()
    picks: list[int] = []
    taken = torch.zeros_like(rows[:, 0])  # inf where picked already
    mean = rows.mean(0)
    total = torch.zeros_like(mean)
    for k in range(1, min(count, len(rows)) + 1):
        gaps = (mean - (total + rows) / k).square().sum(1) + taken
        pick = int(gaps.argmin())
        picks.append(pick)
        taken[pick] = torch.inf
        total = total + rows[pick]
    return torch.tensor(picks, dtype=torch.int64)
