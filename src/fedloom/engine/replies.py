"""What the loop reads off clients' answers before, or without, reading their tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedloom.engine.runtime import Done
from fedloom.engine.spool import Ref


def skeleton(ref: Ref) -> dict[str, dict[str, Tensor]]:
    """Shapes and dtypes of an upload, without its values."""
    trees: dict[str, dict[str, Tensor]] = {field: {} for field in ref.fields}
    for entry in ref.entries:
        trees[entry.field][entry.name] = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device="meta")
    return trees


def size_of(ref: Ref, rows: Mapping[tuple[str, str], int], seen: int) -> int:
    """Bytes of an upload; of tensors with class rows only the `seen` rows that travel."""
    total = 0
    for entry in ref.entries:
        dim = rows.get((entry.field, entry.name))
        grows = dim is not None and entry.shape[dim] > 0
        total += entry.nbytes // entry.shape[dim] * seen if grows and dim is not None else entry.nbytes
    return total


def means(accepted: Sequence[Done]) -> dict[str, float]:
    """Example-weighted means of the clients' metrics, as `train/<name>`; a client without one is left out."""
    sums: dict[str, tuple[float, float]] = {}
    for answer in accepted:
        for name, value in answer.metrics.items():
            total, weight = sums.get(name, (0.0, 0.0))
            sums[name] = (total + answer.weight * value, weight + answer.weight)
    found = {f"train/{name}": total / weight for name, (total, weight) in sums.items() if weight}
    return {name: value for name, value in found.items() if value - value == 0}
