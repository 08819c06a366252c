"""Exemplars: examples of past classes that a client keeps as they are stored, in its own state.

Of each class the best stand first, so that fewer are kept by dropping the last ones.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from fedloom.core import Batches, ConfigError, Payload
from fedloom.core.batches import Inputs, take
from fedloom.select.herding import herd

FIELD = "exemplars"  # of the client's state: {"y": labels, "x": inputs}, or "x.<name>" for inputs that are a mapping

Pool = Callable[[Tensor, int, torch.Generator], Tensor]


def herded(features: Tensor, count: int, rng: torch.Generator) -> Tensor:
    """The picks of herding among the examples of a class, features [n, d] of unit length."""
    return herd(features, count)


def drawn(features: Tensor, count: int, rng: torch.Generator) -> Tensor:
    """As many at random, without replacement."""
    return torch.randperm(len(features), generator=rng)[:count]


POOLS: Mapping[str, Pool] = {"herding": herded, "random": drawn}


class Exemplars(NamedTuple):
    """x: stored inputs [n, ...]; y: int64 class ids [n]."""

    x: Inputs
    y: Tensor

    @classmethod
    def of(cls, state: Payload, data: Batches) -> Exemplars:
        """What a client's state holds; none where it holds nothing yet. data: the client's, for the inputs' kind."""
        if FIELD not in state:
            return cls(*data.stored(torch.arange(0)))
        kept = dict(state[FIELD])
        y = kept.pop("y")
        return cls(kept["x"] if "x" in kept else {name.removeprefix("x."): t for name, t in kept.items()}, y)

    def field(self) -> Payload:
        """As a field of the client's state."""
        x = {"x": self.x} if isinstance(self.x, Tensor) else {f"x.{name}": t for name, t in self.x.items()}
        return {FIELD: {"y": self.y, **x}}

    def trimmed(self, count: int, without: Collection[int] = ()) -> Exemplars:
        """The first `count` of every class, and none of the classes `without`."""
        classes = [int(c) for c in self.y.unique() if int(c) not in without]
        picks = [(self.y == c).nonzero().flatten()[:count] for c in classes]
        index = torch.cat([torch.arange(0), *picks])
        return Exemplars(take(self.x, index), self.y[index])


def check_memory(memory: int, classes: int) -> None:
    """Raise `ConfigError` for a memory that would hold nothing of some class in the end; 0 is none at all."""
    if 0 < memory < classes:
        raise ConfigError(
            f"method.memory is {memory}, but the stream has {classes} classes, and a client keeps floor(memory / seen) "
            f"examples of each; give at least {classes}, or 0 for none"
        )


def chosen(pool: Pool, features: Tensor, labels: Tensor, count: int, rng: torch.Generator) -> Tensor:
    """Positions of up to `count` examples of every class, the best of each first; int64. features [n, d]."""
    picks = [torch.arange(0)]
    for c in labels.unique():
        index = (labels == c).nonzero().flatten()
        picks.append(index[pool(features[index], count, rng)])
    return torch.cat(picks)
