"""Means of stacked experts, each over the clients that used it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedloom.core.errors import PayloadError
from fedloom.core.payload import is_finite
from fedloom.core.tree import Tensors
from fedloom.merge.accumulate import Accumulator
from fedloom.merge.sources import Source, blame, labels, sources


@torch.no_grad()
def expertwise_mean(
    trees: Sequence[Tensors], usage: Sequence[Tensor], old: Tensors, *, who: Sequence[object] | None = None
) -> dict[str, Tensor]:
    """Merge tensors [experts, ...]: expert k is the mean over clients with weight usage_i[k].

    usage: per client a vector [experts] of how much it used each expert, such as the examples (or tokens) routed
    to it: counts, not fractions of the client's own examples. An expert that nobody used keeps its old slice; what
    a client's tensor holds for an expert that it did not use is never read into the result.
    Returns the names of `old`, dtype in = dtype out. Raises `PayloadError` naming the client for usage that is
    negative, not finite or of another length, and as `mean.weighted_mean` does.
    """
    if len(usage) != len(trees):
        raise PayloadError(f"{len(trees)} trees but {len(usage)} usage vectors")
    for vector, label in zip(usage, labels(len(usage), who), strict=True):
        _check_usage(vector, label)
    rows = [[float(u) for u in vector.tolist()] for vector in usage]
    clients = sources(trees, [sum(row) for row in rows], old, who)
    accumulator = Accumulator()
    merged = {}
    for name in old:
        owners = [client for client in clients if name in client.names]
        merged[name] = _expertwise(name, old[name], owners, rows, accumulator) if owners else old[name]
    return merged


def _check_usage(vector: Tensor, label: str) -> None:
    if vector.dim() != 1 or vector.dtype == torch.bool or vector.is_complex():
        raise PayloadError(f"{label}: usage must be a vector of numbers [experts], got shape {tuple(vector.shape)}")
    if not is_finite(vector) or bool((vector < 0).any()):
        raise PayloadError(f"{label}: usage must be finite and not negative, got {vector.tolist()}")


def _expertwise(
    name: str, old: Tensor, owners: Sequence[Source], rows: Sequence[Sequence[float]], accumulator: Accumulator
) -> Tensor:
    accumulator.start(old)
    total = accumulator.view(old)
    used = torch.zeros(old.shape[0] if old.dim() else 0, dtype=torch.float64)
    for client in owners:
        value, row = client.read_like(name, old), rows[client.position]
        if len(row) != len(used):
            raise PayloadError(
                f"{client.label}: usage of {len(row)} experts does not fit '{name}' of shape {tuple(old.shape)}"
            )
        for k, weight in enumerate(row):
            if weight > 0:
                total[k].add_(value[k], alpha=weight)
        used += torch.tensor(row, dtype=torch.float64)
    merged = accumulator.ratio(used.view(-1, *(1,) * (old.dim() - 1)).to(old.device), old)
    if not is_finite(merged):
        raise blame(name, owners)
    return merged
