"""Gates on channels: factors on the activation of every group, for scoring channels and for switching them off.

One gate per channel multiplies the activation of its group at every tap, after the ReLU: for a group inside a block at
the input of the next layer, for a residual stream after the stem and after every block. Gates of 0 and 1 give what the
compact network gives, because batch normalisation treats channels one by one and a channel that is 0 after each ReLU
adds nothing; a gate on a convolution's output would not, since the norm's shift would leak. At 0 the gradient of a gate
is that of bringing the channel back.

Source: Molchanov et al., "Importance Estimation for Neural Network Pruning" (CVPR 2019), score channels by gradients of
such gates. Differs: theirs follow the norm, where the ReLU keeps a gate at 0 from any gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fedloom.core.errors import ConfigError
from fedloom.models.channels import Channels, Tap
from fedloom.models.checkpointing import set_checkpointing


@contextmanager
def gated(module: nn.Module, channels: Channels, gates: Tensor) -> Iterator[None]:
    """Multiply the channels by their gates in every forward pass inside the block.

    gates: [C], or [batch, C] for one set per example; differentiable to any order. Activations that checkpointing would
    recompute after the block are kept instead. Raises `ConfigError` for another shape.
    """
    if gates.dim() not in (1, 2) or gates.shape[-1] != channels.total:
        raise ConfigError(f"gates must be [{channels.total}] or [batch, {channels.total}], got {list(gates.shape)}")
    recomputed = [part for part in module.modules() if _is_checkpointed(part)]
    set_checkpointing(recomputed, False)
    hooks: list[RemovableHandle] = []
    try:
        for group, values in zip(channels.groups, channels.split(gates), strict=True):
            hooks += [_hook(module, tap, values) for tap in group.taps]
        yield
    finally:
        for hook in hooks:
            hook.remove()
        set_checkpointing(recomputed, True)


def _is_checkpointed(part: nn.Module) -> bool:
    return getattr(part.__dict__.get("forward"), "__module__", None) == set_checkpointing.__module__


def _hook(module: nn.Module, tap: Tap, values: Tensor) -> RemovableHandle:
    part = module.get_submodule(tap.module)
    if tap.side == "input":
        return part.register_forward_pre_hook(partial(_before, values))
    return part.register_forward_hook(partial(_after, values))


def _before(values: Tensor, part: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return _scaled(inputs[0], values), *inputs[1:]


def _after(values: Tensor, part: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
    return _scaled(output, values)


def _scaled(activation: Tensor, values: Tensor) -> Tensor:
    """[batch, c * repeat, ...] times [c] or [batch, c]; in the wider of the two types, given back in its own."""
    count = values.shape[-1]
    repeat = activation.shape[1] // count
    factors = values.to(activation.device).view(-1, count)
    factors = factors.repeat_interleave(repeat, 1) if repeat > 1 else factors
    factors = factors.view(*factors.shape, *(1,) * (activation.dim() - 2))
    return torch.mul(activation, factors).to(activation.dtype)
