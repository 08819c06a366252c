"""Policies for buffers, batch-norm statistics above all.

A policy maps (replies, old buffers) to new buffers. "local" statistics (FedBN, Li et al. 2021) need none: a method
that keeps them on the clients does not upload them, and a missing name keeps the server's value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from fedloom.core.errors import PayloadError, pick
from fedloom.core.method import Reply
from fedloom.core.payload import is_finite
from fedloom.core.tree import Tensors
from fedloom.merge.mean import replies_mean, reply_trees, weighted_mean
from fedloom.merge.parts import Selected
from fedloom.merge.sources import Source, blame, sources

MEAN, VAR = "running_mean", "running_var"


class BufferPolicy(Protocol):
    """(replies, old) -> new buffers; uniform: every client counts the same; field: where replies hold them."""

    def __call__(
        self, replies: Sequence[Reply], old: Tensors, *, uniform: bool = False, field: str = "buffers"
    ) -> Mapping[str, Tensor]:
        """Merge the buffers of the replies."""
        ...


def mean_buffers(
    replies: Sequence[Reply], old: Tensors, *, uniform: bool = False, field: str = "buffers"
) -> dict[str, Tensor]:
    """Like weights: means of means and of variances; counters are rounded to the nearest integer."""
    return replies_mean(replies, field, old, uniform=uniform)


def frozen_buffers(
    replies: Sequence[Reply], old: Tensors, *, uniform: bool = False, field: str = "buffers"
) -> dict[str, Tensor]:
    """The server keeps its own, whatever the clients send and however they count."""
    return dict(old)


def pooled_buffers(
    replies: Sequence[Reply], old: Tensors, *, uniform: bool = False, field: str = "buffers"
) -> dict[str, Tensor]:
    """Statistics of all clients' data taken together; see `pooled_moments`."""
    trees, weights, who = reply_trees(replies, field, uniform)
    return pooled_moments(trees, weights, old, who=who)


BUFFER_POLICIES: Mapping[str, BufferPolicy] = {
    "mean": mean_buffers,
    "pooled": pooled_buffers,
    "frozen": frozen_buffers,
}


def buffer_policy(name: str) -> BufferPolicy:
    """The policy of that name; `ConfigError` with the closest match when there is none."""
    return pick("buffer policy", name, BUFFER_POLICIES)


@torch.no_grad()
def pooled_moments(
    trees: Sequence[Tensors], weights: Sequence[float], old: Tensors, *, who: Sequence[object] | None = None
) -> dict[str, Tensor]:
    """Merge pairs `*running_mean`, `*running_var` by the law of total variance, everything else by the mean.

    m = sum_i q_i m_i and v = sum_i q_i (v_i + (m_i - m)^2) with q_i = w_i / sum(w): the variance between clients is
    kept, which a mean of variances loses. Variances are taken as they come (torch's running variance is unbiased
    and mixed over batches). A client that has one of a pair without the other raises `PayloadError`.
    """
    clients = sources(trees, weights, old, who)
    pairs = {n: f"{n.removesuffix(MEAN)}{VAR}" for n in old if n.endswith(MEAN)}
    pairs = {mean: var for mean, var in pairs.items() if var in old}
    others = {name: old[name] for name in old if name not in pairs and name not in pairs.values()}
    merged = weighted_mean([Selected(tree, others) for tree in trees], weights, others, who=who)
    for mean, var in pairs.items():
        owners = [client for client in clients if mean in client.names or var in client.names]
        merged[mean], merged[var] = _pool(mean, var, old, owners) if owners else (old[mean], old[var])
    return {name: merged[name] for name in old}


def _pool(mean: str, var: str, old: Tensors, owners: Sequence[Source]) -> tuple[Tensor, Tensor]:
    old_mean, old_var = old[mean], old[var]
    total = sum(client.weight for client in owners)
    # moments about the first client's mean: about zero, a large common mean would cancel away the variance
    centre = first = second = torch.zeros_like(old_mean, dtype=torch.float64)
    for i, client in enumerate(owners):
        if not {mean, var} <= client.names:
            raise PayloadError(f"{client.label} sent only one of '{mean}' and '{var}'; pooled buffers need both")
        m, v = client.read_like(mean, old_mean).double(), client.read_like(var, old_var).double()
        centre = m if i == 0 else centre
        first = first + client.weight * (m - centre)
        second = second + client.weight * (v + (m - centre) ** 2)
    shift = first / total
    pooled_mean, pooled_var = centre + shift, second / total - shift**2
    for name, merged in ((mean, pooled_mean), (var, pooled_var)):
        if not is_finite(merged):
            raise blame(name, owners)
    return pooled_mean.to(old_mean.dtype), pooled_var.clamp_(min=0).to(old_var.dtype)
