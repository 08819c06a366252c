"""Scores of channels from clients to the federation's mask: what a client measures, and what the server makes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.core import Batches, Context, Payload, Reply
from fedloom.local.gate_fisher import Importance, gate_fisher
from fedloom.merge.mean import replies_mean
from fedloom.merge.prototypes import merge_signatures
from fedloom.select.channels import SCHEDULES, THRESHOLDS, Reactivation, Refresh, Threshold, restrict, signature

Combine = Callable[[Sequence[Tensor], Sequence[int]], Tensor]


def raw(scores: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
    """sum_k (n_k / n) F_k of scores [C] of domains with n_k examples: domains and clients of large loss count more."""
    total = max(1, sum(counts))
    return torch.stack([score * (count / total) for score, count in zip(scores, counts, strict=True)]).sum(0)


def client_norm(scores: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
    """`raw` scaled to the sum 1, so that every client counts by its examples alone; zeros stay zeros."""
    mixed = raw(scores, counts)
    return mixed / mixed.sum() if mixed.sum() > 0 else mixed


def equal_domains(scores: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
    """The plain mean over the client's domains, whatever their sizes."""
    return torch.stack(list(scores)).mean(0)


COMBINES: dict[str, Combine] = {"raw": raw, "client_norm": client_norm, "equal_domains": equal_domains}


@dataclass(frozen=True)
class DomainScores:
    """importance: one of `IMPORTANCES`. samples: most examples per domain. combine: domains' scores -> the client's."""

    importance: Importance
    samples: int = 512
    combine: Combine = raw

    def measure(self, model: Payload, data: Batches, mask: Tensor, ctx: Context) -> dict[int, Tensor]:
        """F_k [C] in float64 of every domain of the client, for the dense model with gates at bool mask [C]."""
        ctx.bind(model["params"], model["buffers"])
        given = {"importance": self.importance, "samples": self.samples}
        return {k: gate_fisher(ctx, part, mask.float(), **given) for k, part in data.by_domain().items()}  # type: ignore[arg-type]

    def mixed(self, found: Mapping[int, Tensor], data: Batches) -> Tensor:
        """The client's scores, float32 [C], of those of its domains; it has one at least."""
        counts = {k: len(part) for k, part in data.by_domain().items()}
        return self.combine([found[k] for k in found], [counts[k] for k in found]).float()


@dataclass(frozen=True)
class ReopenRule:
    """Which channels outside the mask a client opens for itself: `choose`, one of `REACTIVATIONS`, on a scale phi."""

    choose: Reactivation
    phi: float = 1.0
    react_max: float = 0.1

    def __call__(self, scores: Tensor, mask: Tensor, sizes: Sequence[int]) -> Tensor:
        """bool [C] of the client's scores [C], the mask [C] and the sizes of the groups."""
        return self.choose(scores, mask, sizes, self.phi, self.react_max)


@dataclass(frozen=True)
class Prototypes:
    """Server field "prototypes": {"values": float32 [K, C]}, zeros where a domain has none yet.

    momentum: mu of the moving average. Uploads: "signatures" {domain id: V float32 [channels of the mask]} and
    "domains" {"counts": int64 [K]}.
    """

    momentum: float = 0.5

    def uploads(self, scores: Mapping[int, Tensor], data: Batches, mask: Tensor, domains: int) -> Payload:
        """Signatures of the domains whose scores say anything, and examples per domain."""
        ids = data.domains if data.domains is not None else torch.zeros(0, dtype=torch.int64)
        made = {k: signature(score, mask) for k, score in scores.items()}
        sent = {str(k): v[mask].float() for k, (v, valid) in made.items() if bool(valid)}
        return {"signatures": sent, "domains": {"counts": torch.bincount(ids, minlength=domains)}}

    def merged(self, replies: Sequence[Reply], old: Tensor, mask: Tensor) -> Tensor:
        """The prototypes after a round with this mask."""
        signatures, counts = [], []
        for reply in replies:
            found = reply.up["signatures"]
            values, number = torch.zeros_like(old), torch.zeros(len(old), dtype=torch.int64)
            for name in found:
                values[int(name), mask] = found[name]
                number[int(name)] = reply.up["domains"]["counts"][int(name)]
            signatures.append(values)
            counts.append(number)
        who = [reply.client for reply in replies]
        return merge_signatures(signatures, counts, old, old.sum(1) > 0, self.momentum, who=who)[0]

    def under(self, values: Tensor, mask: Tensor) -> Tensor:
        """Prototypes that exist, restricted to a new mask."""
        return torch.where(values.sum(1, keepdim=True) > 0, restrict(values, mask), values)


@dataclass(frozen=True)
class MaskRule:
    """When and how the server makes a new mask of the clients' scores.

    Server fields "mask": {"channels": bool [C]} and "scores": {"channels": float32 [C]}, the moving average of the
    clients' weighted mean, with memory `ema`. cost: per channel [C], for thresholds that read it.
    """

    keep: float
    threshold: Threshold
    min_share: float = 0.05
    refresh: Refresh = SCHEDULES["every"]
    ema: float = 0.0

    @property
    def costly(self) -> bool:
        """Whether the threshold reads what channels cost."""
        return self.threshold is THRESHOLDS["flops_aware"]

    def initial(self, count: int) -> Payload:
        """Every channel, and no scores."""
        return {"mask": {"channels": torch.ones(count, dtype=torch.bool)}, "scores": {"channels": torch.zeros(count)}}

    def measured(self, ctx: Context) -> bool:
        """Whether the scores of this round are of use: there is something to prune, and the warm-up ends or is over."""
        return self.keep < 1 and not self.refresh.warm(ctx.global_round + 1)

    def updated(
        self, server: Payload, replies: Sequence[Reply], sizes: Sequence[int], cost: Tensor | None, ctx: Context
    ) -> Payload:
        """The two fields after a round in which clients have sent "scores"."""
        old = server["scores"]["channels"]
        mean = replies_mean(replies, "scores", server["scores"])["channels"]
        scores = torch.lerp(mean, old, self.ema) if bool(old.any()) else mean
        mask = server["mask"]["channels"]
        if self.refresh.due(ctx.global_round, ctx.total_rounds):
            mask = self.threshold(scores, sizes, self.keep, cost, min_share=self.min_share)
        return {"mask": {"channels": mask}, "scores": {"channels": scores}}
