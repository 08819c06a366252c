"""What the outputs of a two-tower network tell about the routing of its adapters.

"image_routing" [layers, batch, E], "text_routing" [layers, shown, E]: the routers' logits without noise; absent for a
tower without adapters. "image_gates", "text_gates": of the same shapes, 0 for experts that were not chosen. "shown"
[shown]: ids of the classes whose texts were routed. While the routers are held still, none of them has a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from fedloom.core.context import Outputs
from fedloom.core.errors import ConfigError

TOWERS = ("image", "text")
Routing = Callable[[Outputs], dict[str, Tensor]]  # outputs -> name -> distributions over experts [layers, N, E]
LEAST = 1e-8  # probabilities inside a logarithm are at least this


def probabilities(out: Outputs) -> dict[str, Tensor]:
    """Tower -> softmax over the experts [layers, N, E], of towers with adapters."""
    return {tower: out[f"{tower}_routing"].softmax(2) for tower in TOWERS if f"{tower}_routing" in out}


def learning(out: Outputs) -> bool:
    """Whether a loss on the routing has a gradient."""
    return any(f"{tower}_routing" in out and out[f"{tower}_routing"].requires_grad for tower in TOWERS)


def nothing(out: Outputs) -> Tensor:
    """A loss of 0."""
    return out["logits"].new_zeros(())


def check_weight(name: str, weight: float) -> None:
    """Raise `ConfigError` for a weight that is negative or not finite."""
    if not (math.isfinite(weight) and weight >= 0):
        raise ConfigError(f"{name} must be a finite number of at least 0, got {weight}")
