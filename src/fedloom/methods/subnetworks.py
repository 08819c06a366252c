"""Clients that train a part of a network's channels: how a dense model is entered and left.

The network of the process is prunable (`fedloom.models.compact.prunable`). "compact" cuts every tensor, so parameters,
operations, memory and time fall; "masked" trains the dense network with the other channels switched off, for tables of
channels from which no compact network can be made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from fedloom.core import Context, Payload, Reply
from fedloom.local import LocalSGD
from fedloom.local.transforms.masked import MaskedGradients
from fedloom.merge.buffers import BufferPolicy
from fedloom.merge.by_index import indexed_mean
from fedloom.merge.mean import replies_mean, reply_trees
from fedloom.models.channels import Channels, Kept, pack, unpack
from fedloom.models.groupings import switched_off, switches

MODEL = ("params", "buffers")


def table(ctx: Context) -> Channels:
    """The channels of the dense network."""
    module: Any = ctx.net.module
    channels: Channels = module.channels
    return channels


def gathered(model: Payload, kept: Kept, channels: Channels) -> dict[str, dict[str, Tensor]]:
    """Dense -> compact parameters and buffers."""
    return {field: channels.gather(model[field], kept) for field in MODEL}


def scattered(part: Payload, kept: Kept, into: Payload, channels: Channels) -> dict[str, dict[str, Tensor]]:
    """Compact -> dense: the model `into` with the entries of the kept channels replaced by those of `part`."""
    return {field: channels.scatter(part.get(field, {}), kept, into[field]) for field in MODEL}


def dense(part: Payload, model: Payload) -> bool:
    """Whether the parameters have the shapes of the dense model's."""
    return all(tensor.shape == model["params"][name].shape for name, tensor in part["params"].items())


def received(down: Payload, state: Payload, ctx: Context) -> tuple[Tensor, Payload]:
    """The mask of what was sent, bool [C], and the client's dense model: the block put into the shadow in its state.

    A client without a shadow yet starts from the initial values, the global view from what the network holds.
    """
    channels = table(ctx)
    mask, before = unpack(down["mask"]["bits"], channels.total), state
    if "params" not in state:
        before = ctx.init_state() if ctx.client is not None else dict(zip(MODEL, ctx.net.take(), strict=True))
    block = torch.ones_like(mask) if dense(down, before) else mask
    return mask, scattered(down, channels.kept(block), before, channels)


class Entry(Protocol):
    """How a part of the channels is trained and served."""

    def enter(self, model: Payload, mask: Tensor, ctx: Context) -> tuple[Payload, Context]:
        """The model to train or serve, of a dense one and bool [C], and the context of its network."""
        ...

    def leave(self, end: Payload, mask: Tensor, into: Payload, ctx: Context) -> Payload:
        """The dense model after training: `into` with what was trained. ctx: of the dense network."""
        ...

    def within(self, mask: Tensor) -> Tensor:
        """bool [C]: the channels that the network it trains has."""
        ...

    def ref(self, model: Payload, mask: Tensor, ctx: Context) -> Mapping[str, Any]:
        """What the training loop reads, of the model to train."""
        ...

    def training(self, local: LocalSGD) -> LocalSGD:
        """The training loop that goes with it."""
        ...


@dataclass(frozen=True)
class Compact:
    """A compact network."""

    def enter(self, model: Payload, mask: Tensor, ctx: Context) -> tuple[Payload, Context]:
        """Cut tensors, and a network of their shapes."""
        channels = table(ctx)
        kept = channels.kept(mask)
        inside = ctx if bool(mask.all()) else ctx.rebuild(channels.widths(kept))
        return gathered(model, kept, channels), inside

    def leave(self, end: Payload, mask: Tensor, into: Payload, ctx: Context) -> Payload:
        """Put the tensors back."""
        return scattered(end, table(ctx).kept(mask), into, table(ctx))

    def within(self, mask: Tensor) -> Tensor:
        """Those of the mask."""
        return mask

    def ref(self, model: Payload, mask: Tensor, ctx: Context) -> Mapping[str, Any]:
        """Nothing."""
        return {}

    def training(self, local: LocalSGD) -> LocalSGD:
        """As it is: what was cut cannot move."""
        return local


