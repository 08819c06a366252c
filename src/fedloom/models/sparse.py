"""Networks with single weights removed: which weights may go, what each costs, and how such a model is stored.

A sparse model is a payload of three fields: "params" (tensors that stay whole), "values" (name -> [k], the kept weights
in the order of the tensor) and "bits" (name -> uint8, where they stand, see `fedloom.models.channels.pack`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from fedloom.core.errors import ConfigError, PayloadError
from fedloom.core.payload import Payload
from fedloom.core.tree import Tensors
from fedloom.models.areas import output_positions
from fedloom.models.channels import pack, unpack
from fedloom.models.compact import shared_weights

Times = Callable[[nn.Module, Sequence[int] | None], dict[str, float]]


def sparse_layers(module: nn.Module) -> dict[str, nn.Module]:
    """Name of a weight -> its layer, for trainable convolutions and linear layers that have no class rows (the head).

    Raises `ConfigError` where there are none.
    """
    rows: Mapping[str, int] = getattr(module, "class_rows", {})
    found: dict[str, nn.Module] = {}
    for name, layer in module.named_modules():
        weight = f"{name}.weight" if name else "weight"
        if isinstance(layer, nn.Linear | _ConvNd) and layer.weight.requires_grad and weight not in rows:
            found[weight] = layer
    if twins := shared_weights(module) & found.keys():
        raise ConfigError(
            f"'{min(twins)}' is shared with another layer of the network, so its weights cannot be pruned one by one; "
            "give every layer weights of its own"
        )
    if not found:
        raise ConfigError(
            f"{type(module).__name__} has no convolution or linear layer besides the head, so no weights to prune; "
            "take a network with hidden layers"
        )
    return found


def by_macs(module: nn.Module, input_shape: Sequence[int] | None) -> dict[str, float]:
    """How often one example multiplies with every weight of a layer: the positions of its output."""
    if input_shape is None:
        raise ConfigError("time by operations needs the input's shape, which the model does not tell; set time=uniform")
    try:
        found = output_positions(module, input_shape)
    except Exception as error:  # of the network, which reads something else (texts, say)
        raise ConfigError(
            f"the operations of {type(module).__name__} cannot be counted, as it fails on a tensor of zeros "
            f"({type(error).__name__}: {error}); set time=uniform"
        ) from error
    return {name: float(found.get(name, 1)) for name in sparse_layers(module)}


def uniform(module: nn.Module, input_shape: Sequence[int] | None) -> dict[str, float]:
    """1 for every weight."""
    return dict.fromkeys(sparse_layers(module), 1.0)


TIMES: dict[str, Times] = {"macs": by_macs, "uniform": uniform}


def nonzero_parameters(module: nn.Module) -> int:
    """Number of parameters, of weights that may be pruned those that are not 0."""
    may = sparse_layers(module)
    return sum(int(p.count_nonzero()) if name in may else p.numel() for name, p in module.named_parameters())


def kept(params: Tensors, masks: Tensors) -> dict[str, dict[str, Tensor]]:
    """Dense parameters -> "params" and "values": what a receiver needs who knows the masks (bool, by name)."""
    return {
        "params": {name: tensor for name, tensor in params.items() if name not in masks},
        "values": {name: params[name].masked_select(mask) for name, mask in masks.items()},
    }


def packed(params: Tensors, masks: Tensors) -> dict[str, dict[str, Tensor]]:
    """Dense parameters -> the three fields, with the weights where `masks` are true."""
    return {**kept(params, masks), "bits": {name: pack(mask.flatten()) for name, mask in masks.items()}}


def opened(model: Payload, shapes: Mapping[str, Sequence[int]]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The three fields -> dense parameters, 0 where nothing is kept, and masks.

    shapes: of the dense tensors. Raises `PayloadError` where values and bits do not fit each other.
    """
    params, masks = dict(model["params"]), dict[str, Tensor]()
    for name, values in model["values"].items():
        dense = values.new_zeros(*shapes[name])
        mask = unpack(model["bits"][name], dense.numel())
        if len(mask) != dense.numel() or int(mask.sum()) != len(values):
            raise PayloadError(
                f"'{name}' came with {len(values)} values for {int(mask.sum())} places that its bits name"
            )
        masks[name] = mask.view(dense.shape)
        params[name] = dense.masked_scatter_(masks[name], values)
    return params, masks
