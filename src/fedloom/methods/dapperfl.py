"""DapperFL: every client prunes to what its device can bear, after fusing its model with the global one.

Source: Jia et al., "DapperFL: Domain Adaptive Federated Learning with Model Fusion Pruning for Edge Devices" (NeurIPS
2024, arXiv 2412.05823). W is the global model, t = 1, 2, ... the round, E the local epochs, and client i removes the
share rho_i of its channels:

    client   w^ <- epoch 1 on CE from W;   w <- a_t W + (1 - a_t) w^;   a_t = max((1 - epsilon)^(t-1) alpha, alpha_min)
             M_i: the channels of w with the largest L1 norms;  w_i <- epochs 2..E on CE + gamma ||g(x)||^2 from w M_i
    server   W <- sum_i q_i (w_i M_i + W (1 - M_i))      with q_i the share of examples

g(x) are the features that the head reads. Decisions:

- A channel is a coupled group's (`fedloom.models.channels`): its norm is the sum of |w| over all layers that write it.
  Of every group ceil((1 - rho_i) c_g) channels stay, so epochs 2..E train a compact network, and that and the mask's
  bits are sent. `ratios` are dealt by client id, one after the other.
- Statistics of batch norms are fused, and merged, like weights; counters are the client's own.
- t counts the rounds of the run, stages included. E is `training.local_epochs`; with 1, nothing is trained after the
  pruning. Optimiser state is fresh after it, the tensors being other ones; orders of examples go on.
- With ratios 0, gamma 0 and alpha = alpha_min = 0 it is FedAvg, bit for bit where SGD has no momentum or E is 1.

`mode="official_quirks"` is what the public code does, see `fedloom.methods.zero_filled`; there is no fusion in it.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Ge, Le, Lt, MinLen
from torch import Tensor, nn

from fedloom.core import Batches, ClientId, Context, Method, ModelSpec, Payload, Reply, Table, Update
from fedloom.core.errors import ConfigError
from fedloom.core.tree import Tensors, on_device
from fedloom.local import LocalSGD
from fedloom.local.continued import Continued
from fedloom.local.terms import CrossEntropy
from fedloom.local.terms.features_norm import FeaturesNorm, euclidean
from fedloom.merge.mean import weighted_mean
from fedloom.merge.recovered import Recovered
from fedloom.methods.channel_facts import dealt, widths_kept
from fedloom.methods.subnetworks import COMPACT, MODEL, table
from fedloom.methods.zero_filled import ZeroFilled
from fedloom.models.channels import Channels, pack, unpack
from fedloom.models.compact import prunable
from fedloom.select.channels import l1_scores, per_group
from fedloom.select.rates import fixed

PRESETS: dict[str, dict[str, Any]] = {"paper": {}, "code_2024": {"mode": "official_quirks"}}
ABLATIONS: dict[str, dict[str, Any]] = {
    "no-fusion": {"alpha": 0.0, "alpha_min": 0.0},
    "no-pruning": {"ratios": (0.0,)},
    "no-regulariser": {"gamma": 0.0},
}
Removed = Annotated[float, Ge(0), Lt(1)]
Share = Annotated[float, Ge(0), Le(1)]


@dataclass(frozen=True)
class Fusion:
    """The share of the global model in the model that is pruned: alpha at first, falling to alpha_min."""

    alpha: float = 0.9
    alpha_min: float = 0.1
    epsilon: float = 0.2

    def share(self, round: int) -> float:
        """a_t of round t, which counts from 1."""
        return max((1 - self.epsilon) ** (round - 1) * self.alpha, self.alpha_min)

    def __call__(self, old: Tensors, new: Tensors, round: int) -> Tensors:
        """a_t * old + (1 - a_t) * new, exact for a_t of 0 and 1; integers are those of `new`."""
        share = self.share(round)
        return {n: torch.lerp(t, old[n], share) if t.is_floating_point() else t for n, t in new.items()}


@dataclass(frozen=True)
class DapperFL(Method):
    """Server state: the dense model, which serves. Clients keep nothing. local: its first epoch is on CE alone."""

    local: LocalSGD
    fusion: Fusion
    ratios: tuple[float, ...]

    personal: ClassVar[bool] = False
    ragged: ClassVar[Collection[str]] = MODEL
    reveals: ClassVar[Mapping[str, str]] = {
        "params": "a part of a model trained on the client's data: open to gradient inversion, membership inference",
        "buffers": "mean and variance of the activations of these channels",
        "mask": "which channels have large weights after an epoch on the client's data, and how strong its device is",
    }

    def module(self, spec: ModelSpec) -> nn.Module:
        """The classifier with a table of its channels."""
        return prunable(spec.classifier(), getattr(spec, "input_shape", None))

    def client_update(self, down: Payload, state: Payload, data: Batches, ctx: Context) -> Update:
        """Fine-tune, fuse, prune and train on; upload the compact network and its mask."""
        channels, epochs = table(ctx), self.local.epochs
        first = replace(self.local, epochs=min(epochs, 1), terms=self.local.terms[:1])(down, data, ctx)
        tuned = {"params": on_device(first.params, "cpu"), "buffers": on_device(first.buffers, "cpu")}
        fused = {field: self.fusion(down[field], tuned[field], ctx.global_round + 1) for field in MODEL}
        scores = l1_scores(fused["params"], [group.writers for group in channels.groups])
        mask = largest(scores, channels, fixed(self.ratios, ctx))
        part, inside = COMPACT.enter(fused, mask, ctx)
        end = replace(self.local, epochs=max(0, epochs - 1))(part, Continued(data, 1), inside)
        up = {"params": end.params, "buffers": end.buffers, "mask": {"bits": pack(mask)}}
        return Update(state, up, metrics={**first.metrics, **end.metrics})

    def server_update(self, server: Payload, replies: Sequence[Reply], ctx: Context) -> Payload:
        """Means of the recovered models, made one tensor of one client at a time."""
        channels, weights, who = table(ctx), [r.weight for r in replies], [r.client for r in replies]
        kept = [channels.kept(unpack(reply.up["mask"]["bits"], channels.total)) for reply in replies]
        new: dict[str, Tensors] = {}
        for field in MODEL:
            trees = [
                Recovered(reply.up[field], partial(channels.index, kept=part), server[field], reply.client)
                for reply, part in zip(replies, kept, strict=True)
            ]
            new[field] = weighted_mean(trees, weights, server[field], who=who)
        return {**server, **new}

    def facts(self, server: Payload, states: Mapping[ClientId, Payload], ctx: Context) -> Sequence[Table]:
        """How many channels each client keeps, which follows from its ratio; nothing where none prunes."""
        channels, ratios = table(ctx), set(self.ratios)
        if ratios == {0}:
            return []
        alike = torch.ones(channels.total)
        widths = {ratio: channels.widths(channels.kept(largest(alike, channels, ratio))) for ratio in ratios}
        note = "Shares that a client's ratio leaves. Which channels these are it chooses anew in every round."
        by_client = dealt(widths, self.ratios, ctx)
        return [widths_kept("Channels kept by the clients", "client", by_client, channels, note)]


def largest(scores: Tensor, channels: Channels, ratio: float) -> Tensor:
    """bool [C]: of every group all but the share `ratio`, those with the largest scores [C]."""
    return per_group(scores, channels.sizes, 1 - ratio, min_share=0.0)


def dapperfl(
    *,
    local: LocalSGD,
    ratios: Annotated[tuple[Removed, ...], MinLen(1)] = (0.0, 0.2, 0.4, 0.6, 0.8),
    alpha: Share = 0.9,
    alpha_min: Share = 0.1,
    epsilon: Share = 0.2,
    gamma: Annotated[float, Ge(0)] = 0.01,
    mode: Literal["paper", "official_quirks"] = "paper",
) -> DapperFL | ZeroFilled:
    """Assemble DapperFL.

    ratios: shares of the channels that clients remove, dealt by client id, one after the other.
    alpha: share of the global model in the fusion of the first round.
    alpha_min: least share of the global model in the fusion; alpha and this 0: no fusion.
    epsilon: by how much the share of the global model falls per round, as a fraction.
    gamma: weight of the regulariser on the features.
    mode: `paper`, or `official_quirks`: what the public code does (`fedloom.methods.zero_filled`).
    """
    if local.phases:
        raise ConfigError("dapperfl prunes after the first local epoch: it cannot train in phases")
    if mode == "official_quirks":
        warnings.warn(
            "dapperfl follows the public code where it differs: nothing is fused, masks of adjacent layers do not "
            "match, pruned weights are averaged as zeros, and the regulariser takes the norm, not its square, in every "
            "epoch",
            stacklevel=2,
        )
        terms = (CrossEntropy(), FeaturesNorm(gamma, euclidean)) if gamma else (CrossEntropy(),)
        return ZeroFilled(replace(local, terms=terms), ratios=tuple(ratios))
    terms = (CrossEntropy(), FeaturesNorm(gamma)) if gamma else (CrossEntropy(),)
    return DapperFL(replace(local, terms=terms), Fusion(alpha, alpha_min, epsilon), tuple(ratios))
