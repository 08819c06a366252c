"""Compact networks: the same layers with fewer channels, and modules that can make them.

Source: structured pruning by copying the kept filters into a smaller network, as in Li et al., "Pruning Filters for
Efficient ConvNets" (ICLR 2017), section 3, with the coupling of `fedloom.models.channels`. Tensors keep their names,
so a compact network lives on payloads like any other.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fedloom.core.errors import ConfigError
from fedloom.models.channels import Channels, channels_of
from fedloom.models.gates import gated


def prunable(module: nn.Module, input_shape: Sequence[int] | None = None) -> Any:
    """The same module with what channel pruning needs.

    It gains `channels`, its table; `rebuild(widths)`, a compact module of these numbers of channels per group, which is
    prunable itself and serves `ctx.rebuild(channels.widths(kept))`; and `gated(gates)`, a context in which its channels
    are multiplied by gates, see `fedloom.models.gates.gated`. Parameters, values and the forward pass stay as they are.

    input_shape: of one example, for networks that are traced. Raises `ConfigError` where channels cannot be pruned.
    """
    channels = channels_of(module, input_shape)
    _check_trainable(module, channels)
    _check_untied(module, channels)
    return equipped(module, channels)


def compacted(module: nn.Module, channels: Channels, widths: Sequence[int]) -> nn.Module:
    """A copy of the module with the first `widths[g]` channels of each group.

    Which channels a compact network stands for is not said here: bind the values of `channels.gather` to it.
    Raises `ConfigError` for a width below 1 or above the group's size.
    """
    sizes = {group.name: group.size for group in channels.narrowed(widths).groups}
    small = copy.deepcopy(module)
    small.zero_grad(set_to_none=True)
    for name, axes in channels.axes.items():
        path, _, leaf = name.rpartition(".")
        owner = small.get_submodule(path)
        tensor = getattr(owner, leaf).detach()
        for dim, axis in enumerate(axes):
            if axis is not None:
                tensor = tensor.narrow(dim, 0, sizes[axis.group] * axis.repeat)
        _replace(owner, leaf, tensor)
        _restate(owner)
    _restate_features(small)
    return small


def equipped(module: Any, channels: Channels) -> Any:
    """The same module with another table of channels; see `prunable`."""
    # Partials rather than closures: a copy, deep or pickled, rebuilds and gates itself, not the module it was made of.
    module.channels = channels
    module.rebuild = partial(_rebuild, module)
    module.gated = partial(_gated, module)
    return module


def _rebuild(module: Any, widths: Sequence[int]) -> Any:
    return equipped(compacted(module, module.channels, widths), module.channels.narrowed(widths))


def _gated(module: Any, gates: Tensor) -> AbstractContextManager[None]:
    return gated(module, module.channels, gates)


def _check_untied(module: nn.Module, channels: Channels) -> None:
    """A tensor that two layers share would have to be cut for both, and a copy of the network shares no more."""
    if twins := shared_weights(module) & channels.axes.keys():
        raise ConfigError(
            f"'{min(twins)}' is shared with another layer of the network, so its channels cannot be pruned; give every "
            "layer weights of its own"
        )


def shared_weights(module: nn.Module) -> set[str]:
    """Names of the parameters that stand in the module under another name as well."""
    names: dict[int, list[str]] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    return {name for found in names.values() if len(found) > 1 for name in found}


def _check_trainable(module: nn.Module, channels: Channels) -> None:
    """Frozen tensors are loaded once and never travel, so nothing could tell which of their channels are kept."""
    frozen = [n for n, p in module.named_parameters() if n in channels.axes and not p.requires_grad]
    if frozen:
        raise ConfigError(
            f"'{frozen[0]}' is frozen, and pruning would change its shape; let every layer with prunable channels train"
        )


def _replace(owner: nn.Module, leaf: str, tensor: Tensor) -> None:
    last = tensor.dim() == 4 and getattr(owner, leaf).is_contiguous(memory_format=torch.channels_last)
    tensor = tensor.clone(memory_format=torch.channels_last if last else torch.contiguous_format)
    if leaf in owner._parameters:
        setattr(owner, leaf, nn.Parameter(tensor, requires_grad=getattr(owner, leaf).requires_grad))
    else:
        setattr(owner, leaf, tensor)


def _restate(layer: Any) -> None:
    """Let the sizes that a layer tells about itself follow its tensors."""
    if isinstance(layer, nn.modules.batchnorm._BatchNorm):
        tensors = (layer.weight, layer.running_mean)
        layer.num_features = next((len(t) for t in tensors if t is not None), layer.num_features)
    elif isinstance(layer, nn.Linear):
        layer.out_features, layer.in_features = layer.weight.shape
    elif hasattr(layer, "groups"):
        layer.out_channels = len(layer.weight)
        layer.groups = layer.out_channels if layer.groups > 1 else 1  # only channel-by-channel ones are in a table
        layer.in_channels = layer.weight.shape[1] * layer.groups


def _restate_features(module: Any) -> None:
    """The width of the features that a head or a gate reads, told by the classifier and by its backbone."""
    readers = (getattr(module, name, None) for name in ("head", "gate"))
    reader = next((layer for layer in readers if isinstance(layer, nn.Linear)), None)
    if reader is None:
        return
    holders: list[Any] = [module, getattr(module, "backbone", None), getattr(module, "body", None)]
    for holder in holders:
        if hasattr(holder, "num_features"):
            holder.num_features = reader.in_features
