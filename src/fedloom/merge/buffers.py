"""Policies for buffers, batch-norm statistics above all.

A policy maps (replies, old buffers) to new buffers. "local" statistics (FedBN, Li et al. 2021) need none: a method
that keeps them on the clients does not upload them, and a missing name keeps the server's value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from fedloom.core.errors import ConfigError, PayloadError, unknown
from fedloom.core.method import Reply
from fedloom.core.payload import is_finite
from fedloom.core.tree import Tensors
from fedloom.merge.mean import replies_mean, reply_trees, weighted_mean
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
    if name not in BUFFER_POLICIES:
        raise ConfigError(unknown("buffer policy", name, BUFFER_POLICIES))
    return BUFFER_POLICIES[name]


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
    means = {name for name in old if name.endswith(MEAN) and f"{name.removesuffix(MEAN)}{VAR}" in old}
    pairs = {name: f"{name.removesuffix(MEAN)}{VAR}" for name in means}
    paired = pairs.keys() | set(pairs.values())
    kept = [client for client in clients if client.names - paired]
    rest = [{name: client.tree for name in client.names - paired} for client in kept]
    lazy = [_Without(client.tree, names) for client, names in zip(kept, rest, strict=True)]
    others = {name: old[name] for name in old if name not in paired}
    merged = weighted_mean(lazy, [c.weight for c in kept], others, who=[c.label for c in kept])
    for mean, var in pairs.items():
        merged[mean], merged[var] = _pool(mean, var, old[mean], old[var], clients)
    return {name: merged[name] for name in old}
