"""FDSE: every layer is a feature extractor that clients share and a cheap domain eraser of the client's own.

Source: Z. Wang et al., "Federated Learning with Domain Shift Eraser" (CVPR 2025, arXiv 2503.13063). `models.eraser` has
the layers. Tensors named "dse_" belong to the eraser (DSE), all others, the head's too, are shared (DFE).

    client   CE + lam sum_l softmax(beta l) (|mu_l - mu_gl|^2 / d_l + ((|v_l|_1 - |v_gl|_1) / d_l)^2)
    server   DFE  w <- w + mean_i |d_i| sum_i lambda_i u_i, u_i = d_i / |d_i|, lambda = argmin |sum_i lambda_i u_i|^2
             DSE  of client i: sum_j softmax_j(cos(v_i, v_j) / tau) v_j, tensor by tensor

mu, v are mean and variance of a batch at the inputs of layer l's `dfe_bn`, mu_g, v_g the statistics that were sent.
Running statistics of `dfe_bn` merge by the plain mean; those of `dse_bn` never leave a client. Inference is personal:
the shared tensors with the client's own eraser and statistics.

Decisions where the paper is silent, or its release differs:

- The regulariser is the paper's. The release has a KL-like one of two scalars that all layers share; it is not offered.
- mu, v are those of the batch, v unbiased as the norm tracks it. There is no regulariser until statistics have been
  merged, for the initial ones are of no data. The layers' order is that in which the network holds them.
- All clients count the same in all merges; one that is away keeps its eraser. Counters of batches are summed, as
  increments: a sum of totals would grow as clients^rounds, past any integer.
- The global view, which the paper has not, takes the mean of all clients' erasers; so does a client before its first
  round. Its `dse_bn` keep their initial statistics, as the server has no others, so that its accuracy says little: read
  that of the clients. With `recalibrate`, all clients measure them on the global view after each stage's last round,
  and the server pools them: what leaves a client then are statistics of the global view, still not its running ones.
- A client of several domains has one eraser. The release sets (lam, beta) to (.05, .05) on Office-Caltech and to
  (.5, .001) on PACS, and clips gradients at 10 (`training.clip_norm`).
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt
from torch import nn

from fedloom.core import Batches, ClientId, Context, Exchange, Method, ModelSpec, Payload, Reply, Stage, Trip, Update
from fedloom.local import LocalSGD
from fedloom.local.statistics import measured_statistics
from fedloom.local.terms import CrossEntropy
from fedloom.local.terms.consistency import StatisticsConsistency
from fedloom.merge.buffers import pooled_buffers
from fedloom.merge.consensus import consensus
from fedloom.merge.mean import replies_mean, reply_trees, weighted_mean
from fedloom.merge.parts import Selected
from fedloom.merge.similarity import similar_means
from fedloom.models.eraser import MOMENTS, erased, eraser_norms, own, shared, shared_moments

PRESETS: dict[str, dict[str, Any]] = {"paper": {}}
ABLATIONS: dict[str, dict[str, Any]] = {
    "no-consensus": {"consensus": False},
    "no-similarity": {"tau": 1e6},
    "no-consistency": {"lam": 0.0},
}
OWN = "eraser."  # + client: its eraser, on the server


@dataclass(frozen=True)
class Fdse(Method):
    """Server state: the global view and `eraser.<client>` of everyone who took part. Client state: its `norms`."""

    local: LocalSGD
    lam: float = 0.01
    tau: float = 0.5
    beta: float = 0.1
    ratio: int = 2
    consensus: bool = True
    recalibrate: bool = False
    reveals: ClassVar[Mapping[str, str]] = {
        "params": "a model trained on the client's data: open to gradient inversion and membership inference",
        "buffers": "mean and variance of the client's activations in the shared norms",
        "norms": "mean and variance of the client's activations in the erasers of the global view, if recalibrated",
    }

    def module(self, spec: ModelSpec) -> nn.Module:
        """The classifier with domain erasers."""
        return erased(spec.classifier(), self.ratio, seed=spec.seed, measured=self.lam > 0)

    def send(self, server: Payload, client: ClientId | None, ctx: Context) -> Payload:
        """The shared tensors with the client's eraser; the global view for those that have none yet."""
        if f"{OWN}{client}" not in server:
            return {field: server[field] for field in ("params", "buffers")}
        return {"params": {**server["params"], **server[f"{OWN}{client}"]}, "buffers": shared(server["buffers"])}

    def client_update(self, down: Payload, state: Payload, data: Batches, ctx: Context) -> Update:
        """Train; upload everything but the statistics of the erasers' norms, which are kept."""
        view = {"params": down["params"], "buffers": {**down["buffers"], **state.get("norms", {})}}
        statistics, local = shared_moments(down["buffers"]), self.local
        if statistics and self.lam > 0:
            local = replace(local, terms=(*local.terms, StatisticsConsistency(self.lam, self.beta, MOMENTS)))
        end = local(view, data, ctx, ref={"statistics": statistics})
        kept, up = {"norms": own(end.buffers)}, {"params": end.params, "buffers": shared(end.buffers)}
        return Update(kept, up, metrics=end.metrics)

    def server_update(self, server: Payload, replies: Sequence[Reply], ctx: Context) -> Payload:
        """Consensus for what is shared, a mean of the alike for each client's eraser, plain means of statistics."""
        trees, ones, who = reply_trees(replies, "params", uniform=True)
        common, erasers = shared(server["params"]), own(server["params"])
        parts, theirs = ([Selected(tree, names) for tree in trees] for names in (common, erasers))
        merged = consensus(parts, common, who=who) if self.consensus else weighted_mean(parts, ones, common, who=who)
        copies = {int(field.removeprefix(OWN)): tree for field, tree in server.items() if field.startswith(OWN)}
        alike = zip(who, similar_means(theirs, erasers, self.tau, who=who), strict=True)
        copies = dict(sorted({**copies, **dict(alike)}.items()))
        params = {**merged, **weighted_mean(list(copies.values()), [1.0] * len(copies), erasers)}
        old, counters = shared(server["buffers"]), "*.num_batches_tracked"
        new = replies_mean(replies, "buffers", old, uniform=True, rules={counters: "sum"})
        new |= {name: new[name] - (len(replies) - 1) * old[name] for name in fnmatch.filter(new, counters)}
        return {"params": params, "buffers": {**server["buffers"], **new}} | {f"{OWN}{k}": t for k, t in copies.items()}

    def exchanges(self) -> Mapping[str, Exchange]:
        """The default one, and the measurement of the global view."""
        measure = Exchange(lambda server, client, ctx: self.send(server, None, ctx), self.measure, self.absorb)
        return {**super().exchanges(), "recalibrate": measure}

    def plan(self, stage: Stage) -> Iterable[Trip]:
        """The rounds, and the measurement after them where it is wanted."""
        return [*super().plan(stage), *([Trip("recalibrate", None, "all")] if self.recalibrate else [])]

    def measure(self, down: Payload, state: Payload, data: Batches, ctx: Context) -> Update:
        """Statistics of the global view's erasers on the client's data; one example has none and counts nothing."""
        if len(data) < 2:
            return Update(state, {}, weight=0.0)
        ctx.bind(down["params"], down["buffers"])
        found = measured_statistics(ctx, data, self.local.batch_size, only=eraser_norms(ctx.net.module))
        return Update(state, {"norms": own(found)})

    def absorb(self, server: Payload, replies: Sequence[Reply], ctx: Context) -> Payload:
        """The global view's erasers get the statistics of all clients' examples together."""
        pooled = pooled_buffers(replies, own(server["buffers"]), field="norms")
        return {**server, "buffers": {**server["buffers"], **pooled}}

    def deployed(self, down: Payload, state: Payload, ctx: Context) -> Context:
        """The network with the client's own statistics, where it has some."""
        ctx.bind(down["params"], {**down["buffers"], **state.get("norms", {})})
        return ctx


def fdse(
    *,
    local: LocalSGD,
    lam: Annotated[float, Ge(0)] = 0.01,
    tau: Annotated[float, Gt(0)] = 0.5,
    beta: Annotated[float, Ge(0)] = 0.1,
    ratio: Annotated[int, Ge(2)] = 2,
    consensus: bool = True,
    recalibrate: bool = False,
    label_scope: Literal["seen", "current"] = "seen",
) -> Fdse:
    """Assemble FDSE; the options that are not named here are FedAvg's.

    lam: weight of the consistency of batch statistics with the merged ones; 0 for none.
    tau: temperature of the softmax over cosines by which erasers are merged; a large one takes their mean.
    beta: how much more the regulariser counts in later layers; 0 weighs all alike.
    ratio: channels per core channel of a layer (G): a larger one makes the shared part thinner.
    consensus: merge the shared parts in the direction that all clients' updates agree on; false takes plain means.
    recalibrate: measure the statistics of the global view on all clients after each stage, so that it can predict.
    """
    return Fdse(replace(local, terms=(CrossEntropy(label_scope),)), lam, tau, beta, ratio, consensus, recalibrate)
