"""A mean for each client, in which the others count by how alike they are.

Source: Z. Wang et al., "Federated Learning with Domain Shift Eraser" (CVPR 2025, arXiv 2503.13063).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedloom.core.payload import is_finite
from fedloom.core.tree import Tensors
from fedloom.merge.sources import blame, sources

TINY = 1e-12


def cosines(vectors: Tensor) -> Tensor:
    """Cosines [n, n] of vectors [n, d]; a vector of zeros has the cosine 0 with every one, itself included."""
    units: Tensor = vectors / torch.linalg.vector_norm(vectors, dim=1, keepdim=True).clamp(min=TINY)
    return units @ units.T


@torch.no_grad()
def similar_means(
    trees: Sequence[Tensors], old: Tensors, tau: float, *, who: Sequence[object] | None = None
) -> list[dict[str, Tensor]]:
    """A tree for each client i: sum_j a_ij v_j with a_i = softmax_j(cos(v_i, v_j) / tau), tensor by tensor.

    i itself is among the j. trees: as in `mean.weighted_mean`; clients count the same. tau: above 0; a large one gives
    everybody the plain mean. A name that a client lacks is the old object in its tree. Arithmetic is in float64.
    Returns the names of `old` for every tree, dtype in = dtype out. Raises `PayloadError` naming client and tensor for
    names, shapes, dtypes and values that do not fit.
    """
    clients = sources(trees, [1.0] * len(trees), old, who)
    found = [dict(old) for _ in trees]
    for name, tensor in old.items():
        owners = [client for client in clients if name in client.names]
        if not owners:
            continue
        values = torch.stack([client.read_like(name, tensor).reshape(-1).double() for client in owners])
        means = torch.softmax(cosines(values) / tau, 1) @ values
        if not is_finite(means):
            raise blame(name, owners)
        for client, mean in zip(owners, means, strict=True):
            found[client.position][name] = mean.to(tensor.dtype).view(tensor.shape)
    return found
