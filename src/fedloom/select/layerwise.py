"""Masks of a network layer by layer, whatever the layers next to it lose: nothing can be removed, only set to 0."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedloom.core.errors import ConfigError
from fedloom.core.tree import Tensors


def layer_masks(module: nn.Module, weights: Tensors, ratio: float) -> dict[str, Tensor]:
    """Name of a weight -> bool mask of its shape, False for what is pruned; layers that lose nothing are not named.

    ratio: share in [0, 1) that each kind of pruning removes, round(ratio * n) of n. Layers go in the order of the
    network: a convolution loses inputs by sum |w|, then outputs of what is left, so that (1 - ratio)^2 of it remains;
    the first one nothing, the second one and the first of size 1 x 1 (a shortcut) outputs alone. A batch norm but the
    first loses single weights by |w|. A linear layer loses inputs by sum w^2.
    Source: the public code of Jia et al., "DapperFL" (NeurIPS 2024), in which masks of adjacent layers do not match.
    """
    if not 0 <= ratio < 1:
        raise ConfigError(f"ratios must be removed shares in [0, 1), got {ratio}")
    found: dict[str, Tensor] = {}
    convolutions = norms = shortcuts = 0
    for name, layer in module.named_modules():
        weight = weights.get(f"{name}.weight")
        if weight is None:
            continue
        dims: tuple[int, ...] = ()
        if isinstance(layer, nn.Conv2d):
            shortcuts += layer.kernel_size == (1, 1)
            outputs_alone = convolutions == 1 or (layer.kernel_size == (1, 1) and shortcuts == 1)
            dims = () if convolutions == 0 else (0,) if outputs_alone else (1, 0)
            convolutions += 1
        elif isinstance(layer, nn.Linear):
            dims, weight = (1,), weight.square()
        elif isinstance(layer, nn.modules.batchnorm._BatchNorm):
            dims = (0,) if norms else ()
            norms += 1
        if dims and ratio > 0:
            found[f"{name}.weight"] = _mask(weight.detach().abs(), dims, ratio)
    return found


def _mask(sizes: Tensor, dims: tuple[int, ...], ratio: float) -> Tensor:
    """The smallest slices along each dimension, one after the other, are False."""
    mask = torch.ones_like(sizes, dtype=torch.bool)
    for dim in dims:
        others = [d for d in range(sizes.dim()) if d != dim]
        norms = (sizes * mask).double().sum(others) if others else sizes
        least = norms.sort(stable=True).indices[: round(ratio * len(norms))]
        mask.index_fill_(dim, least, False)
    return mask
