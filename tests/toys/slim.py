"""Clients train networks of different widths (`ctx.rebuild`) and the server merges them by index.

Client i keeps hidden units i mod 2, i mod 2 + 2, ... when its width is half, and all of them when it is whole.
Source: none, it is a test case; width-scaled clients are the idea of HeteroFL (Diao et al. 2021).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from fedloom.core import Batches, Context, Method, ModelSpec, Payload, Reply, Update
from fedloom.core.seeds import seeded
from fedloom.local import LocalSGD
from fedloom.merge.by_index import Index, indexed_mean, take_part


class SlimNet(nn.Module):
    """Linear -> ReLU -> fixed-width head, in any width."""

    class_rows = {"head.weight": 0, "head.bias": 0}

    def __init__(self, width: int, num_classes: int, seed: int):
        super().__init__()
        self.width, self.num_classes, self.seed = width, num_classes, seed
        with seeded(seed, "slim", width):
            self.body, self.head = nn.Linear(2, width), nn.Linear(width, num_classes)

    def rebuild(self, width: int) -> SlimNet:
        """The same network in another width."""
        return SlimNet(width, self.num_classes, self.seed)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.body(x)))


@dataclass(frozen=True)
class Slim(Method):
    """width: hidden units of the server's network; clients with an odd id, and every fourth, train half of them."""

    local: LocalSGD
    width: int = 8

    reveals: ClassVar[Mapping[str, str]] = {"params": "a part of a model trained on the client's data"}
    ragged: ClassVar[tuple[str, ...]] = ("params",)

    def module(self, spec: ModelSpec) -> nn.Module:
        return SlimNet(self.width, spec.num_classes, spec.seed)

    def units(self, client: int | None) -> Tensor:
        """Positions of a client's hidden units."""
        whole = client is None or client % 4 == 2
        return torch.arange(self.width) if whole else torch.arange(client % 2, self.width, 2)

    def index(self, client: int | None) -> dict[str, Index]:
        """For every tensor, which part of the server's it is."""
        units = self.units(client)
        return {"body.weight": [units], "body.bias": [units], "head.weight": [None, units], "head.bias": [None]}

    def send(self, server: Payload, client: int | None, ctx: Context) -> Payload:
        index = self.index(client)
        if len(self.units(client)) == self.width:
            return server
        return {"params": {name: take_part(tensor, index[name]) for name, tensor in server["params"].items()}}

    def _fitting(self, down: Payload, ctx: Context) -> Context:
        width = down["params"]["body.bias"].shape[0]
        return ctx if width == self.width else ctx.rebuild(width)

    def client_update(self, down: Payload, state: Payload, data: Batches, ctx: Context) -> Update:
        end = self.local(down, data, self._fitting(down, ctx))
        return Update(state, {"params": end.params}, metrics=end.metrics)

    def server_update(self, server: Payload, replies: Sequence[Reply], ctx: Context) -> Payload:
        trees = [reply.up["params"] for reply in replies]
        indices = [self.index(reply.client) for reply in replies]
        return {**server, "params": indexed_mean(trees, indices, [r.weight for r in replies], server["params"])}

    def predict(self, down: Payload, state: Payload, x: Tensor, ctx: Context) -> Tensor:
        return super().predict(down, state, x, self._fitting(down, ctx))


def slim(*, local: LocalSGD, width: int = 8) -> Slim:
    """Assemble the method."""
    return Slim(local, width)
