"""Where a network keeps its experts, and what it tells about its routing.

A network with mixture-of-experts layers has the attribute `moe_layers`, a tuple of `MoELayer`. Beside its "logits" it
returns, with L layers, T tokens (all positions of the batch, row by row) and E experts per layer:

- "routing" [L, T, E]: log p(e|t), fp32, with gradient: of the softmax, or of the scores of a sigmoid router divided by
  their sum;
- "selected" [L, T, E], bool: the router's choice;
- "dispatched" [L, T, E], bool: d(e|t), the chosen experts that really processed the token (a capacity drops some);
- "token_mask" [T], bool: False for padding, which never counts;
- inside `inputs_recorded(module)` also "expert_inputs" [L, T, H]: what router and experts read, without gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from fedloom.core.errors import ConfigError
from fedloom.core.tree import Tensors

ROUTING = ("routing", "selected", "dispatched", "token_mask")


class Slice(NamedTuple):
    """The part of a tensor that belongs to one expert: tensor[index]; an empty index is the whole tensor."""

    name: str
    index: tuple[slice, ...] = ()  # type: ignore[assignment]  # hides tuple.index, which nobody needs here

    def of(self, tree: Tensors) -> Tensor:
        """The part of the tree's tensor of that name: a view."""
        tensor = tree[self.name]
        return tensor[self.index] if self.index else tensor


@dataclass(frozen=True)
class MoELayer:
    """One mixture-of-experts layer of a network.

    name: of its module. experts: per expert, its slices; experts that every token passes (shared experts) are none of
    them. gate: tensors (parameters and floating buffers) whose dimension 0 is the expert. top_k: experts per token.
    score: "softmax" or "sigmoid". hidden: width H of what router and experts read.
    """

    name: str
    experts: tuple[tuple[Slice, ...], ...]
    gate: tuple[str, ...]
    top_k: int
    hidden: int
    score: str = "softmax"

    @property
    def num_experts(self) -> int:
        """Number of routed experts."""
        return len(self.experts)

    @property
    def expert_names(self) -> tuple[str, ...]:
        """Names of the tensors that hold experts, each once, in order."""
        return tuple(dict.fromkeys(part.name for expert in self.experts for part in expert))

    def prefixed(self, prefix: str) -> MoELayer:
        """The layer as a larger network names it."""
        experts = tuple(tuple(Slice(prefix + name, index) for name, index in expert) for expert in self.experts)
        gate = tuple(prefix + name for name in self.gate)
        return MoELayer(prefix + self.name, experts, gate, self.top_k, self.hidden, self.score)


def moe_layers(module: nn.Module, prefix: str = "") -> tuple[MoELayer, ...]:
    """The layers of a network, as one that holds it under `prefix` names them; empty where it has none."""
    found: tuple[MoELayer, ...] = getattr(module, "moe_layers", ())
    return tuple(layer.prefixed(prefix) for layer in found) if prefix else found


def expert_parts(module: nn.Module) -> tuple[tuple[Slice, ...], ...]:
    """Per routed expert of a network, its slices: those of its `moe_layers`, and those that a module inside names.

    A module whose experts are routed but not told in the form above (one decision per sample, say) has the attribute
    `expert_parts`: the same as here, with names of its own.
    """
    told = [expert for layer in moe_layers(module) for expert in layer.experts]
    for name, part in module.named_modules():
        prefix = f"{name}." if name else ""
        own: tuple[tuple[Slice, ...], ...] = getattr(part, "expert_parts", ())
        told += [tuple(Slice(prefix + piece.name, piece.index) for piece in expert) for expert in own]
    return tuple(told)


def gate_names(layers: Iterable[MoELayer]) -> frozenset[str]:
    """Names of all tensors of gates."""
    return frozenset(name for layer in layers for name in layer.gate)


def expert_names(layers: Iterable[MoELayer]) -> frozenset[str]:
    """Names of all tensors that hold experts."""
    return frozenset(name for layer in layers for name in layer.expert_names)


def need_moe_layers(module: nn.Module, method: str) -> tuple[MoELayer, ...]:
    """The layers of a network that must have some, all with the same number of experts and hidden width.

    Raises `ConfigError` naming the method otherwise.
    """
    layers = moe_layers(module)
    if not layers:
        raise ConfigError(
            f"method '{method}' needs a network with mixture-of-experts layers, and {type(module).__name__} has none; "
            "set model.name to moe_mlp, switch_encoder or a mixture-of-experts model of transformers, give a dense one "
            "experts with model.options.upcycle, or let a network of your own say moe_layers (docs/moe.md)"
        )
    shapes = sorted({(layer.num_experts, layer.hidden) for layer in layers})
    if len(shapes) > 1:
        raise ConfigError(
            f"method '{method}' needs layers of one shape, and those of {type(module).__name__} have (experts, hidden "
            f"width) {', '.join(map(str, shapes))}; take a model whose layers are alike"
        )
    return layers


@contextmanager
def inputs_recorded(module: Any) -> Iterator[None]:
    """Inside the block the network also returns "expert_inputs"."""
    before = getattr(module, "records_inputs", False)
    module.records_inputs = True
    try:
        yield
    finally:
        module.records_inputs = before
