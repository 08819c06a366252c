"""Which channels a pruning method decides on: all groups of a network, some of them, or every layer for itself.

A grouping takes a prunable module (`fedloom.models.compact.prunable`) and gives it another table of channels.
Source: the readings of "channel" in Lin et al., "Domain Sensitive Federated Learning with Fisher-Informed Pruning"
(FEDFIP, CVPR 2026), which writes one scalar per channel and does not say what it is in a residual network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedloom.core.errors import ConfigError
from fedloom.models.areas import output_positions
from fedloom.models.channels import Axis, Channels, Group, Tap
from fedloom.models.compact import equipped

Grouping = Callable[[Any], Any]


def coupled(module: Any) -> Any:
    """Every group of the network; the channels of a residual stream are one group."""
    return module


def internal(module: Any) -> Any:
    """The groups that one layer writes: residual streams keep all their channels.

    Raises `ConfigError` for a network that has none.
    """
    table = module.channels
    groups = tuple(group for group in table.groups if len(group.writers) == 1)
    if not groups:
        raise ConfigError(f"{type(module).__name__} has no group that one layer writes; take method.groups coupled")
    names = {group.name for group in groups}
    axes = {n: tuple(a if a and a.group in names else None for a in named) for n, named in table.axes.items()}
    return equipped(module, Channels(groups, axes))


def by_layer(module: Any) -> Any:
    """The outputs of every layer for themselves, gated after the layer's norm; what reads them stays whole.

    Such rows can be masked and left out of messages, but layers that are added to each other keep different ones, so no
    compact network exists: use `masked`, not `rebuild`. A gate of 0 before a ReLU has no gradient, so inside a block
    what is switched off does not come back by its score.
    """
    groups: list[Group] = []
    axes: dict[str, tuple[Axis | None, ...]] = {}
    for group in module.channels.groups:
        norms: Sequence[str | None] = group.norms or (None,) * len(group.writers)
        for writer, norm in zip(group.writers, norms, strict=True):
            layer = writer.removesuffix(".weight")
            groups.append(Group(layer, group.size, (Tap(norm or layer, "output"),), (norm,) if norm else (), (writer,)))
            leaves = [f"{norm}.{n}" for n in ("weight", "bias", "running_mean", "running_var")] if norm else []
            axes |= {
                name: (Axis(layer),) for name in (writer, f"{layer}.bias", *leaves) if name in module.channels.axes
            }
    return equipped(module, Channels(tuple(groups), axes))


GROUPINGS: dict[str, Grouping] = {"coupled": coupled, "internal": internal, "conv_out": by_layer}


def switched_off(params: dict[str, Tensor], channels: Channels, mask: Tensor) -> dict[str, Tensor]:
    """Parameters with which the channels outside the mask put out 0: what `switches` turns off is 0. The dense network
    then computes what gates of 0 and 1 would."""
    masks = switches(params, channels, mask)
    return {n: torch.where(masks[n].to(p.device), p, 0) if n in masks else p for n, p in params.items()}


def switches(params: Mapping[str, Tensor], channels: Channels, mask: Tensor) -> dict[str, Tensor]:
    """Name of a parameter -> bool that broadcasts to it: of every norm's weight and bias, or the layer's own where no
    norm follows, what belongs to channels of the mask. Held at 0 elsewhere, the other channels put out 0 in training
    too."""
    found: dict[str, Tensor] = {}
    for group, part in zip(channels.groups, channels.split(mask), strict=True):
        layers = group.norms or tuple(writer.removesuffix(".weight") for writer in group.writers)
        for name in (f"{layer}.{leaf}" for layer in layers for leaf in ("weight", "bias")):
            if name in params:
                found[name] = part.view(-1, *(1,) * (params[name].dim() - 1))
    return found


def channel_macs(module: nn.Module, channels: Channels, input_shape: Sequence[int]) -> Tensor:
    """Multiply-adds of one example that each channel takes part in, by the layers that write and read it: float64 [C].

    At the dense widths, where every channel of a group costs the same.
    """
    positions, costs = output_positions(module, input_shape), dict.fromkeys(channels.names, 0.0)
    for name, tensor in module.named_parameters():
        for axis in channels.axes.get(name, ()) if name in positions and tensor.dim() > 1 else ():
            if axis is not None:
                costs[axis.group] += tensor.numel() * positions[name]
    per = [torch.full((group.size,), costs[group.name] / group.size) for group in channels.groups]
    return torch.cat(per).double()
