"""FedAvg over a pool of experts whose heads carry a running Fisher information: the base of methods that route by it.

A decision of local training (`FisherShapley`, say) reads the Fisher as it was before each batch; a carry moves it. It
lives on the server, with the clients, or nowhere between rounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from fedloom.core import Batches, ClientId, Context, Payload, Reply, Table, Update
from fedloom.core.moe import moe_layers
from fedloom.core.payload import ClassRows
from fedloom.local.carries.fisher import BatchFisher, Home, ServerHome
from fedloom.local.carries.routing import routing_metrics
from fedloom.merge.mean import replies_mean
from fedloom.methods.alignment import CONSENSUS, REVEALS, Alignment
from fedloom.methods.experts import PooledFedAvg
from fedloom.methods.routing_facts import routing_tables
from fedloom.methods.routing_memory import recalled, remembered


@dataclass(frozen=True)
class FisherPool(PooledFedAvg):
    """Server: the model, with `ServerHome` "fisher", and with an alignment "consensus". Client: nothing, or "fisher"
    with `ClientHome`, and the fields of `routing_memory`.

    home: where the Fisher lives. `local` holds a `FisherShapley` decision and the carries "fisher" and "routing"; with
    the carry "routing_average" clients remember their routing.
    alignment: of the gate; its statistics are also those of `MergeBySemantics`, and it needs `chosen`. None for none.
    """

    home: Home = field(default_factory=ServerHome)
    alignment: Alignment | None = None

    reveals: ClassVar[Mapping[str, str]] = {
        **PooledFedAvg.reveals,
        **REVEALS,
        "fisher": "which classes the client holds: their rows are larger",
    }

    def class_rows(self, ctx: Context) -> ClassRows:
        """Heads and Fisher have rows per class, after the dimension of the experts."""
        return {**super().class_rows(ctx), **{("fisher", name): 1 for name in self._fisher.class_rows}}

    def init_server(self, ctx: Context) -> Payload:
        """The model, and a Fisher of zeros where the server keeps it."""
        state = ctx.init_state()
        aligned = {} if self.alignment is None else self.alignment.blank(ctx)
        return {**state, **self.home.on_server(self._fisher.blank(state["params"]["heads.weight"])), **aligned}

    def send(self, server: Payload, client: ClientId | None, ctx: Context) -> Payload:
        """All of the server's state, of a consensus the client's part; the global view is the model alone."""
        sent = super().send(server, client, ctx)
        if self.alignment is None:
            return sent
        rest = {name: tree for name, tree in sent.items() if name != CONSENSUS}
        return {**rest, **self.alignment.sent(server, client, ctx)}

    def client_update(self, down: Payload, state: Payload, data: Batches, ctx: Context) -> Update:
        """Train with routing; every sample sees the Fisher from before its batch."""
        every = len(ctx.stage.seen) == ctx.num_classes
        rows = None if every else torch.tensor(ctx.stage.seen, device=ctx.net.forward.device)
        fisher = self.home.start(down, state, self._fisher.blank(down["params"]["heads.weight"]))
        ref: dict[str, Any] = {"fisher": fisher, "fisher_rows": rows, **recalled(state, ctx)}
        aligned: Payload = {}
        if self.alignment is None:
            end = self.local(down, data, ctx, ref=ref)
        else:
            end, aligned = self.alignment.trained(self.local, down, data, ctx, ref)
        kept, up = self.home.finish(end.carry["fisher"])
        kept, used = {**kept, **remembered(end.carry, ref, ctx)}, end.carry["routing"]
        up = {"params": end.params, "buffers": end.buffers, **up, **self.merge.extra(used), **aligned}
        return Update(kept, up, metrics={**end.metrics, **routing_metrics(used)})

    def server_update(self, server: Payload, replies: Sequence[Reply], ctx: Context) -> Payload:
        """Merge the model, and the Fisher by number of examples."""
        new = super().server_update(server, replies, ctx)
        if self.alignment is not None:
            agreed = self.alignment.agreed(server, replies, self.uniform)
            new = {**new, **self.alignment.remembered(server, agreed)}
        if "fisher" not in server:
            return new
        return {**new, "fisher": replies_mean(replies, "fisher", server["fisher"], uniform=self.uniform)}

    def facts(self, server: Payload, states: Mapping[ClientId, Payload], ctx: Context) -> Sequence[Table]:
        """The clients' routing, where it is measured."""
        return routing_tables(server[CONSENSUS], {}, moe_layers(ctx.net.module)) if CONSENSUS in server else ()

    @property
    def _fisher(self) -> BatchFisher:
        fisher = self.local.carries["fisher"]
        assert isinstance(fisher, BatchFisher)
        return fisher
