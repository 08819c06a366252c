"""A penalty for layers whose batch statistics leave given ones."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedloom.core.batches import Batch
from fedloom.core.context import Outputs
from fedloom.core.errors import ConfigError
from fedloom.core.tree import Tensors
from fedloom.local.parts import Carried, Ref


def statistics_gap(found: Tensor, wanted: Tensor) -> Tensor:
    """|mu - mu_g|^2 / d + ((|v|_1 - |v_g|_1) / d)^2 of means and variances [2, d]; a scalar.

    The variances count by their sum alone: channels may trade them.
    """
    width = found.shape[1]
    gap = found - wanted
    return torch.add(gap[0].square().sum() / width, (gap[1].sum() / width).square())


@dataclass(frozen=True)
class StatisticsConsistency:
    """weight * sum_l softmax(beta * l) `statistics_gap`(layer l), l = 0, 1, ... in the order of `out`.

    Reads from `out` "<prefix><layer>" [2, d], mean and variance of a batch, whose gradient is used, and from
    `ref["statistics"]` the wanted ones under the layer's name. Source: Z. Wang et al., "Federated Learning with Domain
    Shift Eraser" (CVPR 2025, arXiv 2503.13063), the consistency regulariser.
    """

    weight: float
    beta: float
    prefix: str = "moments/"
    needs: ClassVar[tuple[str, ...]] = ("statistics",)

    def __post_init__(self) -> None:
        for name, value in (("lam", self.weight), ("beta", self.beta)):
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{name} must be a finite number of at least 0, got {value}")

    def __call__(self, params: Tensors, out: Outputs, batch: Batch, ref: Ref, carry: Carried) -> Tensor:
        """Return the scalar."""
        layers = [name for name in out if name.startswith(self.prefix)]
        gaps = torch.stack([statistics_gap(out[n], ref["statistics"][n.removeprefix(self.prefix)]) for n in layers])
        depth = torch.arange(len(layers), dtype=gaps.dtype, device=gaps.device)
        return self.weight * torch.dot(torch.softmax(self.beta * depth, 0), gaps)
