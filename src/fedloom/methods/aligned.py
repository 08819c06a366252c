"""Federated averaging of a network with experts that respects gates and experts: the base of FedAlign-MoE.

Tensors that are neither gate nor routed expert are averaged as in FedAvg.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import nn

from fedloom.core import Batches, ClientId, ConfigError, Context, Payload, Reply, Table, Update
from fedloom.core.moe import MoELayer, expert_names, gate_names, moe_layers
from fedloom.local.sgd import Phase
from fedloom.merge.buffers import buffer_policy
from fedloom.merge.matching import Cost, Permuted, match, pooled_centroids
from fedloom.merge.mean import reply_trees, weighted_mean
from fedloom.merge.parts import Selected
from fedloom.merge.semantic import SemanticMerge, experts_by_shares
from fedloom.methods.alignment import REVEALS, ROUTING, Alignment
from fedloom.methods.fedavg import FedAvg
from fedloom.methods.gate_modes import GATE_MODES, GateMode
from fedloom.methods.routing_facts import (
    blank_history,
    history_tables,
    longer_history,
    region_numbers,
    routing_tables,
)

MODEL = ("params", "buffers")
GATE, MATCHING, REGION, HISTORY, OWN = "gate", "matching", "region", "history", "own"


@dataclass(frozen=True)
class AlignedFedAvg(FedAvg):
    """Server: the model; "consensus" (see `Alignment`); "region", how clients came together in the experts of the last
    round; "history", a few numbers per round; "matching", centroids of the experts, and "own", experts of each client,
    where asked for. Client: "gate" where gates are local, else nothing.

    gates: what becomes of them. experts: their merge, None for FedAvg's. personalized: every client is sent experts
    of its own. matching: cost by which clients' experts are first put in the server's order, None to keep theirs.
    """

    alignment: Alignment = field(default_factory=Alignment)
    gates: GateMode = GATE_MODES["pooled"]
    experts: SemanticMerge | None = field(default_factory=SemanticMerge)
    personalized: bool = False
    matching: Cost | None = None

    needs_experts: ClassVar[bool] = True
    reveals: ClassVar[Mapping[str, str]] = {**FedAvg.reveals, **REVEALS}

    @property
    def personal(self) -> bool:  # type: ignore[override]  # of the class in methods that have but one
        """Where a client has a gate or experts of its own."""
        return self.gates.local or self.personalized

    def init_server(self, ctx: Context) -> Payload:
        """The model and no agreement yet."""
        layers = moe_layers(ctx.net.module)
        shape = (len(layers), layers[0].num_experts)
        state: dict[str, Any] = {**ctx.init_state(), **self.alignment.blank(ctx)}
        if self.experts is not None:
            state[REGION] = {"thresholds": torch.full((2, *shape), -1.0)}
        if self.matching is not None:
            _check_whole(ctx.net.module, layers)
        if self.matching is not None and self.alignment.statistics.centroids:
            width = self.alignment.statistics.dims or layers[0].hidden
            state[MATCHING] = {"count": torch.zeros(shape), "centroid": torch.zeros(*shape, width)}
        return {**state, HISTORY: blank_history(), **({OWN: {}} if self.personalized else {})}

    def init_client(self, ctx: Context) -> Payload:
        """The initial gate where gates are local."""
        return self._own_gate(ctx.init_state(), ctx)

    def send(self, server: Payload, client: ClientId | None, ctx: Context) -> Payload:
        """The model, with the client's own experts and without gates that it keeps; what its loss is held to."""
        model: dict[str, Any] = {name: dict(server[name]) for name in MODEL}
        if client is None:
            return model
        names = self._local_names(ctx)
        if names:
            model = {name: _without(tree, names) for name, tree in model.items()}
        prefix = f"{client}:"
        own = {name: tensor for name, tensor in server.get(OWN, {}).items() if name.startswith(prefix)}
        model["params"] |= {name.removeprefix(prefix): tensor for name, tensor in own.items()}
        return {**model, **self.alignment.sent(server, client, ctx)}

    def client_update(self, down: Payload, state: Payload, data: Batches, ctx: Context) -> Update:
        """Train, held to the consensus; upload the model and the routing statistics."""
        local, names = self.local, gate_names(moe_layers(ctx.net.module))
        if not self.gates.trained:
            local = replace(local, phases=(Phase(tuple(n for n in ctx.net.trainable if n not in names)),))
        end, extra = self.alignment.trained(local, self._whole(down, state, ctx), data, ctx)
        model = {"params": end.params, "buffers": end.buffers}
        kept = self._own_gate(model, ctx)
        if not self.gates.travels:
            model = {name: _without(tree, names) for name, tree in model.items()}
        return Update(kept, {**model, **extra}, metrics=end.metrics)

    def server_update(self, server: Payload, replies: Sequence[Reply], ctx: Context) -> Payload:
        """Experts in order, agreement on routing, then each part of the model by its own merge."""
        layers = moe_layers(ctx.net.module)
        new: dict[str, Any] = {}
        if self.matching is not None:
            replies, new[MATCHING] = _in_order(server, replies, layers, self.matching)
        agreed = self.alignment.agreed(server, replies, self.uniform)
        merged_apart, merged = frozenset(), {"params": {}, "buffers": {}}
        if self.gates.merge is not None:
            merged_apart = gate_names(layers)
            merged = merged if agreed is None else self.gates.merge(server, agreed, layers)
        if self.experts is not None:
            experts, new[REGION], new[OWN] = self._experts(server, replies, layers)
            merged["params"] |= experts
            merged_apart |= expert_names(layers)
        trees, weights, who = reply_trees(replies, "params", self.uniform)
        rest = _without(server["params"], merged_apart)
        mean = weighted_mean([Selected(tree, rest) for tree in trees], weights, rest, who=who)
        buffers = buffer_policy(self.buffers)(replies, server["buffers"], uniform=self.uniform)
        kept = {name: tensor for name, tensor in server["buffers"].items() if name in merged_apart}
        model = {
            "params": {**server["params"], **mean, **merged["params"]},
            "buffers": {**buffers, **kept, **merged["buffers"]},
        }
        new = {name: value for name, value in new.items() if name in server}
        history = longer_history(server[HISTORY], agreed, new.get(REGION), ctx.global_round)
        return {**server, **model, **new, HISTORY: history, **self.alignment.remembered(server, agreed)}

    def deployed(self, down: Payload, state: Payload, ctx: Context) -> Context:
        """The network with what was sent, and the own gate where none was."""
        return super().deployed(self._whole(down, state, ctx), state, ctx)

    def facts(self, server: Payload, states: Mapping[ClientId, Payload], ctx: Context) -> Sequence[Table]:
        """Routing, overlap, margin and load of the clients, and how alike they use the experts."""
        tables = routing_tables(server["consensus"], server.get(REGION, {}), moe_layers(ctx.net.module))
        return [*history_tables(server[HISTORY]), *tables]

    def _experts(self, server: Payload, replies: Sequence[Reply], layers: Sequence[MoELayer]) -> tuple[Any, Any, Any]:
        assert self.experts is not None
        trees, weights, who = reply_trees(replies, "params", self.uniform)
        statistics = [reply.up[ROUTING] for reply in replies]
        if self.alignment.statistics.dims:
            layers = [replace(layer, hidden=self.alignment.statistics.dims) for layer in layers]
        before, old = server[REGION]["thresholds"], server["params"]
        merged, region = self.experts(trees, weights, old, layers, statistics, who=who, before=before)
        own = dict(server.get(OWN, {}))
        for at, client in enumerate(who) if self.personalized else ():
            theirs = experts_by_shares(trees, region.personal(at), old, layers, who=who)
            own |= {f"{client}:{name}": tensor for name, tensor in theirs.items()}
        return merged, region_numbers(region, [reply.client for reply in replies]), own

    def _local_names(self, ctx: Context) -> Collection[str]:
        return gate_names(moe_layers(ctx.net.module)) if self.gates.local else ()

    def _own_gate(self, model: Payload, ctx: Context) -> Payload:
        names = self._local_names(ctx)
        return {GATE: {n: t for name in MODEL for n, t in model[name].items() if n in names}} if names else {}

    def _whole(self, down: Payload, state: Payload, ctx: Context) -> Payload:
        gate, params = state.get(GATE, {}), set(ctx.net.trainable)
        kept = {
            "params": {name: tensor for name, tensor in gate.items() if name in params},
            "buffers": {name: tensor for name, tensor in gate.items() if name not in params},
        }
        return {**down, **{name: {**kept[name], **down[name]} for name in MODEL}} if gate else down


