"""Batch-norm statistics measured anew, for a network whose weights or shape have changed since they were gathered."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fedloom.core.batches import Batches
from fedloom.core.context import Context, Net


def measured_statistics(ctx: Context, data: Batches, batch_size: int = 64) -> dict[str, Tensor]:
    """The buffers of the bound network after one pass over the examples, each batch counting the same.

    Running means and variances start anew and are cumulative means over the batches; other buffers are as they were,
    and so are those of norms that are frozen. A client without examples gives back the buffers that were bound. Nothing
    is trained, augmented or dropped out.
    Source: Diao et al., "HeteroFL" (ICLR 2021), static batch normalisation (sBN), section 3.
    """
    if len(data):
        with ctx.evaluating(), _cumulative(ctx.net):
            for batch in data.epoch(batch_size=batch_size, purpose="statistics", shuffle=False):
                ctx.apply(batch.x)
    return ctx.net.take()[1]


@contextmanager
def _cumulative(net: Net) -> Iterator[None]:
    """Only batch norms that are not frozen are in training mode, start at no statistics and average over batches."""
    net.train(True)
    norms = [
        part
        for part in net.module.modules()
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.track_running_stats and part.training
    ]
    net.train(False)
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
        norm.train(True)
    try:
        yield
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
