"""Clients that hold a part of every layer's experts: how a network is bound to it, and what a finished run tells.

What is held is bool [L, E], see `fedloom.merge.held_experts`. A client binds the whole network, with zeros in place of
what it lacks, and routes among the experts that it holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from fedloom.core import ClientId, Context, Payload, Reply, Table
from fedloom.core.context import state_buffers
from fedloom.core.moe import MoELayer, moe_layers
from fedloom.merge.held_experts import held_means, layout
from fedloom.merge.mean import reply_trees
from fedloom.methods.channel_facts import overlaps

MODEL = ("params", "buffers")


def held_part(model: Payload, held: Tensor, ctx: Context) -> dict[str, dict[str, Tensor]]:
    """What of a whole model is held."""
    layers = moe_layers(ctx.net.module)
    return {field: layout(layers, model[field]).cut(model[field], held) for field in MODEL}


def whole_model(part: Payload, held: Tensor, ctx: Context) -> dict[str, dict[str, Tensor]]:
    """A part in the shapes of the network: zeros for what is not held.

    A buffer with a row per expert may decide which is chosen (DeepSeek-V3), so its other rows lie below those held.
    """
    module, trainable = ctx.net.module, set(ctx.net.trainable)
    like = {
        "params": {name: p.detach() for name, p in module.named_parameters() if name in trainable},
        "buffers": state_buffers(module),
    }
    layers = moe_layers(module)
    return {f: layout(layers, like[f]).filled(part[f], held, like[f], below=f == "buffers") for f in MODEL}


def merged_parts(
    server: Payload, replies: Sequence[Reply], held: Sequence[Tensor], use: Sequence[Tensor], ctx: Context
) -> dict[str, dict[str, Tensor]]:
    """The model: `held_means` of the replies' parts. held: bool [L, E], use: [L, E] of every reply."""
    layers, new = moe_layers(ctx.net.module), {}
    for field in MODEL:
        trees, weights, who = reply_trees(replies, field)
        new[field] = held_means(trees, weights, server[field], held, use, layers, who=who)
    return new


def restricted(ctx: Context, held: Tensor | None) -> AbstractContextManager[None]:
    """Inside, no token reaches an expert outside bool [L, E]; None: every expert is open."""
    if held is None:
        return nullcontext()
    module: Any = ctx.net.module
    inside: AbstractContextManager[None] = module.restricted(held.to(ctx.net.forward.device))
    return inside


def entropy(use: Tensor) -> float:
    """Of the shares in use [L, E], in nats, the mean over layers; 0 for a layer without any."""
    shares = use.double() / use.double().sum(1, keepdim=True).clamp(min=1e-12)
    return float(torch.special.entr(shares).sum(1).mean())


def expert_facts(held: Mapping[ClientId, Tensor], layers: Sequence[MoELayer]) -> list[Table]:
    """How many experts of each layer the clients hold, bool [L, E] each, and how far their sets agree."""
    if not held:
        return []
    columns = [f"{layer.name} of {layer.num_experts}" for layer in layers]
    values: list[list[float | None]] = [list(mine.sum(1).tolist()) for mine in held.values()]
    note = "At the end of the run. A client that has never taken part, or only before sets were chosen, has none."
    found = [Table("Experts held by the clients", ("client", "layer"), list(held), columns, values, note)]
    if len(held) > 1:
        flat = {client: mine.flatten() for client, mine in held.items()}
        found.append(overlaps("Overlap of the clients' experts", flat, "Over the experts of all layers."))
    return found
