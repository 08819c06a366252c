"""Prototypes: means of a vector per class or per domain, merged over clients by number of examples."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedloom.core.errors import PayloadError
from fedloom.core.payload import is_finite
from fedloom.merge.sources import labels


@torch.no_grad()
def merge_prototypes(
    sums: Sequence[Tensor], counts: Sequence[Tensor], old: Tensor, *, who: Sequence[object] | None = None
) -> tuple[Tensor, Tensor]:
    """Prototype of class c = sum_i s_i[c] / sum_i n_i[c]; a class without examples keeps its old prototype.

    sums: per client [classes, dim], sums of features per class. counts: per client [classes], numbers of examples;
    not negative, integer or floating. old: [classes, dim].
    Returns the prototypes in the dtype of `old`, and the total counts [classes] in float64. Sums of a class without
    examples are not used. Raises `PayloadError` naming the client.
    Source: Tan et al. 2022, "FedProto", eq. 6. Differs: weighted by examples, so it equals the mean of the features
    of all clients together; the paper also divides by the number of clients that hold the class.
    """
    if len(sums) != len(counts):
        raise PayloadError(f"{len(sums)} sums of features but {len(counts)} counts")
    total = torch.zeros(old.shape, dtype=torch.float64, device=old.device)
    count = torch.zeros(old.shape[:1], dtype=torch.float64, device=old.device)
    for value, number, label in zip(sums, counts, labels(len(sums), who), strict=True):
        _check(value, number, old, label)
        held = number > 0
        total[held] += value[held].double()
        count += number.double()
    means = total / count.clamp(min=torch.finfo(torch.float64).tiny).unsqueeze(1)
    return torch.where((count > 0).unsqueeze(1), means.to(old.dtype), old), count


@torch.no_grad()
def merge_signatures(
    signatures: Sequence[Tensor],
    counts: Sequence[Tensor],
    old: Tensor,
    valid: Tensor,
    mu: float,
    *,
    who: Sequence[object] | None = None,
) -> tuple[Tensor, Tensor]:
    """p_k <- mu p_k + (1 - mu) sum_i n_ik V_ik / sum_i n_ik per domain k, and which domains have a prototype now.

    signatures: per client V_i [domains, channels]. counts: per client n_i [domains], examples; 0 where the client has
    no signature of the domain, whose row is then not read. old: p [domains, channels]; valid: bool [domains], where p
    holds anything. A domain without a prototype starts at its first mean, one that nobody sent keeps what it has.
    Where all V and p lie on the simplex, so does the result. Raises `PayloadError` naming the client.
    Source: Lin et al., "Domain Sensitive Federated Learning with Fisher-Informed Pruning" (FEDFIP, CVPR 2026), the
    structure prototypes; that they never start at zeros is a decision.
    """
    sums = [
        torch.where(n[:, None] > 0, n[:, None].double() * v, 0) if v.shape[:1] == n.shape else v
        for v, n in zip(signatures, counts, strict=True)
    ]
    mean, total = merge_prototypes(sums, counts, old, who=who)
    sent = total > 0
    moved = torch.where(valid[:, None], ema(old, mean, mu), mean)
    return torch.where(sent[:, None], moved, old), valid | sent


def ema(old: Tensor, new: Tensor, mu: float) -> Tensor:
    """mu * old + (1 - mu) * new; exact for mu = 0 and mu = 1."""
    return torch.lerp(new, old, mu)


def _check(value: Tensor, number: Tensor, old: Tensor, label: str) -> None:
    if value.shape != old.shape or number.shape != old.shape[:1]:
        raise PayloadError(
            f"{label}: prototype sums {tuple(value.shape)} and counts {tuple(number.shape)} do not fit the server's "
            f"{tuple(old.shape)}"
        )
    if not is_finite(number) or bool((number < 0).any()):
        raise PayloadError(f"{label}: prototype counts must be finite and not negative, got {number.tolist()}")
    if not is_finite(value[number > 0]):
        raise PayloadError(f"{label}: prototype sums hold NaN or infinite values")
