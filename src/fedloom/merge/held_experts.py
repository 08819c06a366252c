"""Networks of which every client holds some experts: what of their tensors that is, and how these parts are merged.

Held are, of every layer, some experts and their gate rows (bool [L, E]), and everything that is neither. An expert is
whole tensors of its own, or positions along one dimension of a tensor that all experts of its layer share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedloom.core.errors import PayloadError
from fedloom.core.moe import MoELayer
from fedloom.core.payload import is_finite
from fedloom.core.tree import Tensors
from fedloom.merge.accumulate import Accumulator
from fedloom.merge.mean import weighted_mean
from fedloom.merge.parts import Selected
from fedloom.merge.sources import Source, blame, sources


class Shared(NamedTuple):
    """A tensor that all experts of a layer share. expert: int64, whose every position along `dim` is."""

    layer: int
    dim: int
    expert: Tensor

    def positions(self, held: Tensor) -> Tensor:
        """int64: the positions of the experts that are held."""
        return held[self.layer][self.expert].nonzero().flatten()

    def along(self, values: Tensor, like: Tensor) -> Tensor:
        """A vector over positions as a tensor that broadcasts to those of `like`."""
        return values.view(*(-1 if dim == self.dim else 1 for dim in range(like.dim())))


class Layout(NamedTuple):
    """Where the experts of a network lie. shared: by name of the tensor. own: name -> layer and expert whose it is."""

    shared: Mapping[str, Shared]
    own: Mapping[str, tuple[int, int]]

    def cut(self, tree: Tensors, held: Tensor) -> dict[str, Tensor]:
        """The part of a tree of whole tensors that is held."""
        part = {}
        for name, tensor in tree.items():
            if name in self.shared:
                there = self.shared[name]
                part[name] = tensor.index_select(there.dim, there.positions(held).to(tensor.device))
            elif name not in self.own or bool(held[self.own[name]]):
                part[name] = tensor
        return part

    def filled(self, part: Tensors, held: Tensor, like: Tensors, *, below: bool = False) -> dict[str, Tensor]:
        """Whole tensors of the names and shapes of `like`, with zeros for what is not held.

        below: rows of shared tensors get a value under every one that is held instead, as befits a score.
        """
        whole = dict(part)
        for name, tensor in like.items():
            if name in self.shared and name in part:
                there, mine = self.shared[name], part[name].cpu()
                blank = torch.full(tensor.shape, float(mine.min()) - 1 if below else 0.0, dtype=mine.dtype)
                whole[name] = blank.index_copy_(there.dim, there.positions(held), mine)
            elif name in self.own and not bool(held[self.own[name]]):
                whole[name] = torch.zeros_like(tensor, device="cpu")
        return whole


def layout(layers: Sequence[MoELayer], tree: Tensors) -> Layout:
    """Where the experts of the layers and their gate rows lie in a tree of whole tensors; only its shapes are read."""
    shared: dict[str, Shared] = {}
    own: dict[str, tuple[int, int]] = {}
    for at, layer in enumerate(layers):
        shared |= {n: Shared(at, 0, torch.arange(layer.num_experts)) for n in layer.gate if n in tree}
        for e, expert in enumerate(layer.experts):
            for name, index in expert:
                if not index:
                    own[name] = (at, e)
                elif name in tree:
                    dim = len(index) - 1
                    there = shared.setdefault(name, Shared(at, dim, torch.zeros(tree[name].shape[dim]).long()))
                    there.expert[index[dim]] = e
    return Layout(shared, own)


@torch.no_grad()
def held_means(
    trees: Sequence[Tensors],
    weights: Sequence[float],
    old: Tensors,
    held: Sequence[Tensor],
    use: Sequence[Tensor],
    layers: Sequence[MoELayer],
    *,
    who: Sequence[object] | None = None,
) -> dict[str, Tensor]:
    """Merge what clients hold: experts and gate rows by `use`, everything else by `weights`.

    trees: the parts of the clients, possibly lazy. held: bool [L, E] of each. use: [L, E] of each, not negative: what
    the client counts for in an expert that it holds. What counts for nobody keeps its old value; that of one holder is
    copied. Returns the names of `old`, dtype in = dtype out. Raises `PayloadError` naming client and tensor as
    `weighted_mean` does.
    """
    where = layout(layers, old)
    counts = [torch.where(mine, of.double(), 0.0) for mine, of in zip(held, use, strict=True)]
    clients = sources(trees, [float(of.sum()) for of in counts], old, who)
    rest = [name for name in old if name not in where.shared and name not in where.own]
    new = weighted_mean([Selected(tree, rest) for tree in trees], weights, {n: old[n] for n in rest}, who=who)
    accumulator = Accumulator()
    for name in old:
        if name in where.own:
            at = where.own[name]
            taken = [float(of[at]) for of in counts]
            new |= weighted_mean([Selected(tree, [name]) for tree in trees], taken, {name: old[name]}, who=who)
        elif name in where.shared:
            owners = [client for client in clients if name in client.names]
            new[name] = _shared_mean(name, old[name], owners, where.shared[name], held, counts, accumulator)
    return {name: new[name] for name in old}


def _shared_mean(
    name: str,
    old: Tensor,
    owners: Sequence[Source],
    there: Shared,
    held: Sequence[Tensor],
    counts: Sequence[Tensor],
    accumulator: Accumulator,
) -> Tensor:
    if not owners:
        return old
    accumulator.start(old)
    total, used = accumulator.view(old), torch.zeros(len(there.expert), dtype=torch.float64)
    for client in owners:
        at = there.positions(held[client.position])
        value, taken = client.read(name), counts[client.position][there.layer][there.expert[at]]
        client.check_dtype(name, value, old)
        shape = tuple(len(at) if dim == there.dim else size for dim, size in enumerate(old.shape))
        if tuple(value.shape) != shape:
            raise PayloadError(f"{client.label}: '{name}' has shape {tuple(value.shape)}, what it holds has {shape}")
        total.index_add_(there.dim, at, value.double() * there.along(taken, old))
        used.index_add_(0, at, taken)
    merged = accumulator.ratio(there.along(used, old), old)
    if not is_finite(merged):
        raise blame(name, owners)
    return merged
