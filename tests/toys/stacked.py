"""Stacked experts behind a gate, merged by how much each client used each of them.

Source: none, it is a test case; the merge is `fedloom.merge.experts.expertwise_mean`.
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
from fedloom.merge.experts import expertwise_mean
from fedloom.merge.mean import replies_mean


class Experts(nn.Module):
    """Every example goes to the expert that the gate scores highest, scaled by the gate's probability."""

    class_rows = {"weight": 1, "bias": 1}

    def __init__(self, experts: int, num_classes: int):
        super().__init__()
        self.gate = nn.Linear(2, experts)
        self.weight = nn.Parameter(torch.randn(experts, num_classes, 2))
        self.bias = nn.Parameter(torch.zeros(experts, num_classes))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        probability, chosen = torch.softmax(self.gate(x), -1).max(-1)
        own = torch.einsum("bcd,bd->bc", self.weight[chosen], x) + self.bias[chosen]
        return {"logits": probability.unsqueeze(1) * own, "chosen": chosen}


STACKED = ("weight", "bias")


@dataclass(frozen=True)
class Stacked(Method):
    """experts: how many there are."""

    local: LocalSGD
    experts: int = 3

    reveals: ClassVar[Mapping[str, str]] = {
        "params": "experts and a gate trained on the client's data",
        "usage": "how many of the client's examples go to each expert",
    }

    def module(self, spec: ModelSpec) -> nn.Module:
        with seeded(spec.seed, "stacked"):
            return Experts(self.experts, spec.num_classes)

    def client_update(self, down: Payload, state: Payload, data: Batches, ctx: Context) -> Update:
        end = self.local(down, data, ctx)
        counts = torch.zeros(self.experts, dtype=torch.int64)
        with ctx.evaluating():
            for batch in data.epoch(purpose="usage", shuffle=False):
                counts += torch.bincount(ctx.apply(batch.x)["chosen"], minlength=self.experts)
        return Update(state, {"params": end.params, "usage": {"count": counts}}, metrics=end.metrics)

    def server_update(self, server: Payload, replies: Sequence[Reply], ctx: Context) -> Payload:
        old = server["params"]
        pools = [{name: reply.up["params"][name] for name in STACKED} for reply in replies]
        usage = [reply.up["usage"]["count"] for reply in replies]
        experts = expertwise_mean(pools, usage, {name: old[name] for name in STACKED})
        gates = [r._replace(up={"params": {n: r.up["params"][n] for n in old if n not in STACKED}}) for r in replies]
        return {**server, "params": {**replies_mean(gates, "params", old), **experts}}


def stacked(*, local: LocalSGD, experts: int = 3) -> Stacked:
    """Assemble the method."""
    return Stacked(local, experts)
