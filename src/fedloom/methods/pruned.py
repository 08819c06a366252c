"""A server that prunes channels: the base of methods in which clients train the channels of a mask, and some of theirs.

The server keeps a dense model and a mask over its channels. Clients get the block of the mask, put it into the dense
shadow that they keep, and train the channels of the mask together with those that they have re-opened. The global view
has the channels of the mask, a client's own view its re-opened ones too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from fedloom.core import Batches, ClientId, Context, Exchange, Method, ModelSpec, Payload, Reply, Stage, Trip, Update
from fedloom.core.errors import ConfigError
from fedloom.core.table import Table
from fedloom.local import LocalSGD
from fedloom.local.statistics import measured_statistics
from fedloom.merge.buffers import buffer_policy, pooled_buffers
from fedloom.methods.channel_facts import kept_channels, mask_overlaps
from fedloom.methods.channel_scores import MaskRule, ReopenRule
from fedloom.methods.subnetworks import (
    COMPACT,
    MODEL,
    OWNED,
    SHARED,
    Entry,
    Sharing,
    gathered,
    received,
    scattered,
    table,
)
from fedloom.models.channels import Channels, pack
from fedloom.models.compact import prunable
from fedloom.models.groupings import Grouping, channel_macs, coupled

POLICIES = {"mean": "mean", "pooled": "pooled", "local": "frozen", "recal": "frozen"}


@dataclass(frozen=True)
class Pruned(Method):
    """Server: the dense model, and what `rule` keeps ("mask", "scores"). Client: "params", "buffers", "scores".

    reopen: which channels outside the mask a client opens for itself, of its scores. grouping, entry: what a channel
    is, and how a part of the channels is trained; see `fedloom.models.groupings` and `subnetworks`.
    batch_norm: statistics of shared channels are "mean" or "pooled" over clients, "local" to each client, or "recal":
    "local" in training, and measured in the shared network by all clients after the last round of a stage.
    """

    local: LocalSGD
    rule: MaskRule
    reopen: ReopenRule
    grouping: Grouping = coupled
    entry: Entry = COMPACT
    sharing: Sharing = SHARED
    batch_norm: str = "mean"

    ragged: ClassVar[Collection[str]] = MODEL
    reveals: ClassVar[Mapping[str, str]] = {
        "params": "a part of a model trained on the client's data: open to gradient inversion, membership inference",
        "buffers": "mean and variance of the activations of shared channels",
        "scores": "how much the client's loss depends on each channel",
        "owned": "which channels the client has re-opened for itself",
    }

    def __post_init__(self) -> None:
        if self.batch_norm == "pooled" and self.sharing == OWNED:
            raise ConfigError(
                "method.batch_norm is pooled, but method.aggregate owned takes means over owners; reset one of the two"
            )

    def module(self, spec: ModelSpec) -> nn.Module:
        """The classifier, with a table of its channels and what they cost where the threshold asks for it."""
        shape = getattr(spec, "input_shape", None)
        module: Any = self.grouping(prunable(spec.classifier(), shape))
        if self.rule.costly:
            if shape is None:
                raise ConfigError("a threshold by operations needs the input's shape, which the model does not tell")
            module.cost = channel_macs(module, module.channels, shape)
        return module

    def init_server(self, ctx: Context) -> Payload:
        """The model, and every channel kept."""
        return {**ctx.init_state(), **self.rule.initial(table(ctx).total)}

    def send(self, server: Payload, client: ClientId | None, ctx: Context) -> Payload:
        """The block of the mask, and the mask; statistics that stay on clients are in the global view alone."""
        mask = server["mask"]["channels"]
        block = mask if client is None else self.sharing.block(mask)
        view = {**gathered(server, table(ctx).kept(block), table(ctx)), "mask": {"bits": pack(mask)}}
        if client is not None and self.batch_norm in ("local", "recal"):
            del view["buffers"]
        return view

    def own(self, down: Payload, state: Payload, ctx: Context) -> tuple[Tensor, Tensor, Payload]:
        """The mask and the client's own channels, bool [C], and its dense model: the block put into its shadow.

        Without a state, as in the global view, the channels are those of the mask.
        """
        mask, model = received(down, state, ctx)
        scores = state.get("scores", {}).get("channels")
        return mask, mask if scores is None else self.opened(scores, mask, table(ctx)), model

    def opened(self, scores: Tensor, mask: Tensor, channels: Channels) -> Tensor:
        """The mask with what a client of these scores [C] re-opens: bool [C]."""
        return mask | self.reopen(scores, mask, channels.sizes)

    def deployed(self, down: Payload, state: Payload, ctx: Context) -> Context:
        """The compact network of the view."""
        _, mine, model = self.own(down, state, ctx)
        part, inside = self.entry.enter(model, mine, ctx)
        inside.bind(part["params"], part["buffers"])
        return inside

    def trained(
        self, model: Payload, mine: Tensor, data: Batches, ctx: Context, ref: Callable[[Context], Mapping[str, Any]]
    ) -> tuple[Payload, Mapping[str, float]]:
        """The dense model after training the client's channels, and metrics. ref: of the network's context."""
        part, inside = self.entry.enter(model, mine, ctx)
        local = self.entry.training(self.local)
        end = local(part, data, inside, ref={**self.entry.ref(part, mine, ctx), **ref(inside)})
        return self.entry.leave({"params": end.params, "buffers": end.buffers}, mine, model, ctx), end.metrics

    def sent(self, model: Payload, mask: Tensor, mine: Tensor, ctx: Context) -> dict[str, Any]:
        """The upload's share of the model."""
        up = dict(self.sharing.sent(model, mask, mine, table(ctx)))
        if self.batch_norm in ("local", "recal"):
            del up["buffers"]
        return up

    def shadow(self, model: Payload, state: Payload) -> Payload:
        """The client's new state; none where nothing can ever be its own."""
        mine = self.rule.keep < 1 or self.batch_norm in ("local", "recal")
        return {**state, **model} if mine else state

    def server_update(self, server: Payload, replies: Sequence[Reply], ctx: Context) -> Payload:
        """Merge what is shared, then make a new mask where one is due."""
        mask, channels = server["mask"]["channels"], table(ctx)
        model = self.sharing.merged(replies, server, mask, channels, buffer_policy(POLICIES[self.batch_norm]))
        new = {**server, **model}
        if not self.rule.measured(ctx):
            return new
        cost = getattr(ctx.net.module, "cost", None)
        return {**new, **self.rule.updated(server, replies, channels.sizes, cost, ctx)}

    def exchanges(self) -> Mapping[str, Exchange]:
        """Training, and the measurement of statistics in the shared network."""
        found = {"train": Exchange(self.send, self.client_update, self.server_update)}
        if self.batch_norm == "recal":
            found["recalibrate"] = Exchange(self.send_shared, self.measure_statistics, self.recalibrate)
        return found

    def plan(self, stage: Stage) -> Iterable[Trip]:
        """The rounds, and the measurement where statistics are recalibrated."""
        return [*super().plan(stage), *([Trip("recalibrate", None, "all")] if self.batch_norm == "recal" else [])]

    def send_shared(self, server: Payload, client: ClientId | None, ctx: Context) -> Payload:
        """The global view, for every client."""
        return self.send(server, None, ctx)

    def measure_statistics(self, down: Payload, state: Payload, data: Batches, ctx: Context) -> Update:
        """Statistics of the shared network on the client's data; an example counts as a visit of a pass."""
        mask, _, model = self.own(down, {}, ctx)
        found = measured_statistics(self.deployed(down, {}, ctx), data)
        dense = self.entry.leave({"params": {}, "buffers": found}, mask, model, ctx)
        return Update(state, {"buffers": gathered(dense, table(ctx).kept(mask), table(ctx))["buffers"]})

    def recalibrate(self, server: Payload, replies: Sequence[Reply], ctx: Context) -> Payload:
        """Statistics of all clients' data taken together."""
        kept = table(ctx).kept(server["mask"]["channels"])
        old = gathered(server, kept, table(ctx))["buffers"]
        found = {"params": {}, "buffers": pooled_buffers(replies, old)}
        return {**server, "buffers": scattered(found, kept, server, table(ctx))["buffers"]}

    def facts(self, server: Payload, states: Mapping[ClientId, Payload], ctx: Context) -> Sequence[Table]:
        """Channels kept, and how far clients' scores and own channels agree; nothing where all are kept."""
        channels, mask, rule = table(ctx), server["mask"]["channels"], self.rule
        if rule.keep == 1:
            return []
        scores = {client: state["scores"]["channels"] for client, state in states.items() if "scores" in state}
        cost = getattr(ctx.net.module, "cost", None)
        alone = {
            k: rule.threshold(s, channels.sizes, rule.keep, cost, min_share=rule.min_share) for k, s in scores.items()
        }
        own = {client: self.opened(found, mask, channels) for client, found in scores.items()}
        return [kept_channels(mask, channels), *mask_overlaps(alone, own, mask)]
