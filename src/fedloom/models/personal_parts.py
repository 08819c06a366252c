"""Which parameters of a network a client may own: its head, and some of its experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from fedloom.core.errors import ConfigError, pick
from fedloom.core.moe import MoELayer, need_moe_layers


def last_layer(layers: Sequence[MoELayer]) -> list[str]:
    """Experts and gate of the last mixture-of-experts layer."""
    return [*layers[-1].expert_names, *layers[-1].gate]


def every_expert(layers: Sequence[MoELayer]) -> list[str]:
    """The experts of every layer, without the gates."""
    return [name for layer in layers for name in layer.expert_names]


SCOPES: dict[str, Callable[[Sequence[MoELayer]], list[str]] | None] = {
    "head": None,
    "last_moe": last_layer,
    "experts": every_expert,
}


def personal_names(module: nn.Module, scope: str, method: str) -> tuple[str, ...]:
    """Names of the trainable parameters in a scope, in the network's order.

    scope: "head", the parameters with one row per class, or those of the child `head` where none has such rows;
    "last_moe" and "experts" add those of mixture-of-experts layers. Raises `ConfigError` where the network has no such
    part.
    """
    experts = pick("scope", scope, SCOPES)
    chosen = set(getattr(module, "class_rows", {})) or {
        n for n, _ in module.named_parameters() if n.startswith("head.")
    }
    if experts is not None:
        chosen |= set(experts(need_moe_layers(module, f"{method} with scope {scope}")))
    found = tuple(name for name, param in module.named_parameters() if name in chosen and param.requires_grad)
    if not found:
        raise ConfigError(
            f"scope is {scope}, and {type(module).__name__} has no trainable parameter in it; take a network with a "
            "head (a child of that name), or one with experts and scope: experts"
        )
    return found
