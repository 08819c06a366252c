"""What an expert gains and costs in the game over one sample: the utilities of routing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedloom.core.errors import ConfigError
from fedloom.select.fisher import FisherMap, shares, signals

# (loss [batch, experts], features, delta_sq, fisher, rows: see `fedloom.select.fisher`) -> gain, cost [batch, experts]
Utility = Callable[[Tensor, Tensor, Tensor, Tensor, "Tensor | None"], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class FisherUtility:
    """What an expert gains and costs by FRES: gain = -loss + (1 - alpha) * share of plasticity, cost = alpha *
    stability cost (eqs. 3-5)."""

    alpha: float
    fisher_map: FisherMap = field(default_factory=FisherMap)

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise ConfigError(f"alpha must be in [0, 1], got {self.alpha}")

    def __call__(
        self, loss: Tensor, features: Tensor, delta_sq: Tensor, fisher: Tensor, rows: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Gain and cost [batch, experts]."""
        stability, plasticity = signals(features, delta_sq, self.fisher_map(fisher, rows))
        return (1 - self.alpha) * shares(plasticity) - loss, self.alpha * stability


@dataclass(frozen=True)
class LossUtility:
    """The game without FRES: an expert gains by its low loss and costs nothing."""

    def __call__(
        self, loss: Tensor, features: Tensor, delta_sq: Tensor, fisher: Tensor, rows: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Gain and cost [batch, experts]."""
        return -loss, torch.zeros_like(loss)


UTILITIES: dict[str, Callable[[float, FisherMap], Utility]] = {
    "fres": FisherUtility,
    "loss": lambda alpha, fisher_map: LossUtility(),
}