@dataclass(frozen=True)
class Masked:
    """The dense network with the other channels switched off; their entries of the model stay as they were."""

    def enter(self, model: Payload, mask: Tensor, ctx: Context) -> tuple[Payload, Context]:
        """Norms of the other channels are 0."""
        params = switched_off(dict(model["params"]), table(ctx), mask)
        return {"params": params, "buffers": model["buffers"]}, ctx

    def leave(self, end: Payload, mask: Tensor, into: Payload, ctx: Context) -> Payload:
        """Only what belongs to kept channels is taken."""
        kept = table(ctx).kept(mask)
        return scattered(gathered(end, kept, table(ctx)), kept, into, table(ctx))

    def within(self, mask: Tensor) -> Tensor:
        """All."""
        return torch.ones_like(mask)

    def ref(self, model: Payload, mask: Tensor, ctx: Context) -> Mapping[str, Any]:
        """The masks of the gradients."""
        return {"masks": switches(model["params"], table(ctx), mask)}

    def training(self, local: LocalSGD) -> LocalSGD:
        """Gradients of channels that are off are 0; otherwise their norms would bring them back."""
        return replace(local, transforms=(*local.transforms, MaskedGradients()))


COMPACT, MASKED = Compact(), Masked()
ENTRIES: dict[str, Entry] = {"coupled": COMPACT, "internal": COMPACT, "conv_out": MASKED}


class Sharing(Protocol):
    """Which of a client's channels the server averages."""

    def block(self, mask: Tensor) -> Tensor:
        """bool [C]: the channels that a client is sent."""
        ...

    def sent(self, model: Payload, shared: Tensor, mine: Tensor, channels: Channels) -> Payload:
        """Fields of the upload, of the client's dense model; shared, mine: bool [C], those of the mask and its own."""
        ...

    def merged(
        self, replies: Sequence[Reply], server: Payload, shared: Tensor, channels: Channels, buffers: BufferPolicy
    ) -> Payload:
        """The dense model of the server."""
        ...


@dataclass(frozen=True)
class SharedOnly:
    """The block of shared channels on both sides of every tensor; what touches another one stays with the client."""

    def block(self, mask: Tensor) -> Tensor:
        """Those of the mask."""
        return mask

    def sent(self, model: Payload, shared: Tensor, mine: Tensor, channels: Channels) -> Payload:
        """The block."""
        return gathered(model, channels.kept(shared), channels)

    def merged(
        self, replies: Sequence[Reply], server: Payload, shared: Tensor, channels: Channels, buffers: BufferPolicy
    ) -> Payload:
        """Means over clients of the block; all else as it was."""
        kept = channels.kept(shared)
        old = gathered(server, kept, channels)
        params = replies_mean(replies, "params", old["params"])
        return scattered({"params": params, "buffers": buffers(replies, old["buffers"])}, kept, server, channels)


@dataclass(frozen=True)
class Owned:
    """Everything that a client trains, with "owned" {"bits"} that tell what it is; entries are means over owners."""

    def block(self, mask: Tensor) -> Tensor:
        """All: nothing is a client's own, so whatever it opens it has from the server."""
        return torch.ones_like(mask)

    def sent(self, model: Payload, shared: Tensor, mine: Tensor, channels: Channels) -> Payload:
        """The client's network, and which channels it has."""
        return {**gathered(model, channels.kept(mine), channels), "owned": {"bits": pack(mine)}}

    def merged(
        self, replies: Sequence[Reply], server: Payload, shared: Tensor, channels: Channels, buffers: BufferPolicy
    ) -> Payload:
        """Means over owners, statistics too."""
        kept = [channels.kept(unpack(reply.up["owned"]["bits"], channels.total)) for reply in replies]
        found = {}
        for field in MODEL:
            trees, weights, who = reply_trees(replies, field)
            named = [{n: channels.index(n, part) or () for n in server[field]} for part in kept]
            found[field] = indexed_mean(trees, named, weights, server[field], who=who)
        return found


SHARED, OWNED = SharedOnly(), Owned()
SHARINGS: dict[str, Sharing] = {"shared": SHARED, "owned": OWNED}
