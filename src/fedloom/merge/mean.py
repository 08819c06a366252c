"""The weighted mean of trees. Pure: nothing that goes in is altered.

The order is names outside, clients inside, with one float64 accumulator of one tensor: at the peak there are the
old tree, the new one, one tensor of one reply and the accumulator, whatever the number of clients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from fedloom.core.errors import ConfigError, PayloadError, unknown
from fedloom.core.method import Reply
from fedloom.core.payload import is_finite
from fedloom.core.tree import Tensors
from fedloom.merge.accumulate import Accumulator
from fedloom.merge.sources import Source, blame, sources

RULES = ("mean", "max", "sum", "first", "frozen")
Rules = Mapping[str, str]


@torch.no_grad()
def weighted_mean(
    trees: Sequence[Tensors],
    weights: Sequence[float],
    old: Tensors,
    *,
    rules: Rules | None = None,
    who: Sequence[object] | None = None,
) -> dict[str, Tensor]:
    """Merge the trees of several clients name by name: sum(w_i * v_i) / sum(w_i) over the clients that have it.

    trees: one per client, possibly lazy; a missing name means "not mine". weights: finite, not negative; clients
    with weight 0 are dropped. old: the server's tree, which fixes names, shapes and dtypes; a name that nobody
    has keeps its old tensor, the same object.
    rules: name pattern (`fnmatch`, the first that matches counts) -> rule for tensors that a mean does not suit:
    "mean" (the default: integers are rounded to nearest, half to even, exact below 2**53; booleans take the
    weighted majority and a tie keeps the old value), "max", "sum" (unweighted), "first" (of the first client that
    has it), "frozen" (old).
    who: client ids for messages.
    Returns the names of `old`, dtype in = dtype out. Equal fp32 values give exactly those values, whatever the
    weights. Raises `PayloadError` naming client and tensor for weights, names, shapes, dtypes and values that do
    not fit, `ConfigError` for an unknown rule.
    Source: McMahan et al. 2017, "Communication-Efficient Learning", algorithm 1.
    """
    rules = rules or {}
    for pattern, rule in rules.items():
        if rule not in RULES:
            raise ConfigError(unknown(f"merge rule for '{pattern}':", rule, RULES))
    clients = sources(trees, weights, old, who)
    # a lazy tree would read its tensors to tell their sizes
    accumulator = Accumulator(max((t.numel() for t in old.values()), default=0) if type(old) is dict else 0)
    return {
        name: _merge(name, old[name], [c for c in clients if name in c.names], _rule(name, rules), accumulator)
        for name in old
    }


def replies_mean(
    replies: Sequence[Reply], field: str, old: Tensors, *, uniform: bool = False, rules: Rules | None = None
) -> dict[str, Tensor]:
    """`weighted_mean` over one field of the replies; a reply without the field has nothing of it.

    uniform: every reply with a positive weight counts the same.
    """
    trees, weights, who = reply_trees(replies, field, uniform)
    return weighted_mean(trees, weights, old, rules=rules, who=who)


def reply_trees(
    replies: Sequence[Reply], field: str, uniform: bool = False
) -> tuple[list[Tensors], list[float], list[object]]:
    """Trees, weights and client ids of one field, as the merges take them; nothing is read.

    A reply without the field gives an empty tree. uniform: positive weights become 1.
    """
    trees: list[Tensors] = []
    weights: list[float] = []
    who: list[object] = []
    for reply in replies:
        trees.append(reply.up.get(field, {}))
        weights.append(1.0 if uniform and 0 < reply.weight < math.inf else reply.weight)
        who.append(reply.client)
    return trees, weights, who


def _rule(name: str, rules: Rules) -> str:
    return next((rule for pattern, rule in rules.items() if fnmatchcase(name, pattern)), "mean")


def _merge(name: str, old: Tensor, owners: Sequence[Source], rule: str, accumulator: Accumulator) -> Tensor:
    if not owners or rule == "frozen":
        return old
    if rule == "first" or len(owners) == 1:
        merged = owners[0].read_like(name, old).clone(memory_format=torch.contiguous_format)
    elif rule == "max":
        merged = _max(name, old, owners)
    elif rule == "sum":
        merged = _sum(name, old, owners, accumulator)
    else:
        merged = _mean(name, old, owners, accumulator)
    if not is_finite(merged):
        raise blame(name, owners)
    return merged


def _mean(name: str, old: Tensor, owners: Sequence[Source], accumulator: Accumulator) -> Tensor:
    # plain dicts hold all their tensors anyway, so these may be walked side by side, which is faster
    if old.dtype != torch.bool and all(type(client.tree) is dict for client in owners):
        values = [client.read_like(name, old) for client in owners]
        return accumulator.mean_of(values, [client.weight for client in owners], old)
    accumulator.start(old)
    for client in owners:
        accumulator.add(client.read_like(name, old), client.weight)
    total = sum(client.weight for client in owners)
    if old.dtype == torch.bool:
        share = 2 * accumulator.view(old)
        return torch.where(share == total, old, share > total)
    return accumulator.mean(total, old)


def _max(name: str, old: Tensor, owners: Sequence[Source]) -> Tensor:
    merged = owners[0].read_like(name, old).clone(memory_format=torch.contiguous_format)
    for client in owners[1:]:
        torch.maximum(merged, client.read_like(name, old), out=merged)
    return merged


def _sum(name: str, old: Tensor, owners: Sequence[Source], accumulator: Accumulator) -> Tensor:
    if old.dtype == torch.bool:
        raise PayloadError(f"merge rule 'sum' does not suit '{name}', which is boolean; use mean, max or first")
    if old.is_floating_point() or old.is_complex():
        accumulator.start(old)
        for client in owners:
            accumulator.add(client.read_like(name, old), 1.0)
        return accumulator.mean(1.0, old)
    total = torch.zeros(old.shape, dtype=torch.int64, device=old.device)
    for client in owners:
        total += client.read_like(name, old)
    bounds = torch.iinfo(old.dtype)
    if total.numel() and (int(total.max()) > bounds.max or int(total.min()) < bounds.min):
        raise PayloadError(f"the sum of '{name}' over clients does not fit {old.dtype}")
    return total.to(old.dtype)
