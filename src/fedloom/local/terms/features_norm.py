"""A penalty on the size of the features that an encoder gives."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.core.batches import Batch
from fedloom.core.context import Outputs
from fedloom.core.errors import ConfigError
from fedloom.core.tree import Tensors
from fedloom.local.features import feats
from fedloom.local.parts import Carried, Ref

Size = Callable[[Tensor], Tensor]


def squared(features: Tensor) -> Tensor:
    """||g||^2 of every row: [batch, d] -> [batch]."""
    return features.square().sum(1)


def euclidean(features: Tensor) -> Tensor:
    """||g|| of every row, with a gradient of 0 at 0."""
    lengths: Tensor = torch.linalg.vector_norm(features, dim=1)
    return lengths


@dataclass(frozen=True)
class FeaturesNorm:
    """gamma * mean_b ||g(x_b)||^2 with g the "feats" [batch, d] of the network that trains.

    size: what is taken of every example's features; `squared` is the paper's. Source: Jia et al., "DapperFL: Domain
    Adaptive Federated Learning with Model Fusion Pruning for Edge Devices" (NeurIPS 2024), the domain adaptive
    regularisation.
    """

    gamma: float
    size: Size = squared

    def __post_init__(self) -> None:
        if not (math.isfinite(self.gamma) and self.gamma >= 0):
            raise ConfigError(f"gamma must be a finite number of at least 0, got {self.gamma}")

    def __call__(self, params: Tensors, out: Outputs, batch: Batch, ref: Ref, carry: Carried) -> Tensor:
        """Return the scalar."""
        return self.gamma * self.size(feats(out)).mean()
