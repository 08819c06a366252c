"""Finding the mixture-of-experts layers of a network by their structure, never by counting layers.

A layer is a module with the children `experts` and `router` or `gate`. Experts are modules (a `ModuleDict` or a
`ModuleList`: Switch Transformers) or slices of stacked tensors (Mixtral, Qwen, OLMoE, DeepSeek, our own block).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from fedloom.core.context import state_buffers
from fedloom.core.errors import ConfigError
from fedloom.core.moe import MoELayer, Slice

GATES = ("router", "gate")


def find_layers(module: nn.Module) -> tuple[MoELayer, ...]:
    """Every layer, in the order of the modules; empty where there is none.

    Raises `ConfigError` naming the module for a layer whose gate or experts are of an unknown kind, and for a top-k
    above the number of experts.
    """
    return tuple(_layer(name, block) for name, block in module.named_modules() if gate_of(block) is not None)


def gate_of(block: nn.Module) -> nn.Module | None:
    """The gate of a mixture-of-experts block; None for other modules."""
    gates = [getattr(block, name, None) for name in GATES]
    found = next((gate for gate in gates if isinstance(gate, nn.Module)), None)
    return found if isinstance(getattr(block, "experts", None), nn.Module) else None


def _layer(name: str, block: nn.Module) -> MoELayer:
    gate: Any = gate_of(block)
    which = next(child for child in GATES if getattr(block, child, None) is gate)
    matrix = next((p for p in gate.parameters() if p.dim() == 2), None)
    if matrix is None:
        raise ConfigError(
            f"the mixture-of-experts layer '{name}' has a gate ({type(gate).__name__}) without a weight [experts, "
            "hidden]; such layers are not supported"
        )
    experts, hidden = matrix.shape
    top_k = int(getattr(gate, "top_k", None) or getattr(block, "top_k", None) or 1)
    if top_k > experts:
        raise ConfigError(
            f"the mixture-of-experts layer '{name}' sends a token to {top_k} experts but has {experts}; lower its top-k"
        )
    prefix = f"{name}." if name else ""
    tensors = [*gate.named_parameters(f"{prefix}{which}"), *_floating(gate, f"{prefix}{which}")]
    rows = tuple(n for n, tensor in tensors if tensor.dim() and len(tensor) == experts)
    score = "sigmoid" if hasattr(gate, "e_score_correction_bias") else "softmax"
    slices = _experts(f"{prefix}experts", block.experts, experts)  # type: ignore[arg-type]  # gate_of has looked
    return MoELayer(name, slices, rows, top_k, hidden, score)


def _floating(module: nn.Module, prefix: str) -> list[tuple[str, Tensor]]:
    return [(name, buffer) for name, buffer in module.named_buffers(prefix) if buffer.is_floating_point()]


def _experts(prefix: str, container: nn.Module, count: int) -> tuple[tuple[Slice, ...], ...]:
    if isinstance(container, nn.ModuleDict | nn.ModuleList):
        found = [
            tuple(Slice(name) for name, _ in expert.named_parameters(f"{prefix}.{key}"))
            for key, expert in container.named_children()
        ]
        if len(found) == count:
            return tuple(found)
    else:
        parts = [_stacked(name, tensor, count) for name, tensor in container.named_parameters(prefix)]
        if parts and all(parts):
            return tuple(zip(*parts, strict=True))
    raise ConfigError(
        f"the experts '{prefix}' ({type(container).__name__}) are neither {count} modules nor tensors stacked along "
        f"{count} experts; such layers are not supported"
    )


def _stacked(name: str, tensor: Tensor, count: int) -> tuple[Slice, ...]:
    """The part of each expert in a tensor that holds all; empty where it is not made so.

    Experts lie along dimension 0; in the factors of `peft`'s adapters [E r, in] one after the other, and in those
    [out, E r] in turns.
    """
    if ".lora_B." in name:
        return tuple(Slice(name, (slice(None), slice(e, None, count))) for e in range(count))
    if not tensor.dim() or len(tensor) % count or (len(tensor) != count and ".lora_A." not in name):
        return ()
    rows = len(tensor) // count
    return tuple(Slice(name, (slice(e * rows, (e + 1) * rows),)) for e in range(count))


def travelling(module: nn.Module, layers: tuple[MoELayer, ...]) -> tuple[MoELayer, ...]:
    """The layers without the tensors that the module keeps frozen, which no message holds."""
    names = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    names |= state_buffers(module).keys()
    return tuple(
        replace(
            layer,
            experts=tuple(tuple(part for part in expert if part.name in names) for expert in layer.experts),
            gate=tuple(name for name in layer.gate if name in names),
        )
        for layer in layers
    )


def active_parameters(module: nn.Module) -> int:
    """Parameters that one token uses: all but the experts beyond the top-k of each layer; frozen ones count."""
    used = sum(parameter.numel() for parameter in module.parameters())
    for layer in find_layers(module):
        block: Any = module.get_submodule(layer.name)
        own = sum(parameter.numel() for parameter in block.experts.parameters())
        used -= own // layer.num_experts * (layer.num_experts - layer.top_k)
    return used
