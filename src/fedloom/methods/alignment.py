"""Routing alignment: what FedAlign-MoE does beside merging parameters, and FedFMX may do for its pool.

Clients measure the routing of what they have trained and are held to a consensus; the server makes it and remembers,
per client, what was uploaded last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedloom.core import Batches, ClientId, Context, Payload, Reply
from fedloom.core.moe import inputs_recorded, moe_layers
from fedloom.local import LocalSGD
from fedloom.local.routing_statistics import RoutingRecord, RoutingStatistics, measured_routing, routing_numbers
from fedloom.local.sgd import Trained
from fedloom.local.terms.routing_alignment import RoutingAlignment
from fedloom.merge.routing import Agreement, Known, RoutingConsensus, Strength, by_overlap, strengths

CONSENSUS = "consensus"
ROUTING = "routing"
REVEALS = {
    ROUTING: "which experts the client's tokens use, hence how its labels are skewed, and mean hidden states per "
    "expert: with one token, that token's hidden state"
}


class Agreed(NamedTuple):
    """replies: those of clients whose pass saw tokens, with sizes n [C], and what they agree on."""

    replies: list[Reply]
    sizes: Tensor
    found: Agreement


@dataclass(frozen=True)
class Alignment:
    """What FedAlign-MoE and, for its pool, FedFMX are assembled with.

    statistics: what clients upload as "routing". train_pass: it is recorded in the last epoch of training; else after
    it, on at most `max_batches` batches and `share` of an epoch's, one at least. compare: the pass also shows them to
    the received model. term: of the loss from round `start` on (the first is 1), None for none. consensus: of the
    server; strength, least: of the term, per client and expert.
    """

    statistics: RoutingStatistics = field(default_factory=RoutingStatistics)
    train_pass: bool = False
    max_batches: int = 16
    share: float = 0.35
    compare: bool = False
    term: RoutingAlignment | None = None
    start: int = 2
    consensus: RoutingConsensus = field(default_factory=RoutingConsensus)
    strength: Strength = by_overlap
    least: float = 0.05

    def blank(self, ctx: Context) -> Payload:
        """The server's field "consensus" before the first round: a uniform one, which no client has been part of."""
        layers = moe_layers(ctx.net.module)
        shape = (len(layers), layers[0].num_experts)
        each = (ctx.num_clients, *shape)
        zeros = {name: torch.zeros(each) for name in ("means", "weights", "overlap", "margin", "count")}
        made = {"routing": torch.full(shape, 1 / shape[1]), "alpha": torch.ones(each), "rounds": torch.tensor(0)}
        known = {"known": torch.zeros(ctx.num_clients, dtype=torch.bool), "cohort": torch.zeros(ctx.num_clients)}
        return {CONSENSUS: {**made, **zeros, **known}}

    def sent(self, server: Payload, client: ClientId | None, ctx: Context) -> Payload:
        """p_g and the client's alpha [L, E] where the loss has the term this round, else nothing.

        Without a consensus yet there is no term, but for `start` 1, which takes the uniform one.
        """
        state = server[CONSENSUS]
        early = ctx.global_round + 1 < self.start or (self.start > 1 and not int(state["rounds"]))
        if client is None or self.term is None or early:
            return {}
        return {CONSENSUS: {"routing": state["routing"], "alpha": state["alpha"][client]}}

    def trained(
        self, local: LocalSGD, down: Payload, data: Batches, ctx: Context, ref: Mapping[str, Any] | None = None
    ) -> tuple[Trained, Payload]:
        """Local training with the term, and the field "routing" of the upload; its metrics are among the others."""
        layers = moe_layers(ctx.net.module)
        given = {**(ref or {}), "moe_layers": layers}
        if CONSENSUS in down and self.term is not None:
            local = replace(local, terms=(*local.terms, self.term))
            given[CONSENSUS] = down[CONSENSUS]
        if self.train_pass:
            local = replace(local, carries={**local.carries, "record": RoutingRecord(self.statistics)})
        with inputs_recorded(ctx.net.module) if self.train_pass and self.statistics.centroids else nullcontext():
            end = local(down, data, ctx, ref=given)
        sums = end.carry["record"] if self.train_pass else self._measured(local, down, data, ctx)
        end = end._replace(metrics={**end.metrics, **routing_numbers(sums)})
        return end, {ROUTING: self.statistics.closed(sums, ctx)}

    def _measured(self, local: LocalSGD, down: Payload, data: Batches, ctx: Context) -> dict[str, Tensor]:
        received = ctx.teacher(down["params"], down["buffers"], "received") if self.compare else None
        batches = min(self.max_batches, max(1, int(self.share * data.steps(local.batch_size))))
        sizes = {"batch_size": local.batch_size, "max_batches": batches}
        return measured_routing(ctx, data, self.statistics, received=received, **sizes)

    def agreed(self, server: Payload, replies: Sequence[Reply], uniform: bool) -> Agreed | None:
        """What the clients agree on; None where no client's pass saw a token."""
        kept = [reply for reply in replies if float(reply.up[ROUTING]["tokens"])]
        if not kept:
            return None
        sizes = torch.tensor([1.0 if uniform else reply.weight for reply in kept], dtype=torch.float64)
        state = server[CONSENSUS]
        found = self.consensus(
            _stacked(kept, "mean"),
            _stacked(kept, "margin"),
            sizes,
            state["routing"] if int(state["rounds"]) else None,
            _stacked(kept, "product") if self.compare else None,
        )
        return Agreed(kept, sizes, found)

    def remembered(self, server: Payload, agreed: Agreed | None) -> Payload:
        """The field "consensus" after a round."""
        if agreed is None:
            return {CONSENSUS: server[CONSENSUS]}
        ids = torch.tensor([reply.client for reply in agreed.replies])
        news = {"means": _stacked(agreed.replies, "mean"), "weights": agreed.found.weights}
        news |= {"overlap": agreed.found.overlap, "margin": _stacked(agreed.replies, "margin")}
        news |= {"count": _stacked(agreed.replies, "count")}
        state = dict(server[CONSENSUS])
        state |= {name: state[name].index_copy(0, ids, value.float()) for name, value in news.items()}
        state["known"] = state["known"].index_fill(0, ids, True)
        state["cohort"] = state["cohort"].index_fill(0, ids, len(ids))
        known = Known(*(state[name][state["known"]].double() for name in ("means", "weights", "cohort")))
        alpha = strengths(self.strength, self.least, known, agreed.found.routing, self.consensus.overlap)
        state["alpha"] = state["alpha"].clone()
        state["alpha"][state["known"]] = alpha.float()
        return {CONSENSUS: {**state, "routing": agreed.found.routing.float(), "rounds": state["rounds"] + 1}}


def _stacked(replies: Sequence[Reply], name: str) -> Tensor:
    return torch.stack([reply.up[ROUTING][name].double() for reply in replies])
