"""HeteroFL: clients train nested sub-networks of different widths of one model.

Source: Diao, Ding and Tarokh, "HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous
Clients" (ICLR 2021, arXiv 2010.01264), algorithm 1. Client i has a width share r_i; its part of a tensor W is the
leading block, and I_j are the clients that own entry j:

    client   W_i <- training from W[:ceil(r_i out), :ceil(r_i in)];     server   w_j <- mean over I_j of w_ij

An entry that nobody owns keeps its value. Clients count the same. The dense model serves. Decisions:

- The block is the prefix of every channel group (`fedloom.models.channels`), so it is a smaller network of the same
  kind. Networks under group normalisation are refused. The paper's ResNet-18 is a pre-activation one, ours need not be.
- `rates` are dealt by client id, one after the other, or drawn anew in each round (`assignment="dynamic"`).
- Scaler: while they train, the outputs of layers that write channels are divided by r_i, before their norm (`scaler`).
  A batch norm takes this factor away again, but for its epsilon; without norms it matters.
- `masked_loss`: the logits of seen classes that the client lacks are "zero", as published, or "inf" (-inf), which
  differ: at 0 such a class still takes a share of the softmax. Their head rows are then owned by the clients that hold
  the class alone. With "none" every client trains and owns the row of every class seen.
- Batch norms normalise by the batch in training; no statistics are sent or merged. Every client measures them in the
  dense model after the last round of a stage (`statistics="stage"`) or after every round ("round"), which costs a
  download of that model. An evaluation inside a stage comes before its round's pass and uses the statistics of the one
  before, with "stage" those of the last stage, at first the initial ones: it is then of little use.
- With every rate 1 and masked_loss "none" the parameters are those of FedAvg with `uniform`, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from annotated_types import Gt, Le, MinLen
from torch import Tensor, nn

from fedloom.core import Batches, ClientId, Context, Exchange, ModelSpec, Payload, Reply, Table, Update
from fedloom.core.errors import pick
from fedloom.core.payload import take_rows
from fedloom.local import LocalSGD
from fedloom.local.parts import Term
from fedloom.local.terms import CrossEntropy
from fedloom.local.terms.held import HeldCrossEntropy
from fedloom.merge.by_index import indexed_mean
from fedloom.merge.mean import reply_trees
from fedloom.methods.channel_facts import dealt, widths_kept
from fedloom.methods.remeasured import Remeasured
from fedloom.methods.subnetworks import table
from fedloom.models.channels import pack, unpack
from fedloom.models.compact import prunable
from fedloom.models.nested import prefix, scaled
from fedloom.select.rates import ASSIGNMENTS, Assignment, fixed

PRESETS: dict[str, dict[str, Any]] = {"paper": {}}
ABLATIONS: dict[str, dict[str, Any]] = {"no-scaler": {"scaler": False}, "no-masked-loss": {"masked_loss": "none"}}
Share = Annotated[float, Gt(0), Le(1)]


class Loss(NamedTuple):
    """The cross-entropy, and (data, context) -> ids of the classes whose head rows the client then owns."""

    term: Term
    rows: Callable[[Batches, Context], Sequence[int]]


LOSSES: dict[str, Loss] = {
    "zero": Loss(HeldCrossEntropy(0.0), lambda data, ctx: data.classes),
    "inf": Loss(HeldCrossEntropy(-math.inf), lambda data, ctx: data.classes),
    "none": Loss(CrossEntropy(), lambda data, ctx: ctx.stage.seen),
}


@dataclass(frozen=True)
class HeteroFL(Remeasured):
    """Server state: the dense model. Clients keep nothing. loss: name of `LOSSES`, whose term `local` has."""

    local: LocalSGD
    rates: tuple[float, ...]
    assigned: Assignment = fixed
    loss: str = "zero"
    scaler: bool = True
    statistics: str = "stage"

    personal: ClassVar[bool] = False
    ragged: ClassVar[Collection[str]] = ("params",)
    reveals: ClassVar[Mapping[str, str]] = {
        "params": "a part of a model trained on the client's data: open to gradient inversion, membership inference",
        "head": "the trained head rows of the client's classes",
        "held": "which classes the client holds",
        "buffers": "mean and variance of the client's activations",
    }

    def module(self, spec: ModelSpec) -> nn.Module:
        """The classifier with a table of its channels."""
        return prunable(spec.classifier(), getattr(spec, "input_shape", None))

    def send_part(self, server: Payload, client: ClientId | None, ctx: Context) -> Payload:
        """The client's block of the parameters."""
        rate, whole = self.assigned(self.rates, ctx), server["params"]
        return {"params": whole if rate == 1 else table(ctx).gather(whole, prefix(table(ctx), rate))}

    def client_update(self, down: Payload, state: Payload, data: Batches, ctx: Context) -> Update:
        """Train the block in a network of its shapes; head rows are sent apart, for those classes that are owned."""
        rate, channels = self.assigned(self.rates, ctx), table(ctx)
        kept = prefix(channels, rate)
        inside = ctx if rate == 1 else ctx.rebuild(channels.widths(kept))
        model = {"params": down["params"], "buffers": channels.gather(ctx.init_state()["buffers"], kept)}
        rows = list(LOSSES[self.loss].rows(data, ctx))
        owned = torch.isin(torch.arange(ctx.num_classes), torch.tensor(rows))
        with scaled(inside.net.module, channels, rate if self.scaler else 1.0):
            end = self.local(model, data, inside, ref={"held": owned.to(ctx.net.forward.device)})
        head = {n: take_rows(end.params[n], dim, rows) for n, dim in ctx.class_rows.items()}
        params = {name: tensor for name, tensor in end.params.items() if name not in head}
        return Update(state, {"params": params, "head": head, "held": {"bits": pack(owned)}}, metrics=end.metrics)

    def server_update(self, server: Payload, replies: Sequence[Reply], ctx: Context) -> Payload:
        """Means over the owners of every entry; indices of head rows are those of the client's classes."""
        old, trees = server["params"], {f: reply_trees(replies, f, uniform=True) for f in ("params", "head")}
        body = {name: tensor for name, tensor in old.items() if name not in ctx.class_rows}
        head = {name: old[name] for name in ctx.class_rows}
        rows = [_head_index(reply, ctx) for reply in replies]
        (parts, weights, who), (heads, _, _) = trees["params"], trees["head"]
        merged = indexed_mean(parts, None, weights, body, who=who) | indexed_mean(heads, rows, weights, head, who=who)
        return {**server, "params": {name: merged[name] for name in old}}

    def exchanges(self) -> Mapping[str, Exchange]:
        """Training goes by parts; `send` gives the dense model that serves."""
        return {**super().exchanges(), "train": Exchange(self.send_part, self.client_update, self.server_update)}

    def facts(self, server: Payload, states: Mapping[ClientId, Payload], ctx: Context) -> Sequence[Table]:
        """The widths of the clients' networks, or of each rate's where these are drawn; nothing where all are whole."""
        channels = table(ctx)
        widths = {rate: channels.widths(prefix(channels, rate)) for rate in sorted(set(self.rates), reverse=True)}
        if set(widths) == {1}:
            return []
        if self.assigned is fixed:
            note = "Shares of the dense network's channels that a client trains in every round it takes part in."
            title, by_client = "Width of the clients' networks", dealt(widths, self.rates, ctx)
            return [widths_kept(title, "client", by_client, channels, note)]
        note = "Shares of the dense network's channels. Every client draws its rate anew in every round."
        by_rate = {str(rate): found for rate, found in widths.items()}
        return [widths_kept("Width of the networks of each rate", "rate", by_rate, channels, note)]


