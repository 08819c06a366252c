"""FedAvg: train locally, average the models by number of examples.

Source: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data" (AISTATS
2017), algorithm 1. In a class-incremental stream this is the finetuning baseline. Clients send values, not
deltas, and the mean is of values.

Decisions: batch-norm buffers are averaged like weights (`buffers="mean"`; "pooled" merges mean and variance as those of
all examples, "frozen" keeps the initial ones); clients count by their examples (`uniform`: all the same); the label
scope is every class seen so far ("current" is the trick of the LANDER family: only the task's logits enter the softmax,
so that old rows of the head stay as they are); optimiser state is fresh in every client call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from fedloom.core import Batches, ClientId, Context, Method, Payload, Reply, Update
from fedloom.local import LocalSGD
from fedloom.local.terms import CrossEntropy
from fedloom.merge.buffers import buffer_policy
from fedloom.merge.mean import replies_mean

PRESETS: dict[str, dict[str, Any]] = {"paper": {}}


@dataclass(frozen=True)
class FedAvg(Method):
    """One model each way, nothing kept on clients.

    local: what a client does. uniform: every client counts the same, whatever its number of examples.
    buffers: how batch-norm statistics merge (see `fedloom.merge.buffers.buffer_policy`).
    """

    local: LocalSGD
    uniform: bool = False
    buffers: str = "mean"

    personal: ClassVar[bool] = False
    reveals: ClassVar[Mapping[str, str]] = {
        "params": "a model trained on the client's data: open to gradient inversion and membership inference",
        "buffers": "mean and variance of the client's activations",
    }

    def send_model(self, server: Payload, client: ClientId | None, ctx: Context) -> Payload:
        """The model alone, for exchanges that look at it."""
        return {field: server[field] for field in ("params", "buffers")}

    def reference(self, down: Payload, ctx: Context) -> Mapping[str, Any]:
        """What the terms of `local` read beside the batch; see `fedloom.local.parts`."""
        return {}

    def client_update(self, down: Payload, state: Payload, data: Batches, ctx: Context) -> Update:
        """Train from the downloaded model; upload parameters and buffers."""
        end = self.local(down, data, ctx, ref=self.reference(down, ctx))
        return Update(state, {"params": end.params, "buffers": end.buffers}, metrics=end.metrics)

    def server_update(self, server: Payload, replies: Sequence[Reply], ctx: Context) -> Payload:
        """w <- sum_i (n_i / n) w_i over the clients that replied."""
        params = replies_mean(replies, "params", server["params"], uniform=self.uniform)
        buffers = buffer_policy(self.buffers)(replies, server["buffers"], uniform=self.uniform)
        return {**server, "params": params, "buffers": buffers}


def fedavg(
    *,
    local: LocalSGD,
    label_scope: Literal["seen", "current"] = "seen",
    uniform: bool = False,
    buffers: Literal["mean", "pooled", "frozen"] = "mean",
) -> FedAvg:
    """Assemble FedAvg.

    label_scope: classes in the softmax of training: `seen`, every class so far, or `current`, those of the task alone.
    uniform: count all clients the same instead of by their examples.
    buffers: merge of batch-norm statistics: `mean` like weights, `pooled` as mean and variance of all examples,
        `frozen` keeps the initial ones.
    """
    return FedAvg(replace(local, terms=(CrossEntropy(label_scope),)), uniform, buffers)
