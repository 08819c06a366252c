"""Clients upload constants: for tests of what the engine does with them, by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fedloom.core import Batches, Context, Method, ModelSpec, Payload, Reply, Update
from fedloom.local import LocalSGD
from fedloom.merge.mean import replies_mean


class Offset(nn.Module):
    """Logits are the first entry of one parameter of the given size."""

    def __init__(self, size: int, num_classes: int):
        super().__init__()
        self.w, self.num_classes = nn.Parameter(torch.zeros(size)), num_classes

    def forward(self, x: Tensor) -> Tensor:
        return self.w[0] + x.new_zeros(len(x), self.num_classes)


@dataclass(frozen=True)
class Constants(Method):
    """values[i]: what client i uploads as "w", in every entry. weights: None takes 1. size: entries of w."""

    values: tuple[float, ...]
    weights: tuple[float, ...] | None = None
    size: int = 1
    start: float = 0.0

    reveals: ClassVar[Mapping[str, str]] = {"params": "a constant"}

    def module(self, spec: ModelSpec) -> nn.Module:
        return Offset(self.size, spec.num_classes)

    def init_server(self, ctx: Context) -> Payload:
        return {"params": {"w": torch.full((self.size,), self.start)}}

    def client_update(self, down: Payload, state: Payload, data: Batches, ctx: Context) -> Update:
        value = torch.full((self.size,), self.values[ctx.client])
        return Update(state, {"params": {"w": value}}, 1.0 if self.weights is None else self.weights[ctx.client])

    def server_update(self, server: Payload, replies: Sequence[Reply], ctx: Context) -> Payload:
        return {"params": replies_mean(replies, "params", server["params"])}


def constants(*, local: LocalSGD, **given: Any) -> Constants:
    """Assemble the method; it trains nothing."""
    return Constants(**given)


@dataclass(frozen=True)
class Drifting(Constants):
    """Client i uploads the server's value plus values[i].

    broken: "server_update" and "predict" raise, "nan" merges to NaN, "alias" returns a view of a reply.
    """

    broken: str | None = None

    def client_update(self, down: Payload, state: Payload, data: Batches, ctx: Context) -> Update:
        return Update(state, {"params": {"w": down["params"]["w"] + self.values[ctx.client]}}, 1.0)

    def server_update(self, server: Payload, replies: Sequence[Reply], ctx: Context) -> Payload:
        if self.broken == "server_update":
            raise KeyError("no such thing")
        if self.broken == "alias":
            return {"params": {"w": replies[-1].up["params"]["w"][:]}}
        merged = super().server_update(server, replies, ctx)
        if self.broken == "nan":
            return {"params": {"w": merged["params"]["w"] * float("nan")}}
        return merged

    def predict(self, down: Payload, state: Payload, x: Any, ctx: Context) -> Tensor:
        if self.broken == "predict":
            raise IndexError("out of range")
        return super().predict(down, state, x, ctx)


def drifting(*, local: LocalSGD, **given: Any) -> Drifting:
    """Assemble the method; it trains nothing."""
    return Drifting(**given)


@dataclass(frozen=True)
class Forgetful(Drifting):
    """Clients count their visits, and forget all (an empty state) at the third."""

    def client_update(self, down: Payload, state: Payload, data: Batches, ctx: Context) -> Update:
        count = state["visits"]["count"] if state else torch.tensor(0)
        new = {} if count == 2 else {"visits": {"count": count + 1}}
        return super().client_update(down, state, data, ctx)._replace(state=new, metrics={"visits": float(count)})


def forgetful(*, local: LocalSGD, **given: Any) -> Forgetful:
    """Assemble the method; it trains nothing."""
    return Forgetful(**given)