def _head_index(reply: Reply, ctx: Context) -> dict[str, tuple[Tensor, ...]]:
    """For every tensor with class rows, the rows of the client's classes and the leading part of other dimensions."""
    rows = unpack(reply.up["held"]["bits"], ctx.num_classes).nonzero().flatten()
    return {
        name: tuple(rows if d == ctx.class_rows[name] else torch.arange(n) for d, n in enumerate(tensor.shape))
        for name, tensor in reply.up["head"].items()
    }


def heterofl(
    *,
    local: LocalSGD,
    rates: Annotated[tuple[Share, ...], MinLen(1)] = (1.0, 0.5, 0.25, 0.125, 0.0625),
    assignment: Literal["fixed", "dynamic"] = "fixed",
    masked_loss: Literal["zero", "inf", "none"] = "zero",
    scaler: bool = True,
    statistics: Literal["stage", "round"] = "stage",
) -> HeteroFL:
    """Assemble HeteroFL.

    rates: shares of the network's width that clients train.
    assignment: `fixed` deals the rates by client id, `dynamic` draws one per client and round.
    masked_loss: logits of seen classes that a client lacks: `zero`, minus infinity (`inf`), or as they are (`none`).
    scaler: divide the outputs of a narrower layer by its rate while it trains.
    statistics: when batch norms are measured in the dense model: after a `stage` or after every `round`.
    """
    term, assigned = pick("masked_loss", masked_loss, LOSSES).term, pick("assignment", assignment, ASSIGNMENTS)
    return HeteroFL(replace(local, terms=(term,)), tuple(rates), assigned, masked_loss, scaler, statistics)
