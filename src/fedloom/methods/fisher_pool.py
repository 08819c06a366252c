"""FedAvg over a pool of experts whose heads carry a running Fisher information: the base of methods that route by it.

A decision of local training (`FisherShapley`, say) reads the Fisher as it was before each batch; a carry moves it. It
lives on the server, with the clients, or nowhere between rounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from fedloom.core import Batches, Context, Payload, Reply, Update
from fedloom.core.payload import ClassRows
from fedloom.local.carries.fisher import BatchFisher, Home, ServerHome
from fedloom.local.carries.routing import routing_metrics
from fedloom.merge.mean import replies_mean
from fedloom.methods.experts import PooledFedAvg


@dataclass(frozen=True)
class FisherPool(PooledFedAvg):
    """Server: the model and, with `ServerHome`, "fisher". Client: nothing, or "fisher" with `ClientHome`.

    home: where the Fisher lives. `local` holds a `FisherShapley` decision and the carries "fisher" and "routing".
    """

    home: Home = field(default_factory=ServerHome)

    reveals: ClassVar[Mapping[str, str]] = {
        **PooledFedAvg.reveals,
        "fisher": "which classes the client holds: their rows are larger",
    }

    def class_rows(self, ctx: Context) -> ClassRows:
        """Heads and Fisher have rows per class, after the dimension of the experts."""
        return {**super().class_rows(ctx), **{("fisher", name): 1 for name in self._fisher.class_rows}}

    def init_server(self, ctx: Context) -> Payload:
        """The model, and a Fisher of zeros where the server keeps it."""
        state = ctx.init_state()
        return {**state, **self.home.on_server(self._fisher.blank(state["params"]["heads.weight"]))}

    def client_update(self, down: Payload, state: Payload, data: Batches, ctx: Context) -> Update:
        """Train with routing; every sample sees the Fisher from before its batch."""
        every = len(ctx.stage.seen) == ctx.num_classes
        rows = None if every else torch.tensor(ctx.stage.seen, device=ctx.net.forward.device)
        fisher = self.home.start(down, state, self._fisher.blank(down["params"]["heads.weight"]))
        end = self.local(down, data, ctx, ref={"fisher": fisher, "fisher_rows": rows})
        kept, up = self.home.finish(end.carry["fisher"])
        used = end.carry["routing"]
        up = {"params": end.params, "buffers": end.buffers, **up, **self.merge.extra(used)}
        return Update(kept, up, metrics={**end.metrics, **routing_metrics(used)})

    def server_update(self, server: Payload, replies: Sequence[Reply], ctx: Context) -> Payload:
        """Merge the model, and the Fisher by number of examples."""
        new = super().server_update(server, replies, ctx)
        if "fisher" not in server:
            return new
        return {**new, "fisher": replies_mean(replies, "fisher", server["fisher"], uniform=self.uniform)}

    @property
    def _fisher(self) -> BatchFisher:
        fisher = self.local.carries["fisher"]
        assert isinstance(fisher, BatchFisher)
        return fisher
