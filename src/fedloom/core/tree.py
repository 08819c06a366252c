"""Arithmetic on trees: a tree is a mapping from parameter name to tensor.

Every function returns new tensors and leaves its arguments alone. Trees combined with each other must have
the same names; a missing one raises `PayloadError` that names it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from fedloom.core.errors import PayloadError

Tensors = Mapping[str, Tensor]


def same_names(a: Tensors, b: Tensors) -> None:
    """Raise `PayloadError` unless both trees hold the same names."""
    if a.keys() != b.keys():
        missing, extra = sorted(a.keys() - b.keys()), sorted(b.keys() - a.keys())
        raise PayloadError(f"trees differ in names: only in the first {missing}, only in the second {extra}")


def combine(f: Callable[[Tensor, Tensor], Tensor], a: Tensors, b: Tensors) -> dict[str, Tensor]:
    """Apply `f` to the tensors of both trees, name by name."""
    same_names(a, b)
    return {name: f(a[name], b[name]) for name in a}


def add(a: Tensors, b: Tensors) -> dict[str, Tensor]:
    """a + b."""
    return combine(torch.add, a, b)


def sub(a: Tensors, b: Tensors) -> dict[str, Tensor]:
    """a - b."""
    return combine(torch.sub, a, b)


def axpy(alpha: float, a: Tensors, b: Tensors) -> dict[str, Tensor]:
    """alpha * a + b."""
    return combine(lambda x, y: torch.add(y, x, alpha=alpha), a, b)


def scale(a: Tensors, factor: float) -> dict[str, Tensor]:
    """factor * a."""
    return {name: tensor * factor for name, tensor in a.items()}


def zeros_like(a: Tensors) -> dict[str, Tensor]:
    """A tree of zeros with the shapes and dtypes of `a`."""
    return {name: torch.zeros_like(tensor) for name, tensor in a.items()}


def clone(a: Tensors) -> dict[str, Tensor]:
    """A copy that shares no memory with `a`."""
    return {name: tensor.detach().clone() for name, tensor in a.items()}


def on_device(a: Tensors, device: torch.device | str) -> dict[str, Tensor]:
    """The tree on a device; tensors that are there already are the same objects."""
    return {name: tensor.to(device) for name, tensor in a.items()}


def sq_norm(a: Tensors) -> Tensor:
    """Sum of squares over the whole tree; a scalar tensor, differentiable."""
    parts = [tensor.square().sum() for tensor in a.values()]
    return torch.stack(parts).sum() if parts else torch.zeros(())
