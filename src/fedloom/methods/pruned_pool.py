"""FEDFIP's masks on the backbone of a pool of experts: clients train, send and serve the channels of one mask.

What `FisherPool` does happens in the compact network of the mask, the merge of experts included. As in FEDFIP
(`fedloom.methods.fedfip`) clients score every channel by squared gate gradients at the end of training, here of the
loss of the mixture that serves, and keep a dense shadow, by which what was pruned can return. Differs: no channel is
private, since a pool serves one model to all; scores are over all examples of a client, whatever their domain; there is
no structural contrast. With one expert, whose head reads the features, and without terms of the gate it is FEDFIP
without contrast and private channels.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn

from fedloom.core import Batches, ClientId, Context, ModelSpec, Payload, Reply, Table, Update
from fedloom.core.batches import Inputs
from fedloom.core.errors import ConfigError
from fedloom.local.gate_fisher import gate_fisher
from fedloom.methods.channel_facts import kept_channels
from fedloom.methods.channel_scores import MaskRule
from fedloom.methods.fisher_pool import FisherPool
from fedloom.methods.pruned import Pruned
from fedloom.methods.subnetworks import COMPACT, MODEL, dense, gathered, received, scattered, table
from fedloom.models.channels import pack, unpack
from fedloom.models.compact import prunable
from fedloom.models.experts import Widths
from fedloom.select.channels import group_mean


@dataclass(frozen=True, kw_only=True)
class PrunedPool(FisherPool):
    """Server: the fields of `FisherPool`, and what `rule` keeps ("mask", "scores"). Client: also "params", "buffers".

    samples: most examples by which a client scores its channels.
    """

    rule: MaskRule
    samples: int = 512

    ragged: ClassVar[Collection[str]] = MODEL
    reveals: ClassVar[Mapping[str, str]] = {**FisherPool.reveals, "scores": Pruned.reveals["scores"]}

    def module(self, spec: ModelSpec) -> nn.Module:
        """The pool, with the table of its backbone's channels."""
        module: nn.Module = prunable(super().module(spec))
        return module

    def init_server(self, ctx: Context) -> Payload:
        """That of the pool, and every channel kept."""
        return {**super().init_server(ctx), **self.rule.initial(table(ctx).total)}

    def send(self, server: Payload, client: ClientId | None, ctx: Context) -> Payload:
        """What the pool sends, of the model the block of the mask, and the mask."""
        mask = server["mask"]["channels"]
        sent = {field: tree for field, tree in super().send(server, client, ctx).items() if field != "scores"}
        return {**sent, **gathered(server, table(ctx).kept(mask), table(ctx)), "mask": {"bits": pack(mask)}}

    def client_update(self, down: Payload, state: Payload, data: Batches, ctx: Context) -> Update:
        """Train the compact pool, and score all channels of the dense one where the server will read it."""
        mask, model = received(down, state, ctx)
        part, inside = COMPACT.enter(model, mask, ctx)
        update = super().client_update({**down, **part}, state, data, inside)
        model = COMPACT.leave({field: update.up[field] for field in MODEL}, mask, model, ctx)
        up: dict[str, Any] = dict(update.up)
        if self.rule.measured(ctx) and len(data):
            ctx.bind(model["params"], model["buffers"])
            found = gate_fisher(ctx, data, mask.float(), samples=self.samples)
            up["scores"] = {"channels": found.float()}
        return update._replace(state={**update.state, **model}, up=up)

    def server_update(self, server: Payload, replies: Sequence[Reply], ctx: Context) -> Payload:
        """Merge in the compact pool, then make a new mask where one is due."""
        channels = table(ctx)
        kept = channels.kept(server["mask"]["channels"])
        new = super().server_update({**server, **gathered(server, kept, channels)}, replies, ctx)
        new = {**new, **scattered(new, kept, server, channels)}
        masks = self.rule.updated(server, replies, channels.sizes, None, ctx) if self.rule.measured(ctx) else {}
        return {**new, **masks}

    def predict(self, down: Payload, state: Payload, x: Inputs, ctx: Context) -> Tensor:
        """Scores of the compact pool."""
        return super().predict(down, state, x, self._inside(down, ctx))

    def deployed(self, down: Payload, state: Payload, ctx: Context) -> Context:
        """The compact pool."""
        return super().deployed(down, state, self._inside(down, ctx))

    def facts(self, server: Payload, states: Mapping[ClientId, Payload], ctx: Context) -> Sequence[Table]:
        """Channels kept, then the clients' routing where it is measured."""
        return [kept_channels(server["mask"]["channels"], table(ctx)), *super().facts(server, states, ctx)]

    def _inside(self, down: Payload, ctx: Context) -> Context:
        if dense(down, {"params": dict(ctx.net.module.named_parameters())}):
            return ctx
        channels = table(ctx)
        mask = unpack(down["mask"]["bits"], channels.total)
        return ctx.rebuild(channels.widths(channels.kept(mask)))


def masked_pool(keep: float, body: Widths, home: str) -> Callable[..., PrunedPool]:
    """What builds a pool whose mask keeps this share of the channels, by FEDFIP's defaults.

    Raises `ConfigError` for heads that read the features: their Fisher would change its size with every mask, unless it
    begins anew in every round (home "reset").
    """
    if body == "identity" and home != "reset":
        raise ConfigError(
            f"method.keep_channels {keep} needs experts with a body, since the Fisher of heads that read the features "
            f"would change its size with the mask; set method.body to mlp, or method.fisher_home '{home}' to reset"
        )
    return partial(PrunedPool, rule=MaskRule(keep, group_mean))
