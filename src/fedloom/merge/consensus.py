"""A step that no client opposes: the shortest mean of the clients' directions.

Source: Z. Wang et al., "Federated Learning with Domain Shift Eraser" (CVPR 2025, arXiv 2503.13063), whose server solves
it tensor by tensor; the point is the one of Désidéri, "Multiple-gradient descent algorithm" (2012).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedloom.core.payload import is_finite
from fedloom.core.tree import Tensors
from fedloom.merge.accumulate import CHUNK
from fedloom.merge.sources import Source, blame, sources


@torch.no_grad()
def consensus(trees: Sequence[Tensors], old: Tensors, *, who: Sequence[object] | None = None) -> dict[str, Tensor]:
    """w <- w + mean_i(|d_i|) * sum_i lambda_i u_i, tensor by tensor, with d_i = w_i - w and u_i = d_i / |d_i|.

    lambda is `shortest_mean` of the u_i. trees: as in `mean.weighted_mean`; clients count the same. A client whose
    tensor has not moved has no direction, so it takes no part in lambda, and counts with |d_i| = 0 in the mean. A
    tensor that nobody has or moved is the old object. Arithmetic is in float64; the tensors of all clients that have
    one name are in memory at once.
    Returns the names of `old`, dtype in = dtype out; a single client gives exactly its values but for those that are
    below the float64 precision of the old ones. Raises `PayloadError` naming client and tensor for names, shapes,
    dtypes and values that do not fit.
    """
    clients = sources(trees, [1.0] * len(trees), old, who)
    return {name: _moved(name, old[name], [c for c in clients if name in c.names]) for name in old}


def shortest_mean(gram: Tensor) -> Tensor:
    """lambda of the simplex that minimises |sum_i lambda_i u_i|^2; float64 [n], of the Gram matrix [n, n] of the u_i.

    Found by non-negative least squares: x >= 0 that minimises x^T G x + (sum_i x_i - 1)^2 fulfils the conditions of the
    simplex's problem up to scale, so lambda = x / sum(x). Where several lambda have the same mean it is one of them.
    """
    from scipy.optimize import nnls

    values, vectors = torch.linalg.eigh(gram.double())
    root = values.clamp(min=0).sqrt()[:, None] * vectors.T  # root^T root = G
    system = torch.cat([root, torch.ones(1, len(gram), dtype=torch.float64)])
    target = torch.zeros(len(system), dtype=torch.float64)
    target[-1] = 1
    found = torch.from_numpy(nnls(system.numpy(), target.numpy(), maxiter=30 * len(gram))[0])
    return found / found.sum()


def _moved(name: str, old: Tensor, owners: Sequence[Source]) -> Tensor:
    if not owners or not old.numel():
        return old
    values, start = [client.read_like(name, old).reshape(-1) for client in owners], old.reshape(-1)
    gram = torch.zeros(len(values), len(values), dtype=torch.float64, device=old.device)
    for first in range(0, len(start), CHUNK):
        part = slice(first, first + CHUNK)
        moves = torch.stack([value[part] for value in values]).double() - start[part].double()
        gram += moves @ moves.T
    if not is_finite(gram):
        raise blame(name, owners)
    norms = gram.diagonal().sqrt().cpu()
    moving = norms > 0
    if not bool(moving.any()):
        return old
    lengths = norms[moving]
    shares = shortest_mean(gram.cpu()[moving][:, moving] / torch.outer(lengths, lengths))
    factors = torch.zeros_like(norms).masked_scatter_(moving, shares * (norms.mean() / lengths))
    total = start.double()
    for value, factor in zip(values, factors.tolist(), strict=True):
        total = total.add(value.double() - start.double(), alpha=factor)
    merged = total.to(old.dtype).view(old.shape)
    if not is_finite(merged):
        raise blame(name, owners)
    return merged
