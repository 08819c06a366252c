"""What the gradients of local training add up to, of weights that are pruned as well."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from fedloom.core.tree import Tensors


class Record(Protocol):
    """A sum over the steps of one piece of local training; made of the parameters' names, once for each."""

    def __init__(self, names: Collection[str]) -> None: ...

    def add(self, grads: Tensors) -> None:
        """Take in the gradients of a step."""
        ...

    def squares(self) -> dict[str, Tensor]:
        """name -> the importance of every weight, not negative, on the device of the gradients; empty without steps."""
        ...


class PerStep:
    """sum_s g_s^2 over steps s: the squares of the gradients of single minibatches."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)
        self._sums: dict[str, Tensor] = {}

    def add(self, grads: Tensors) -> None:
        """Add the squares."""
        for name in self._names & grads.keys():
            found = self._sums.setdefault(name, torch.zeros_like(grads[name]))
            found.addcmul_(grads[name], grads[name])

    def squares(self) -> dict[str, Tensor]:
        """The sums."""
        return self._sums


class Summed:
    """(sum_s g_s)^2 over steps s: the square of what all steps pull at together."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)
        self._sums: dict[str, Tensor] = {}

    def add(self, grads: Tensors) -> None:
        """Add the gradients."""
        for name in self._names & grads.keys():
            self._sums.setdefault(name, torch.zeros_like(grads[name])).add_(grads[name])

    def squares(self) -> dict[str, Tensor]:
        """The squares of the sums."""
        return {name: total.square() for name, total in self._sums.items()}


RECORDS: dict[str, type[Record]] = {"per_step": PerStep, "summed": Summed}


@dataclass(frozen=True)
class RecordGradients:
    """Shows the gradients to `ref["record"]` and passes them on as they are; before a mask, to see all of them.

    They are those of the loss on a minibatch: clipping and weight decay come later.
    """

    needs: ClassVar[tuple[str, ...]] = ("record",)

    def __call__(self, grads: Tensors, params: Tensors, ref: Mapping[str, Any]) -> Tensors:
        """The same gradients."""
        ref["record"].add(grads)
        return grads
