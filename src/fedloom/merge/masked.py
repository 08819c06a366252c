"""Means over the clients that own an entry: head rows, channels, experts.

v = sum_i(n_i m_i v_i) / sum_i(n_i m_i) with masks m_i of zeros and ones; an entry that nobody owns keeps its old
value. What a client's tensor holds where it owns nothing is never used, not even when it is NaN.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedloom.core.errors import PayloadError
from fedloom.core.payload import is_finite
from fedloom.core.tree import Tensors
from fedloom.merge.accumulate import Accumulator
from fedloom.merge.sources import Source, blame, sources


@torch.no_grad()
def masked_mean(
    trees: Sequence[Tensors],
    masks: Sequence[Mapping[str, Tensor]],
    weights: Sequence[float],
    old: Tensors,
    *,
    who: Sequence[object] | None = None,
) -> dict[str, Tensor]:
    """Weighted mean of every entry over the clients whose mask is true there.

    trees: as in `mean.weighted_mean`; tensors have the full shape, a missing name is owned by nobody on that
    client. masks: per client, name -> boolean tensor that broadcasts to the tensor's shape, or a vector with one
    entry per row (dimension 0); a name without a mask is owned whole.
    Returns the names of `old`, dtype in = dtype out; a tensor without any owner is the old object.
    Raises `PayloadError` naming client and tensor for weights, names, shapes, dtypes, masks and values that do
    not fit.
    """
    if len(masks) != len(trees):
        raise PayloadError(f"{len(trees)} trees but {len(masks)} maps of masks")
    clients = sources(trees, weights, old, who)
    accumulator = Accumulator()
    merged = {}
    for name in old:
        owners = [client for client in clients if name in client.names]
        merged[name] = _masked(name, old[name], owners, masks, accumulator) if owners else old[name]
    return merged


def _masked(
    name: str,
    old: Tensor,
    owners: Sequence[Source],
    masks: Sequence[Mapping[str, Tensor]],
    accumulator: Accumulator,
) -> Tensor:
    accumulator.start(old)
    owned = torch.zeros((1,) * old.dim(), dtype=torch.float64, device=old.device)
    for client in owners:
        value, mask = client.read_like(name, old), masks[client.position].get(name)
        if mask is None:
            accumulator.add(value, client.weight)
            owned = owned + client.weight
            continue
        mask = _broadcastable(mask, old, client, name)
        accumulator.add(torch.where(mask, value, torch.zeros_like(value)), client.weight)
        owned = owned + client.weight * mask
    if not bool((owned > 0).any()):
        return old
    merged = accumulator.ratio(owned, old)
    if not is_finite(merged):
        raise blame(name, owners)
    return merged


def _broadcastable(mask: Tensor, old: Tensor, client: Source, name: str) -> Tensor:
    if mask.dtype != torch.bool:
        raise PayloadError(f"{client.label}: the mask of '{name}' must be boolean, got {mask.dtype}")
    shaped = mask
    if mask.dim() == 1 and old.dim() > 1:
        shaped = mask.reshape(-1, *(1,) * (old.dim() - 1))
    fits = shaped.dim() == old.dim() and all(m in (1, n) for m, n in zip(shaped.shape, old.shape, strict=True))
    if not fits or (mask.dim() == 1 and len(mask) != old.shape[0]):
        raise PayloadError(
            f"{client.label}: the mask of '{name}' has shape {tuple(mask.shape)}, which does not fit {tuple(old.shape)}"
        )
    return shaped.to(old.device)
