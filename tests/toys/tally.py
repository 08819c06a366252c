"""A method with client state and two exchanges.

Every client counts its own visits and remembers the model that it last left (its state); it starts each round
halfway between that memory and the download. A second exchange, "census", asks all clients for their label
counts before each stage's training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from fedloom.core import Batches, Context, Method, Payload, Reply, Update
from fedloom.core import tree
from fedloom.core.method import Exchange, Trip
from fedloom.local import LocalSGD
from fedloom.merge.mean import replies_mean


@dataclass(frozen=True)
class Tally(Method):
    local: LocalSGD

    def class_rows(self, ctx: Context):
        return {**super().class_rows(ctx), ("census", "counts"): 0}

    def init_server(self, ctx: Context) -> Payload:
        return {**ctx.init_state(), "census": {"counts": torch.zeros(ctx.num_classes, dtype=torch.int64)}}

    def init_client(self, ctx: Context) -> Payload:
        return {"visits": {"count": torch.zeros((), dtype=torch.int64)}, "memory": {}}

    def send(self, server: Payload, client: int | None, ctx: Context) -> Payload:
        return {"params": server["params"], "buffers": server["buffers"]}

    def client_update(self, down: Payload, state: Payload, data: Batches, ctx: Context) -> Update:
        start = down["params"]
        if state["memory"]:
            start = tree.combine(lambda a, b: (a + b) / 2, start, state["memory"])
        end = self.local({"params": start, "buffers": down["buffers"]}, data, ctx)
        visits = {"count": state["visits"]["count"] + 1}
        up = {"params": end.params, "buffers": end.buffers}
        return Update({"visits": visits, "memory": end.params}, up, metrics={**end.metrics, "visits": float(visits["count"])})

    def server_update(self, server: Payload, replies: Sequence[Reply], ctx: Context) -> Payload:
        return {**server, **{f: replies_mean(replies, f, server[f]) for f in ("params", "buffers")}}

    def _count(self, down: Payload, state: Payload, data: Batches, ctx: Context) -> Update:
        counts = torch.bincount(data.labels, minlength=ctx.num_classes)
        return Update(state, {"census": {"counts": counts}}, weight=1.0)

    def _add(self, server: Payload, replies: Sequence[Reply], ctx: Context) -> Payload:
        total = sum((reply.up["census"]["counts"] for reply in replies), server["census"]["counts"])
        return {**server, "census": {"counts": total}}

    def exchanges(self) -> Mapping[str, Exchange]:
        return {**super().exchanges(), "census": Exchange(lambda server, client, ctx: {}, self._count, self._add)}

    def plan(self, stage):
        return [Trip("census", None, "all"), *super().plan(stage)]


def tally(*, local: LocalSGD) -> Tally:
    return Tally(local)
