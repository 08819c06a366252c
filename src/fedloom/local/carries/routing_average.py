"""The running mean of what routers choose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedloom.core.batches import Batch
from fedloom.core.context import Context, Outputs
from fedloom.core.errors import ConfigError
from fedloom.core.tree import Tensors
from fedloom.local.parts import Ref
from fedloom.local.tower_routing import Routing, probabilities


@dataclass(frozen=True)
class RoutingAverage:
    """keep * before + (1 - keep) * batch mean of the routing per batch: [layers, E] for every name of `routing`.

    routing: reads the outputs, by default those of two towers, "image" and "text". The mean goes on from
    ref["routing_average"], and starts with a batch's own where that is empty.
    """

    keep: float = 0.9
    routing: Routing = probabilities

    needs: ClassVar[tuple[str, ...]] = ("routing_average",)

    def __post_init__(self) -> None:
        if not 0 <= self.keep < 1:
            raise ConfigError(f"the routing average keeps a part of at least 0 and below 1, got {self.keep}")

    def init(self, ref: Ref, ctx: Context) -> Tensors:
        """The value that is passed."""
        found: Tensors = ref["routing_average"]
        return found

    def update(self, value: Tensors, out: Outputs, batch: Batch, ref: Ref) -> Tensors:
        """Take in the batch."""
        means = {name: probs.mean(1) for name, probs in self.routing(out).items()}
        old = {name: value.get(name, mean) for name, mean in means.items()}
        return {**value, **{name: self.keep * old[name] + (1 - self.keep) * mean for name, mean in means.items()}}

    def close_epoch(self, value: Tensors) -> Tensors:
        """The mean goes on."""
        return value

    def close(self, value: Tensors) -> Tensors:
        """The mean after the last batch."""
        return value
