"""One more expert per mixture-of-experts layer, added to the layer's output through a gate of its own.

Source: Liu et al., "FLEx" (arXiv 2506.00965) for the idea; the formula is ours: y = MoE(h) + sigmoid(w . h + b) P(h).
P is two linear layers in the shape of the layer's own experts, gated where these are (SwiGLU and the like).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.core.errors import ConfigError
from fedloom.core.moe import MoELayer, expert_names, need_moe_layers
from fedloom.core.tree import Tensors

GRAFTS = "grafts"  # the network's child that holds one graft per layer
ROLES = {
    "up": "up", "up_proj": "up", "wi": "up", "w3": "up", "gate_proj": "gate", "w1": "gate", "gate_up_proj": "gate_up",
    "down": "down", "down_proj": "down", "wo": "down", "w2": "down",
}  # fmt: skip
FIRST = ("gate_up", "gate", "up")  # the parts of an expert's first layer, in their order


def expert_tensors(layer: MoELayer, expert: int, params: Tensors) -> dict[str, Tensor]:
    """One expert as "up" [inner, H], "down" [H, inner] and, where it has them, "up_bias" and "down_bias".

    Of a gated expert "up" is [2 inner, H], the gate first. params: of the network. Raises `ConfigError` naming the
    tensors for experts of another make.
    """
    pieces: dict[str, Tensor] = {}
    for part in layer.experts[expert]:
        stem = part.name.removesuffix(".weight").removesuffix(".bias").removesuffix("_bias")
        role = ROLES.get(stem.rpartition(".")[2], "") + ("_bias" if part.name.endswith("bias") else "")
        pieces[role] = part.of(params)[0] if part.index else part.of(params)
    found = {}
    for bias in ("", "_bias"):
        first = [pieces[role + bias] for role in FIRST if role + bias in pieces]
        found |= {f"up{bias}": torch.cat(first)} if first else {}
        found |= {f"down{bias}": pieces[f"down{bias}"]} if f"down{bias}" in pieces else {}
    widths = (found["up"].shape[1], found["down"].shape[0]) if {"up", "down"} <= found.keys() else ()
    if widths != (layer.hidden, layer.hidden):
        names = ", ".join(part.name for part in layer.experts[expert])
        raise ConfigError(
            f"the experts of '{layer.name}' are {names}, which are not two linear layers (three where gated) from and "
            f"to {layer.hidden} features; no expert can be grafted beside them"
        )
    return found


def _gated(layer: MoELayer) -> bool:
    return any(ROLES.get(word) in ("gate", "gate_up") for part in layer.experts[0] for word in part.name.split("."))


class Graft(nn.Module):
    """sigmoid(w . h + b) * P(h) of hidden states h [..., H]. Everything starts at zero, and so does the output.

    like: tensors of an expert, see `expert_tensors`. w is `gate_weight` [H], b is `gate_bias`.
    """

    def __init__(self, like: Tensors, gated: bool, act: Callable[[Tensor], Tensor]):
        super().__init__()
        for name, tensor in like.items():
            self.register_parameter(name, nn.Parameter(torch.zeros_like(tensor, requires_grad=False)))
        self.gate_weight, self.gate_bias = (nn.Parameter(like["down"].new_zeros(n)) for n in (len(like["down"]), ()))
        self.gated, self.act = gated, act

    def inner(self, hidden: Tensor, expert: Tensors) -> Tensor:
        """What the second layer of an expert of this make reads [..., inner]."""
        first = F.linear(hidden, expert["up"], expert.get("up_bias"))
        if not self.gated:
            return self.act(first)
        gate, up = first.chunk(2, -1)
        return self.act(gate) * up

    def whole(self, hidden: Tensor, expert: Tensors) -> Tensor:
        """The output [..., H] of an expert of this make."""
        return F.linear(self.inner(hidden, expert), expert["down"], expert.get("down_bias"))

    def forward(self, hidden: Tensor) -> Tensor:
        """The output [..., H] behind the gate."""
        share = torch.sigmoid(hidden @ self.gate_weight + self.gate_bias)
        return share.unsqueeze(-1) * self.whole(hidden, dict(self.named_parameters()))


def experts_frozen(module: nn.Module, method: str) -> nn.Module:
    """The same network with frozen experts. Raises `ConfigError` for networks without experts."""
    params = dict(module.named_parameters())
    for layer in need_moe_layers(module, method):
        for name in layer.expert_names:
            params[name].requires_grad_(False)
    return module


def grafted(module: nn.Module, method: str) -> nn.Module:
    """The same network with frozen experts and a graft per layer in its child `grafts`, each of no effect yet.

    Raises `ConfigError` for networks without experts and for experts of an unknown make.
    """
    layers = need_moe_layers(module, method)
    names = expert_names(layers)
    if not names or any(".lora_" in name for name in names):
        raise ConfigError(
            f"method '{method}' grafts experts beside whole ones, and those of this network are frozen or have "
            "adapters; leave model.options.lora out, or set method.graft to none"
        )
    params, made = dict(experts_frozen(module, method).named_parameters()), []
    for layer in layers:
        block: Any = module.get_submodule(layer.name)
        made.append(Graft(expert_tensors(layer, 0, params), _gated(layer), _activation(block, layer)))
        block.register_forward_hook(partial(_add, made[-1]), with_kwargs=True)
    module.add_module(GRAFTS, nn.ModuleList(made))
    return module


def _activation(block: Any, layer: MoELayer) -> Callable[[Tensor], Tensor]:
    holder = block.experts
    if isinstance(holder, nn.ModuleDict | nn.ModuleList):
        holder = next(iter(holder.children()))
    act = getattr(holder, "act", None) or getattr(holder, "act_fn", None)
    if act is None:
        raise ConfigError(f"the experts of '{layer.name}' name no activation ('act'); none can be grafted beside them")
    return act


def _hidden(args: Any, kwargs: Mapping[str, Any]) -> Tensor:
    return args[0] if args else next(iter(kwargs.values()))


def _add(graft: Graft, block: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    first = output if isinstance(output, Tensor) else output[0]
    added = first + graft(_hidden(args, kwargs)).to(first.dtype)
    return added if isinstance(output, Tensor) else (added, *output[1:])


@contextmanager
def blocks_watched(module: Any) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Inside the block, every forward pass leaves (h, y) [tokens, H] of each layer's input and output in the list."""
    seen: list[tuple[Tensor, Tensor]] = []

    def note(block: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        first = output if isinstance(output, Tensor) else output[0]
        hidden = _hidden(args, kwargs).detach()
        seen.append(
            (hidden.reshape(-1, hidden.shape[-1]).float(), first.detach().reshape(-1, hidden.shape[-1]).float())
        )

    blocks = [module.get_submodule(layer.name) for layer in module.moe_layers]
    handles = [block.register_forward_hook(note, with_kwargs=True) for block in blocks]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
