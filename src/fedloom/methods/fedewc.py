"""FedEWC: FedAvg that holds the weights near those of the past stages, the more the past tasks depend on them.

Source: Kirkpatrick et al., "Overcoming catastrophic forgetting in neural networks" (PNAS 2017), eq. (3); online merge
Schwarz et al., "Progress & Compress" (ICML 2018), here as a mean, as federated baselines use the two:

    client   CE + (lam / 2) sum_i F_i (theta_i - theta*_i)^2      from stage 1 on
    server   F <- a F + (1 - a) min(F_new, cap),  a = C_old / C_seen      at the end of every stage but the last

theta* is the global model with which the stage began. F_new is measured at the final model of a stage, in a trip
"consolidate" to every client that holds data: the mean of per-sample squared gradients over each one's examples
(`diagonal_fisher`), averaged as models are. Where nobody answers, F stays. C counts classes: those before the stage,
and those seen with it; where the data have domains, pairs of a class and a domain, which is what a stream of domains
adds to. A stage without new ones has a = 1, so nothing is measured there. The penalty acts on the model that the client
trains. (The code of LANDER and of TARGET evaluates it on the global network while the optimiser steps a copy, so it
reaches nothing: their "FedEWC" is finetuning. Their Fisher squares gradients of batch means, smaller by up to the size
of the batch.)

Decisions: the softmax, of the loss and of the Fisher alike, is over the task's classes (`label_scope` "current", which
gives old rows of the head no gradient; "seen" is every class so far); the labels of the Fisher are the examples' own
("model" draws them from the predictions); with lam = 0 nothing is measured, and the model is that of FedAvg with the
same label scope, bit for bit. lam * fisher_cap bounds the curvature of the penalty: SGD needs it well below 2 / lr.
Cost: one F up per stage from every client with data; from stage 1 on one F down per stage and client, and theta* as
well to those that take part after the first merge of the stage only: until then it is the model that is sent. Clients
keep both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Ge, Gt

from fedloom.core import Batches, ClientId, Context, Exchange, Payload, Reply, Stage, Trip, Update
from fedloom.core.errors import pick
from fedloom.core.payload import ClassRows
from fedloom.core.tree import zeros_like
from fedloom.local import LocalSGD
from fedloom.local.passes import LABELS, Labels, diagonal_fisher, true_labels
from fedloom.local.terms import CrossEntropy
from fedloom.local.terms.quadratic import QuadraticPenalty
from fedloom.merge.mean import replies_mean
from fedloom.methods.fedavg import FedAvg
from fedloom.methods.kept import KeptFields

PRESETS: dict[str, dict[str, Any]] = {"paper": {}}
ABLATIONS: dict[str, dict[str, Any]] = {"no-penalty": {"lam": 0.0}}
PAST = KeptFields(("fisher", "anchor"))


@dataclass(frozen=True)
class FedEWC(FedAvg):
    """Server: the model, "fisher" (F), "anchor" (theta*) and who holds these. Client, from stage 1 on: F and theta*.

    lam: weight of the penalty, which is added to the terms of `local`. fisher_cap: largest entry of F. labels, scope:
    of the Fisher, see `diagonal_fisher`.
    """

    lam: float = 1000.0
    fisher_cap: float = 1e-4
    labels: Labels = true_labels
    scope: str = "current"

    reveals: ClassVar[Mapping[str, str]] = {
        **FedAvg.reveals,
        "fisher": "squared gradients at the global model: rows of the head tell which classes the client holds",
    }

    def class_rows(self, ctx: Context) -> ClassRows:
        """F and theta* have the class rows of the parameters."""
        rows = {(field, name): dim for field in PAST.names for name, dim in ctx.class_rows.items()}
        return {**super().class_rows(ctx), **rows}

    def init_server(self, ctx: Context) -> Payload:
        """The model, F = 0, and the model in the place of theta*."""
        state = ctx.init_state()
        return {**state, "fisher": zeros_like(state["params"]), "anchor": state["params"], **PAST.nobody(ctx)}

    def exchanges(self) -> Mapping[str, Exchange]:
        """Training, and the measurement of F."""
        return {**super().exchanges(), "consolidate": Exchange(self.send_model, self.measure, self.consolidate)}

    def plan(self, stage: Stage) -> Iterable[Trip]:
        """After the rounds of a stage F is measured, unless no stage follows or the merge would leave F as it is."""
        measured = self.lam and stage.index + 1 < stage.count and _old_share(stage) < 1
        return [*super().plan(stage), *([Trip("consolidate", None, "all")] if measured else [])]

    def send(self, server: Payload, client: ClientId | None, ctx: Context) -> Payload:
        """The model, and once per stage F, and theta* where it is another model."""
        model = self.send_model(server, client, ctx)
        if client is None or not self._penalised(ctx):
            return model
        past = PAST.sent(server, client, ctx) if PAST.current(server, ctx) else {"fisher": server["fisher"]}
        return {**model, **past}

    def client_update(self, down: Payload, state: Payload, data: Batches, ctx: Context) -> Update:
        """Train with the penalty once there is a past; keep F and theta*."""
        if not self._penalised(ctx):
            return super().client_update(down, state, data, ctx)
        state = PAST.kept({"anchor": down["params"], **down}, state, ctx)
        local = replace(self.local, terms=(*self.local.terms, QuadraticPenalty(self.lam)))
        end = local(down, data, ctx, ref={"fisher": state["fisher"], "centre": state["anchor"]})
        return Update(state, {"params": end.params, "buffers": end.buffers}, metrics=end.metrics)

    def server_update(self, server: Payload, replies: Sequence[Reply], ctx: Context) -> Payload:
        """FedAvg's mean; the first one of a stage makes the model from before it theta*."""
        new = super().server_update(server, replies, ctx)
        if not self._penalised(ctx):
            return new
        anchor = server["anchor" if PAST.current(server, ctx) else "params"]
        return {**new, "anchor": anchor, **PAST.marked(server, replies, ctx)}

    def measure(self, down: Payload, state: Payload, data: Batches, ctx: Context) -> Update:
        """F of the model on the client's data of this stage."""
        ctx.bind(down["params"], down["buffers"])
        return Update(state, {"fisher": diagonal_fisher(ctx, data, scope=self.scope, labels=self.labels)})

    def consolidate(self, server: Payload, replies: Sequence[Reply], ctx: Context) -> Payload:
        """Merge F."""
        measured = replies_mean(replies, "fisher", server["fisher"], uniform=self.uniform)
        capped = {name: tensor.clamp(max=self.fisher_cap) for name, tensor in measured.items()}
        fisher = {name: torch.lerp(capped[name], old, _old_share(ctx.stage)) for name, old in server["fisher"].items()}
        return {**server, "fisher": fisher}

    def _penalised(self, ctx: Context) -> bool:
        return self.lam > 0 and ctx.stage.index > 0


