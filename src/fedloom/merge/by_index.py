"""Merging networks of different shapes: every client says which part of each tensor its own tensor is.

Serves compact networks (channels by index), width-scaled ones (the leading slice, as in HeteroFL, Diao et al.
2021) and head rows by global class id.
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

Index = Sequence[Tensor | None]
Selection = tuple[slice, ...] | tuple[Tensor, ...]


@torch.no_grad()
def indexed_mean(
    trees: Sequence[Tensors],
    indices: Sequence[Mapping[str, Index]] | None,
    weights: Sequence[float],
    old: Tensors,
    *,
    who: Sequence[object] | None = None,
) -> dict[str, Tensor]:
    """Weighted mean of every entry over the clients that hold it; an entry that nobody holds keeps its old value.

    trees: tensors of each client's own shapes; a missing name means "not mine". indices: per client, name -> for
    each dimension the int64 positions in the server's tensor, without repeats, or None for all of them; shorter
    sequences leave the remaining dimensions whole. The client's tensor is the outer product of these positions.
    Without indices (None, or a name that is absent) a tensor is the leading, top-left part.
    Returns the names of `old`, dtype in = dtype out. Raises `PayloadError` naming client and tensor for weights,
    names, dtypes, indices, shapes and values that do not fit.
    """
    if indices is not None and len(indices) != len(trees):
        raise PayloadError(f"{len(trees)} trees but {len(indices)} maps of indices")
    clients = sources(trees, weights, old, who)
    accumulator = Accumulator()
    merged = {}
    for name in old:
        owners = [client for client in clients if name in client.names]
        merged[name] = _indexed(name, old[name], owners, indices, accumulator) if owners else old[name]
    return merged


def take_part(tensor: Tensor, index: Index) -> Tensor:
    """The part of a server tensor that `index` names; what `indexed_mean` puts back."""
    for dim, positions in enumerate(index):
        if positions is not None:
            tensor = tensor.index_select(dim, positions.to(tensor.device))
    return tensor


def _indexed(
    name: str,
    old: Tensor,
    owners: Sequence[Source],
    indices: Sequence[Mapping[str, Index]] | None,
    accumulator: Accumulator,
) -> Tensor:
    accumulator.start(old)
    total = accumulator.view(old)
    owned = torch.zeros(old.shape, dtype=torch.float64, device=old.device)
    for client in owners:
        value = client.read(name)
        client.check_dtype(name, value, old)
        index = None if indices is None else indices[client.position].get(name)
        where = _leading(value, old, client, name) if index is None else _positions(index, value, old, client, name)
        total[where] += value.to(total.dtype) * client.weight
        owned[where] += client.weight
    merged = accumulator.ratio(owned, old)
    if not is_finite(merged):
        raise blame(name, owners)
    return merged


def _leading(value: Tensor, old: Tensor, client: Source, name: str) -> Selection:
    if value.dim() != old.dim() or any(n > m for n, m in zip(value.shape, old.shape, strict=True)):
        raise PayloadError(
            f"{client.label}: '{name}' has shape {tuple(value.shape)}, which is no part of {tuple(old.shape)}"
        )
    return tuple(slice(0, n) for n in value.shape)


def _positions(index: Index, value: Tensor, old: Tensor, client: Source, name: str) -> Selection:
    if len(index) > old.dim():
        raise PayloadError(f"{client.label}: the index of '{name}' has {len(index)} dimensions, not {old.dim()}")
    axes = []
    for dim, size in enumerate(old.shape):
        positions = index[dim] if dim < len(index) else None
        axes.append(torch.arange(size) if positions is None else positions)
        _check_axis(axes[-1], size, dim, client, name)
    shape = tuple(len(axis) for axis in axes)
    if tuple(value.shape) != shape:
        raise PayloadError(f"{client.label}: '{name}' has shape {tuple(value.shape)}, its index names {shape}")
    last = old.dim() - 1
    return tuple(axis.to(old.device).view(-1, *(1,) * (last - dim)) for dim, axis in enumerate(axes))


def _check_axis(positions: Tensor, size: int, dim: int, client: Source, name: str) -> None:
    what = f"{client.label}: the index of '{name}' along dimension {dim}"
    if positions.dtype != torch.int64 or positions.dim() != 1:
        raise PayloadError(f"{what} must be an int64 vector, got {positions.dtype} {tuple(positions.shape)}")
    if len(positions) and not 0 <= int(positions.min()) <= int(positions.max()) < size:
        raise PayloadError(f"{what} must lie in [0, {size}), got {positions.tolist()}")
    if len(set(positions.tolist())) != len(positions):
        raise PayloadError(f"{what} names a position twice: {positions.tolist()}")
