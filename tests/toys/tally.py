"""A method with client state and two exchanges.

Every client counts its own visits and remembers the model that it last left (its state); it starts each round
halfway between that memory and the download, and predicts from there. A second exchange, "census", asks all
clients for their label counts before each stage's training. Source: none, it is a test case.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedloom.core import Batches, Context, Method, Payload, Reply, Stage, Update, tree
from fedloom.core.batches import Inputs
from fedloom.core.method import Exchange, Trip
from fedloom.core.payload import ClassRows
from fedloom.local import LocalSGD
from fedloom.merge.mean import replies_mean


@dataclass(frozen=True)
class Tally(Method):
    """See the module docstring."""

    local: LocalSGD

    reveals: ClassVar[Mapping[str, str]] = {
        "params": "a model trained on the client's data",
        "buffers": "mean and variance of the client's activations",
        "census": "how many examples of each class the client holds",
    }

    def class_rows(self, ctx: Context) -> ClassRows:
        return {**super().class_rows(ctx), ("census", "counts"): 0}

    def init_server(self, ctx: Context) -> Payload:
        return {**ctx.init_state(), "census": {"counts": torch.zeros(ctx.num_classes, dtype=torch.int64)}}

    def init_client(self, ctx: Context) -> Payload:
        return {"visits": {"count": torch.zeros((), dtype=torch.int64)}, "memory": {}}

    def send(self, server: Payload, client: int | None, ctx: Context) -> Payload:
        return {"params": server["params"], "buffers": server["buffers"]}

    def client_update(self, down: Payload, state: Payload, data: Batches, ctx: Context) -> Update:
        start = self._between(down, state)
        end = self.local({"params": start, "buffers": down["buffers"]}, data, ctx)
        visits = {"count": state["visits"]["count"] + 1}
        up = {"params": end.params, "buffers": end.buffers}
        metrics = {**end.metrics, "visits": float(visits["count"])}
        return Update({"visits": visits, "memory": end.params}, up, metrics=metrics)

    def _between(self, down: Payload, state: Payload) -> Mapping[str, Tensor]:
        if not state["memory"]:
            return down["params"]
        return tree.combine(lambda a, b: (a + b) / 2, down["params"], state["memory"])

    def predict(self, down: Payload, state: Payload, x: Inputs, ctx: Context) -> Tensor:
        return super().predict({**down, "params": self._between(down, state)}, state, x, ctx)

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

    def plan(self, stage: Stage) -> Iterable[Trip]:
        return [Trip("census", None, "all"), *super().plan(stage)]


def tally(*, local: LocalSGD) -> Tally:
    """Assemble the method."""
    return Tally(local)
