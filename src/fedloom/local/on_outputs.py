"""Training a small network on what another network gave, computed once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from fedloom.core.batches import Batches
from fedloom.core.context import Context, Forward, Net
from fedloom.local.sgd import LocalSGD, Trained


def train_on_outputs(
    loop: LocalSGD, make: Callable[[], nn.Module], x: Mapping[str, Tensor], y: Tensor, ctx: Context
) -> Trained:
    """Train the network that `make` builds from its initial values, on rows of x and labels y, all on the CPU.

    The network takes the mapping. The examples were visited when x was computed, and are not counted again. `anchor`
    of the loop's parts is the initial network.
    """
    rows = Batches(x, y, torch.arange(len(y)), key=(ctx.seed_for("outputs"),), prepare=lambda x, _: x)
    net = Net(make, Forward(ctx.net.forward.device))
    return loop(net.fresh(), rows, replace(ctx, net=net))
