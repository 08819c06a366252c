"""Who contributes to a merge: checks of weights, names, shapes and dtypes, before any arithmetic.

Trees may be lazy: each `tree[name]` can read a file, so names are listed once by iteration (a `Mapping`'s `in`
would read the tensor) and every tensor is read once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from fedloom.core.errors import PayloadError
from fedloom.core.payload import is_finite
from fedloom.core.tree import Tensors


@dataclass(frozen=True)
class Source:
    """One client's tree that counts. position: among all trees of the call. label: for messages."""

    position: int
    label: str
    tree: Tensors
    names: frozenset[str]
    weight: float

    def read(self, name: str) -> Tensor:
        """The tensor, detached; this is the one place where a tree is read."""
        return self.tree[name].detach()

    def read_like(self, name: str, old: Tensor) -> Tensor:
        """Read a tensor that must have the shape and dtype of the server's.

        Raises `PayloadError` naming client, name and both shapes or dtypes.
        """
        value = self.read(name)
        self.check_dtype(name, value, old)
        if value.shape != old.shape:
            raise PayloadError(
                f"{self.label}: '{name}' has shape {tuple(value.shape)}, the server's has {tuple(old.shape)}"
            )
        return value

    def check_dtype(self, name: str, value: Tensor, old: Tensor) -> None:
        """Raise `PayloadError` naming client, name and both dtypes when they differ."""
        if value.dtype != old.dtype:
            raise PayloadError(f"{self.label}: '{name}' has dtype {value.dtype}, the server's has {old.dtype}")


def labels(count: int, who: Sequence[object] | None) -> list[str]:
    """How each client is called in messages: by its id, or by its position when no ids are given."""
    if who is None:
        return [f"client at position {i}" for i in range(count)]
    if len(who) != count:
        raise PayloadError(f"{count} trees but {len(who)} client ids")
    return [f"client {client}" for client in who]


def check_weight(weight: float, label: str) -> float:
    """Return the weight; raise `PayloadError` naming the client unless it is finite and not negative."""
    if not math.isfinite(weight) or weight < 0:
        raise PayloadError(f"{label}: weight must be finite and not negative, got {weight}")
    return float(weight)


def sources(
    trees: Sequence[Tensors], weights: Sequence[float], old: Tensors, who: Sequence[object] | None = None
) -> list[Source]:
    """Clients with a positive weight, in the given order.

    Weights are scaled by a power of two so that the largest is in [0.5, 1): the mean keeps its bits, and sums of
    very large or very small weights neither overflow nor vanish.
    Raises `PayloadError` for a weight that is negative or not finite, and for a name that the server does not
    hold; each names the client.
    """
    if len(trees) != len(weights):
        raise PayloadError(f"{len(trees)} trees but {len(weights)} weights")
    known, names = frozenset(old), labels(len(trees), who)
    checked = [check_weight(weight, label) for weight, label in zip(weights, names, strict=True)]
    exponent = math.frexp(max(checked, default=0.0))[1]
    found = []
    for i, (tree, weight, label) in enumerate(zip(trees, checked, names, strict=True)):
        source = Source(i, label, tree, frozenset(tree), math.ldexp(weight, -exponent))
        extra = sorted(source.names - known)
        if extra:
            raise PayloadError(f"{label}: '{extra[0]}' is not a tensor that the server holds")
        if source.weight > 0:
            found.append(source)
    return found


def blame(name: str, owners: Sequence[Source]) -> PayloadError:
    """The error for a merged tensor that is not finite: reads again to name the first client that caused it."""
    for source in owners:
        if not is_finite(source.read(name)):
            return PayloadError(f"{source.label}: '{name}' holds NaN or infinite values")
    return PayloadError(f"the merged '{name}' is not finite although every client's is")
