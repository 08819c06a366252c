"""Batch-norm statistics measured anew, for a network whose weights or shape have changed since they were gathered."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fedloom.core.batches import Batches
from fedloom.core.context import Context, Net
from fedloom.core.seeds import generator


def measured_statistics(
    ctx: Context, data: Batches, batch_size: int = 64, *, only: Collection[nn.Module] | None = None
) -> dict[str, Tensor]:
    """The buffers of the bound network after one pass over the examples.

    Running means and variances start anew and are means over the batches, by their examples; other buffers are as they
    were, and so are those of norms that are frozen. Batches are drawn at random, from a stream of the pass's own: in
    the order in which data are stored they may hold a class each, whose variance is too small. only: of which norms,
    by identity; None for all. A client without examples gives back the buffers that were bound. Nothing is trained,
    augmented or dropped out.
    Source: Diao et al., "HeteroFL" (ICLR 2021), static batch normalisation (sBN), section 3. Differs: there a small
    last batch counts like a full one.
    """
    seen = 0
    if len(data):
        mixed = data.subset(torch.randperm(len(data), generator=generator(ctx.seed_for("statistics"))))
        with ctx.evaluating(), _measuring(ctx.net, only) as norms:
            for batch in mixed.epoch(batch_size=batch_size, purpose="statistics", shuffle=False):
                seen += len(batch.y)
                for norm in norms:
                    norm.momentum = len(batch.y) / seen
                ctx.apply(batch.x)
    return ctx.net.take()[1]


@contextmanager
def _measuring(net: Net, only: Collection[nn.Module] | None) -> Iterator[list[nn.modules.batchnorm._BatchNorm]]:
    """The batch norms that are not frozen: in training mode they alone, without statistics; momenta come back."""
    net.train(True)
    norms = [
        part
        for part in net.module.modules()
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.track_running_stats and part.training
    ]
    norms = norms if only is None else [norm for norm in norms if any(norm is one for one in only)]
    net.train(False)
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.train(True)
    try:
        yield norms
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
