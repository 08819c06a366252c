"""Nested sub-networks: the leading channels of every group, and activations as large as those of the dense network.

Source: Diao et al., "HeteroFL" (ICLR 2021), section 3: a network of width share r is the leading block of every tensor,
and while it trains a Scaler divides what its layers put out by r, between the layer and its norm. In evaluation the
Scaler does nothing. A batch norm that follows takes the factor away again, but for its epsilon.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fedloom.core.errors import ConfigError
from fedloom.models.channels import Channels, Kept


def prefix(channels: Channels, rate: float) -> Kept:
    """The first ceil(rate c_g) channels of every group, at least one; `ConfigError` for a rate outside (0, 1]."""
    _check(rate)
    # Rounded first: 0.07 * 100 is 7.000000000000001 in floating point, and that is 7 channels.
    return {group.name: torch.arange(max(1, math.ceil(round(rate * group.size, 9)))) for group in channels.groups}


@contextmanager
def scaled(module: nn.Module, channels: Channels, rate: float) -> Iterator[None]:
    """Divide by `rate`, in training mode, what every layer that writes a group of channels puts out inside the block.

    The head, which writes no channels, is left alone. No module or tensor is added; a rate of 1 changes nothing.
    Raises `ConfigError` for a rate outside (0, 1].
    """
    _check(rate)
    writers = sorted({writer.rpartition(".")[0] for group in channels.groups for writer in group.writers})
    layers = [module.get_submodule(writer) for writer in writers] if rate < 1 else []
    hooks = [layer.register_forward_hook(partial(_divide, rate)) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _divide(rate: float, layer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
    return output / rate if layer.training else output


def _check(rate: float) -> None:
    if not 0 < rate <= 1:
        raise ConfigError(f"rates must be shares of the width in (0, 1], got {rate}")
