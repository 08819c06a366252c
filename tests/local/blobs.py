"""A context and data of the toy federation, for tests of local training."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fedloom.core import Batches, Context, Forward, Net, Stage
from fedloom.core.seeds import generator
from toys.federation import BlobSpec


def context(factory: Any = None, *, seen=(0, 1, 2), classes=None, num_classes=6, forward=None, **given: Any) -> Context:
    net = Net(factory or BlobSpec(num_classes).classifier, forward or Forward())
    stage = given.pop("stage", None) or Stage(0, 1, 4, tuple(classes or seen), tuple(seen))
    return Context(net=net, stage=stage, num_classes=num_classes, round=given.pop("round", 0), **given)


def data(count: int = 20, classes: int = 3, *, dtype: torch.dtype = torch.float32) -> Batches:
    x = torch.randn(count, 2, generator=generator("local", "x")).to(dtype) * 2
    y = torch.randint(0, classes, (count,), generator=generator("local", "y"))
    return Batches(x, y, torch.arange(count), key=("local",), prepare=lambda x, rng: x)


def plain_loop(
    module: nn.Module, batches: Batches, optimizer: Any, loss_of: Any, *, epochs=1, size=8, clip=None
) -> None:
    """The training loop that everybody writes by hand, with torch's own optimiser."""
    module.train()
    for epoch in range(epochs):
        for batch in batches.epoch(epoch, size):
            optimizer.zero_grad()
            loss_of(module, batch).backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
            optimizer.step()


def logits(out: Tensor | dict[str, Tensor]) -> Tensor:
    return out if isinstance(out, Tensor) else out["logits"]
