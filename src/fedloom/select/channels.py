"""From scores of channels to masks: what the federation keeps, what a client re-opens, and when masks change.

Scores, masks and costs are vectors [C]: the channel groups, of sizes c_1, c_2, ... (`sizes`), one after the other. True
in a mask means kept. Everything is deterministic: among equal scores the lowest index comes first.
Source: Lin et al., "Domain Sensitive Federated Learning with Fisher-Informed Pruning" (FEDFIP, CVPR 2026): the global
mask M_j = 1[F_j >= theta_rho], the private channels R_j = 1[F_j > phi] (1 - M_j) and the signature
V_j = F_j M_j / sum_j' F_j' M_j'. The paper leaves open on which scale layers are compared, how ties are broken, on
which scale phi lives and when masks change; the tables below hold the readings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fedloom.core.errors import ConfigError, PayloadError
from fedloom.core.tree import Tensors

MIN_SHARE = 0.05
Reactivation = Callable[[Tensor, Tensor, Sequence[int], float, float], Tensor]


class Threshold(Protocol):
    """Scores -> the mask of the channels that are kept."""

    def __call__(
        self, scores: Tensor, sizes: Sequence[int], keep: float, cost: Tensor | None = None, *, min_share: float = ...
    ) -> Tensor:
        """Return a bool mask [C].

        scores: [C], finite and not negative. keep: share in (0, 1] of the channels. cost: [C], positive (MACs of one
        channel, say); only some read it. min_share: of every group at least max(1, ceil(min_share c_g)) channels stay.
        round(keep C) channels are kept, or as many as the groups' least numbers add up to where that is more.
        Raises `ConfigError` for options and shapes, `PayloadError` for scores that do not fit.
        """
        ...


def group_mean(
    scores: Tensor, sizes: Sequence[int], keep: float, cost: Tensor | None = None, *, min_share: float = MIN_SHARE
) -> Tensor:
    """One threshold for all groups, on scores divided by the mean score of their group.

    Raw Fisher scores of layers differ by orders of magnitude, so that one threshold on them empties whole layers.
    """
    groups = _groups(scores, sizes)
    means = [group.mean() for group in groups]
    scaled = [group / mean if mean > 0 else group for group, mean in zip(groups, means, strict=True)]
    return _best(torch.cat(scaled), sizes, keep, min_share)


def raw_global(
    scores: Tensor, sizes: Sequence[int], keep: float, cost: Tensor | None = None, *, min_share: float = MIN_SHARE
) -> Tensor:
    """One threshold for all groups on the scores as they are: the formula taken literally."""
    return _best(torch.cat(_groups(scores, sizes)), sizes, keep, min_share)


def per_group(
    scores: Tensor, sizes: Sequence[int], keep: float, cost: Tensor | None = None, *, min_share: float = MIN_SHARE
) -> Tensor:
    """The ceil(keep c_g) best of every group: widths, and so operations, do not depend on the scores."""
    _check_shares(keep, min_share)
    least = _least(sizes, min_share)
    counts = [max(_ceil(keep * size), low) for size, low in zip(sizes, least, strict=True)]
    return torch.cat([_top(group, count) for group, count in zip(_groups(scores, sizes), counts, strict=True)])


def flops_aware(
    scores: Tensor, sizes: Sequence[int], keep: float, cost: Tensor | None = None, *, min_share: float = MIN_SHARE
) -> Tensor:
    """One threshold for all groups on raw score over cost, so that a channel stays for what it gives per operation.

    The scores are not divided by their group's mean first: early layers have large scores and many operations, and the
    cost is what makes up for it.
    """
    values = torch.cat(_groups(scores, sizes))
    if cost is None:
        raise ConfigError(
            "the threshold 'flops_aware' needs the cost of every channel, got None; pass MACs per channel"
        )
    if cost.shape != values.shape or not bool((cost.isfinite() & (cost > 0)).all()):
        raise ConfigError(
            f"the cost of channels must be {len(values)} finite numbers above 0, got {tuple(cost.shape)} from "
            f"{float(cost.min()) if cost.numel() else None}"
        )
    return _best(values / cost.to(values), sizes, keep, min_share)


THRESHOLDS: dict[str, Threshold] = {
    "group_mean": group_mean,
    "raw_global": raw_global,
    "per_group": per_group,
    "flops_aware": flops_aware,
}


def relative(scores: Tensor, mask: Tensor, sizes: Sequence[int], phi: float, react_max: float) -> Tensor:
    """Re-open j of group g where F_j > phi * mean of F over the kept channels of g.

    This and the other reactivations take the client's own scores [C] and the mask [C], and return a bool mask [C] of
    channels outside `mask`: in every group at most ceil(react_max c_g), the largest first, ties to the lowest index. A
    larger phi >= 0 never re-opens more; infinity none, and 0 with react_max = 1 every pruned channel whose score is
    positive. Raises `ConfigError` for options and shapes, `PayloadError` for scores that are not finite or negative.
    """
    _check_reactivation(phi, react_max)
    groups = _groups(scores, sizes)
    kept = torch.split(mask, list(sizes))
    means = [(g * m).sum() / m.sum().clamp(min=1) for g, m in zip(groups, kept, strict=True)]
    # Infinity times a mean of 0 is not a number, above which nothing lies, as it should be.
    above = torch.cat([group > phi * mean for group, mean in zip(groups, means, strict=True)])
    return _capped(groups, above & ~mask, react_max)


def raw(scores: Tensor, mask: Tensor, sizes: Sequence[int], phi: float, react_max: float) -> Tensor:
    """Re-open j where F_j > phi: the formula taken literally. The scale of F moves with the loss."""
    _check_reactivation(phi, react_max)
    groups = _groups(scores, sizes)
    return _capped(groups, (torch.cat(groups) > phi) & ~mask, react_max)


def share(scores: Tensor, mask: Tensor, sizes: Sequence[int], phi: float, react_max: float) -> Tensor:
    """Re-open j where F_j / sum of F over all channels > phi; a phi near 1 / C is the scale of an average channel."""
    _check_reactivation(phi, react_max)
    groups = _groups(scores, sizes)
    values = torch.cat(groups)
    total = values.sum()
    return _capped(groups, (values > (phi * total if total > 0 else torch.inf)) & ~mask, react_max)


def quantile(scores: Tensor, mask: Tensor, sizes: Sequence[int], phi: float, react_max: float) -> Tensor:
    """Re-open the pruned channels above the phi-quantile of their scores: round((1 - phi) n) of n, over all groups.

    Scores of 0 are never re-opened. phi of 1 and more re-opens none.
    """
    _check_reactivation(phi, react_max)
    groups = _groups(scores, sizes)
    values = torch.cat(groups).masked_fill(mask, -1.0)
    count = round(max(0.0, 1 - phi) * int((~mask).sum()))
    return _capped(groups, _top(values, count) & (values > 0), react_max)


REACTIVATIONS: dict[str, Reactivation] = {"relative": relative, "raw": raw, "share": share, "quantile": quantile}


def l1_scores(params: Tensors, writers: Sequence[Sequence[str]]) -> Tensor:
    """sum |w| over all weights that make channel j, float64 [C]; on a residual stream those of every layer that writes.

    params: tensors by name. writers: per group the names of the weights whose dimension 0 makes its channels.
    Source: Li et al., "Pruning Filters for Efficient ConvNets" (ICLR 2017), section 3.1.
    """
    rows = [[params[name].detach().double().abs().flatten(1).sum(1) for name in names] for names in writers]
    return torch.cat([torch.stack(of_group).sum(0) for of_group in rows])


def signature(fisher: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """V = F * M / sum(F * M) [..., C] on the simplex, 0 outside the mask, and whether it says anything, bool [...].

    fisher: [..., C], finite and not negative; float64 is advised, squared gradients being small. mask: bool [C].
    Uniform over the mask, and False, where the sum is 0. Differentiable in `fisher`; does not depend on its scale.
    """
    inside = torch.where(mask, fisher, 0)
    total = inside.sum(-1, keepdim=True)
    valid = total > 0
    uniform = mask.to(fisher.dtype) / mask.sum().clamp(min=1)
    return torch.where(valid, inside / torch.where(valid, total, 1), uniform), valid.squeeze(-1)


def restrict(prototypes: Tensor, mask: Tensor) -> Tensor:
    """Prototypes [..., C] after the mask has changed: p * M / sum(p * M), uniform over the mask where the sum is 0.

    Channels that enter the mask start at 0.
    """
    return signature(prototypes, mask)[0]


@dataclass(frozen=True)
class Refresh:
    """When the server makes a new mask; rounds count from 0 over the whole run.

    warmup: rounds with every channel kept, at least 1, the first mask being made from what the last of them measured.
    every: rounds from one mask to the next. freeze: share in [0, 1] of the run's rounds after which the mask stays as
    it is; the first mask is made in any case, so 0 means a single one.
    """

    warmup: int = 1
    every: int = 1
    freeze: float = 1.0

    def __post_init__(self) -> None:
        if self.warmup < 1 or self.every < 1:
            raise ConfigError(
                f"pruning needs warmup >= 1 and every >= 1 rounds, got {self.warmup} and {self.every}: the first mask "
                "is made from what a round with every channel has measured"
            )
        if not 0 <= self.freeze <= 1:
            raise ConfigError(f"freeze must be a share of the rounds in [0, 1], got {self.freeze}")

    def warm(self, round: int) -> bool:
        """Whether this round trains with every channel kept."""
        return round < self.warmup

    def due(self, round: int, total: int) -> bool:
        """Whether the end of this round, of `total` in the run, makes a new mask, in force from the next round on."""
        since = round - (self.warmup - 1)
        return since == 0 or (since > 0 and since % self.every == 0 and round < self.freeze * total)


SCHEDULES: dict[str, Refresh] = {
    "every": Refresh(),
    "stable": Refresh(warmup=5, every=5, freeze=0.5),
    "one_shot": Refresh(freeze=0.0),
}


def _groups(scores: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """The scores of each group in float64, once they are known to be finite and not negative."""
    if scores.dim() != 1 or len(scores) != sum(sizes):
        raise ConfigError(
            f"channel groups of sizes {tuple(sizes)} need scores [{sum(sizes)}], got {tuple(scores.shape)}"
        )
    values = scores.detach().to(torch.float64)
    bad = ~(values.isfinite() & (values >= 0))
    if bool(bad.any()):
        where = int(bad.nonzero()[0])
        raise PayloadError(
            f"scores of channels must be finite and not negative, got {float(values[where])} for channel {where}: "
            "has training diverged?"
        )
    return list(torch.split(values, list(sizes)))


def _best(values: Tensor, sizes: Sequence[int], keep: float, min_share: float) -> Tensor:
    """The best values, after the best of every group as far as its least number goes."""
    _check_shares(keep, min_share)
    least = _least(sizes, min_share)
    floor = torch.cat([_top(group, low) for group, low in zip(torch.split(values, list(sizes)), least, strict=True)])
    count = max(round(keep * len(values)), sum(least))
    return _top(values.masked_fill(floor, torch.inf), count)


def _top(values: Tensor, count: int) -> Tensor:
    """Mask of the `count` largest values; among equal ones the lowest index comes first."""
    mask = torch.zeros_like(values, dtype=torch.bool)
    mask[values.sort(descending=True, stable=True).indices[:count]] = True
    return mask


def _capped(groups: Sequence[Tensor], open_: Tensor, react_max: float) -> Tensor:
    """Of the channels to re-open those that the cap of their group leaves."""
    wanted = torch.split(open_, [len(group) for group in groups])
    left = [
        _top(group.masked_fill(~may, -1.0), _ceil(react_max * len(group))) & may
        for group, may in zip(groups, wanted, strict=True)
    ]
    return torch.cat(left)


def _least(sizes: Sequence[int], min_share: float) -> list[int]:
    return [max(1, _ceil(min_share * size)) for size in sizes]


def _ceil(product: float) -> int:
    # Rounded first: 0.07 * 100 is 7.000000000000001 in floating point, and that is 7 channels.
    return math.ceil(round(product, 9))


def _check_shares(keep: float, min_share: float) -> None:
    if not 0 < keep <= 1:
        raise ConfigError(f"keep must be a share of the channels in (0, 1], got {keep}")
    if not 0 <= min_share <= 1:
        raise ConfigError(f"min_keep must be a share of a group's channels in [0, 1], got {min_share}")


def _check_reactivation(phi: float, react_max: float) -> None:
    if not phi >= 0:
        raise ConfigError(f"phi must be at least 0 (inf re-opens no channel), got {phi}")
    if not 0 <= react_max <= 1:
        raise ConfigError(f"react_max must be a share of a group's channels in [0, 1], got {react_max}")
