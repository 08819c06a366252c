"""The model-contrastive term of MOON, and the decision that feeds it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from fedloom.core.batches import Batch, Inputs
from fedloom.core.context import Outputs
from fedloom.core.errors import ConfigError
from fedloom.core.tree import Tensors
from fedloom.local.features import feats
from fedloom.local.parts import Carried, Ref


@dataclass(frozen=True)
class ModelContrast:
    """mu * mean_b -log(e^{cos(z, z+) / tau} / (e^{cos(z, z+) / tau} + e^{cos(z, z-) / tau})).

    Computed as log(1 + e^{(cos(z, z-) - cos(z, z+)) / tau}), which no temperature makes overflow.
    z: "feats" [batch, d] of the network that trains. positive, negative: names in `out` of the features z+ of the model
    to be near to and z- of the one to be far from, which get no gradient (see `FrozenFeats`). A zero vector has no
    direction: its cosine is 0, without gradient. Source: Li, He and Song, "Model-Contrastive Federated Learning" (CVPR
    2021), the local loss of algorithm 1.
    """

    mu: float = 5.0
    tau: float = 0.5
    positive: str = "global_feats"
    negative: str = "previous_feats"

    def __post_init__(self) -> None:
        if not (math.isfinite(self.mu) and self.mu >= 0):
            raise ConfigError(f"mu must be a finite number of at least 0, got {self.mu}")
        if not (math.isfinite(self.tau) and self.tau > 0):
            raise ConfigError(f"tau must be a finite number above 0, got {self.tau}")

    def __call__(self, params: Tensors, out: Outputs, batch: Batch, ref: Ref, carry: Carried) -> Tensor:
        """Return the scalar."""
        z = feats(out)
        near, far = (F.normalize(out[name].detach(), dim=1) for name in (self.positive, self.negative))
        # By the difference of the two directions: where they are equal, the gradient is 0 and not merely small.
        # Without the last factor the gradient at z = 0 would be that of a vector of length 1e-12.
        gap = (F.normalize(z, dim=1) * (far - near)).sum(1) * z.detach().any(1)
        return self.mu * F.softplus(gap / self.tau).mean()


@dataclass(frozen=True)
class FrozenFeats:
    """Decision that adds the features of another network to `out` (see `Context.teacher`)."""

    forward: Callable[[Inputs], Outputs]
    name: str

    def __call__(self, out: Outputs, batch: Batch, ref: Ref, carry: Carried) -> Outputs:
        """Return that network's features [batch, d] of the batch."""
        return {self.name: feats(self.forward(batch.x))}