def _old_share(stage: Stage) -> float:
    """a: of the classes seen, or pairs of class and domain, those that had been before the stage."""
    old, seen = len(stage.old) * max(1, len(stage.old_domains)), len(stage.seen) * max(1, len(stage.seen_domains))
    return old / seen


def fedewc(
    *,
    local: LocalSGD,
    lam: Annotated[float, Ge(0)] = 1000.0,
    fisher_cap: Annotated[float, Gt(0)] = 1e-4,
    fisher_labels: Literal["true", "model"] = "true",
    label_scope: Literal["current", "seen"] = "current",
    uniform: bool = False,
    buffers: Literal["mean", "pooled", "frozen"] = "mean",
) -> FedEWC:
    """Assemble FedEWC; the options that are not named here are FedAvg's.

    lam: the paper's lambda, the weight of the penalty; 0 measures and penalises nothing.
    fisher_cap: largest entry of the Fisher information; lam times this bounds the curvature of the penalty.
    fisher_labels: labels for which the Fisher is measured: `true` are the examples' own, `model` draws them from the
        predictions.
    label_scope: classes in the softmax of the loss and of the Fisher: those of the task (`current`) or all so far
        (`seen`).
    """
    local, labels = replace(local, terms=(CrossEntropy(label_scope),)), pick("fisher_labels", fisher_labels, LABELS)
    return FedEWC(local, uniform, buffers, lam=lam, fisher_cap=fisher_cap, labels=labels, scope=label_scope)
