"""Gradients of a sparse network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from fedloom.core.tree import Tensors


@dataclass(frozen=True)
class MaskedGradients:
    """g where the mask is true, 0 elsewhere, so that weights which are 0 there stay exactly 0 in every step.

    Neither momentum nor weight decay moves a weight of 0 whose gradients are 0, in SGD as in AdamW. ref["masks"]: name
    -> bool, of a shape that broadcasts to the parameter's; parameters that are not named move freely.
    """

    needs: ClassVar[tuple[str, ...]] = ("masks",)

    def __call__(self, grads: Tensors, params: Tensors, ref: Mapping[str, Any]) -> Tensors:
        """The gradients to use."""
        masks = ref["masks"]
        return {name: torch.where(masks[name], g, 0) if name in masks else g for name, g in grads.items()}