def _without(tree: Mapping[str, torch.Tensor], names: Collection[str]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tree.items() if name not in names}


def _check_whole(module: nn.Module, layers: Sequence[MoELayer]) -> None:
    """Raises `ConfigError` where a part of the experts is frozen: it stays in its place while the rest is reordered."""
    starts = tuple(f"{layer.name}.experts." for layer in layers)
    frozen = [n for n, p in module.named_parameters() if n.startswith(starts) and not p.requires_grad]
    if frozen:
        raise ConfigError(
            f"expert_matching reorders experts, and '{frozen[0]}' is frozen (adapters?) and keeps its place; set "
            "expert_matching to index"
        )


def _in_order(
    server: Payload, replies: Sequence[Reply], layers: Sequence[MoELayer], cost: Cost
) -> tuple[list[Reply], dict[str, torch.Tensor]]:
    """The replies with experts, gates and statistics in the server's order, and the centroids to match the next by.

    Without centroids in the clients' statistics there are none to match by.
    """
    known = server.get(MATCHING)
    trees, statistics = [reply.up["params"] for reply in replies], [reply.up[ROUTING] for reply in replies]
    reference = known if known and bool(known["count"].any()) else None
    found = match(layers, trees, statistics, server["params"], reference, cost=cost)
    ordered = []
    for reply, tree, own, orders in zip(replies, found.trees, found.statistics, found.orders, strict=True):
        buffers = Permuted(reply.up["buffers"], layers, orders)
        ordered.append(reply._replace(up={**reply.up, "params": tree, "buffers": buffers, ROUTING: own}))
    if known is None:
        return ordered, {}
    news = pooled_centroids(found.statistics)
    used = news["count"] > 0
    kept = {
        "count": news["count"].where(used, known["count"]),
        "centroid": news["centroid"].where(used.unsqueeze(2), known["centroid"]),
    }
    return ordered, kept
