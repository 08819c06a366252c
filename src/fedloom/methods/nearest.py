"""Class means of features on the server, and the prediction by the nearest of them.

Kept as sums and counts, field "means" of the server's state: means are scaled to unit length before they are used, and
a sum points where its mean does. `current` (bool) says whether they are of the model as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.core import ConfigError, Context, Payload, Reply
from fedloom.local.features import class_sums, head_width
from fedloom.merge.mean import replies_mean

MEANS = "means"
SUMS = ("sums", "counts")  # [classes, d]; int64 [classes]
ROWS: Mapping[tuple[str, str], int] = {(MEANS, name): 0 for name in SUMS}


def no_means(ctx: Context) -> Payload:
    """The field before the first stage: zeros. `ConfigError` where the network has no one linear head."""
    sums = torch.zeros(ctx.num_classes, head_width(ctx))
    counts = torch.zeros(ctx.num_classes, dtype=torch.int64)
    return {MEANS: {"sums": sums, "counts": counts, "current": torch.tensor(False)}}


def means_of(server: Payload) -> Payload:
    """The field as predictions need it; nothing while the means are those of an older model."""
    means = server[MEANS]
    return {MEANS: {name: means[name] for name in SUMS}} if bool(means["current"]) else {}


def outdated(server: Payload) -> Payload:
    """The field after the model has changed."""
    return {MEANS: {**server[MEANS], "current": torch.tensor(False)}}


def sums_of(ctx: Context, features: Tensor, labels: Tensor) -> Payload:
    """The field that a client uploads, of its exemplars' features [n, d] of unit length and labels [n].

    `ConfigError` where the features are not those that the head reads.
    """
    if features.shape[1] != (width := head_width(ctx)):
        raise ConfigError(
            f"model: 'feats' has {features.shape[1]} features, but the head reads {width}; return what the head reads"
        )
    return {MEANS: dict(zip(SUMS, class_sums(features, labels, ctx.num_classes), strict=True))}


def added_up(server: Payload, replies: Sequence[Reply]) -> Payload:
    """The field after the clients' sums and counts; a class of which nobody reported an example keeps what it had."""
    old = {name: server[MEANS][name] for name in SUMS}
    new = replies_mean(replies, MEANS, old, rules={"*": "sum"})
    reported = new["counts"] > 0
    sums = torch.where(reported.unsqueeze(1), new["sums"], old["sums"])
    counts = torch.where(reported, new["counts"], old["counts"])
    return {MEANS: {"sums": sums, "counts": counts, "current": torch.tensor(True)}}


def nearness(features: Tensor, sums: Tensor, counts: Tensor) -> Tensor:
    """Scores [batch, classes] = -|f - mu_c|^2 with f [batch, d] and mu_c at unit length; -inf where counts is 0.

    Source: Rebuffi et al., "iCaRL: Incremental Classifier and Representation Learning" (CVPR 2017), algorithm 1.
    """
    rows, means = F.normalize(features), F.normalize(sums.to(features.device))
    gaps = rows.square().sum(1, keepdim=True) + means.square().sum(1) - 2 * rows @ means.T
    return (-gaps).masked_fill(counts.to(features.device) == 0, -torch.inf)
