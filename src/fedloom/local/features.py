"""Features of a client's examples under the bound network, and their sums per class."""

from __future__ import annotations

import torch
from torch import Tensor

from fedloom.core.batches import Batch, Batches
from fedloom.core.context import Context, Outputs
from fedloom.core.errors import ConfigError
from fedloom.local.parts import Carried, Ref


def features(ctx: Context, data: Batches, batch_size: int = 250) -> tuple[Tensor, Tensor]:
    """Features [n, d] and labels int64 [n] of all examples in stored order, on the CPU; [0, 0] and [0] without any.

    In evaluation mode, without augmentation and without gradient; the network and what training sees stay as they were.
    Raises `ConfigError` when the network gives no features.
    """
    found, labels = [torch.zeros(0, 0)], [torch.zeros(0, dtype=torch.int64)]
    with ctx.evaluating():
        for batch in data.epoch(batch_size=batch_size, purpose="features", shuffle=False):
            found.append(feats(ctx.apply(batch.x)).cpu())
            labels.append(batch.y)
    return torch.cat(found[1:] or found), torch.cat(labels)


def class_sums(features: Tensor, labels: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Sums of features [num_classes, d] and numbers of examples int64 [num_classes] per class.

    features [n, d], labels int64 [n]. The mean of class c is sums[c] / counts[c]; a class without examples has zeros.
    """
    sums = features.new_zeros(num_classes, features.shape[1]).index_add_(0, labels, features)
    return sums, labels.bincount(minlength=num_classes)


def feats(out: Outputs) -> Tensor:
    """The features [batch, d] among a network's outputs; `ConfigError` when it gives none."""
    if "feats" not in out:
        raise ConfigError(
            f"model: the method needs features, and the network gives only {', '.join(sorted(out))}; let it return a "
            "mapping with 'logits' and 'feats', or give the model as a backbone (attribute num_features)"
        )
    found = out["feats"]
    if found.dim() != 2:
        raise ConfigError(f"model: 'feats' must have the shape [batch, features], got {list(found.shape)}; flatten it")
    return found


def feats_needed(out: Outputs, batch: Batch, ref: Ref, carry: Carried) -> Outputs:
    """Decision that adds nothing: it refuses a network without features at the first step instead of the first use."""
    feats(out)
    return {}


def head_width(ctx: Context) -> int:
    """Width d of the features that the network's linear head reads, told by its class rows.

    Raises `ConfigError` unless exactly one matrix has a row per class.
    """
    params = dict(ctx.net.module.named_parameters())
    matrices = [
        (params[name], dim) for name, dim in ctx.class_rows.items() if name in params and params[name].dim() == 2
    ]
    if len(matrices) != 1:
        raise ConfigError(
            f"model: the method needs a network with one linear head, and {len(matrices)} matrices of this one have a "
            "row per class; give the model as a backbone (attribute num_features)"
        )
    weight, dim = matrices[0]
    return weight.shape[1 - dim]
