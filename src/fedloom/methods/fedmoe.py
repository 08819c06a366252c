"""FedMoE: every client trains the experts that its data activate; the server keeps the whole mixture.

Source: Mei et al., "FedMoE: Personalized Federated Learning via Heterogeneous Mixture of Experts" (arXiv 2408.11304):
its two stages, the merge, and the recommendation as an idea. d(e|t) says whether expert e processed token t, T_i are
the client's tokens, k experts are used per token, E_i is the set that client i holds:

    stage 1   w_i <- training of the whole model;   f_i(e) = sum_{t in T_i} d(e|t) / (k |T_i|)   of each layer
    stage 2   w_i <- training of what is held, with softmax over E_i alone
    server    w(e) <- sum_{i holds e} n_i w_i(e) / sum_{i holds e} n_i, gate rows too; unheld: as it was; rest: FedAvg

Decisions; the rules of choice and of recommendation are ours throughout, see `fedloom.select.experts`:

- E_i is the smallest set per layer with `rho` of f_i, then cut to the share `budget` of all experts of the network by
  descending f_i; every layer keeps its top-k most used, even above the budget. Where a capacity drops tokens, rho is
  of what was processed.
- Stage 1 lasts `warm_rounds` rounds of the run; whoever takes part for the first time after it begins with one such
  round. f_i is measured with the trained model in evaluation mode, without padding, and never again: under a mask it
  would favour E_i. In a stream it is that of the client's first rounds.
- Every `recommend_every` rounds (0: never) each client swaps one expert at most. It is then taken to use the new one as
  much as the clients like it do; with f_i left as it was, the next recommendation would swap it out again.
- The client binds the whole network with zeros for what it lacks. Clients predict with their part, the global view is
  the whole mixture with the merged gate. Gate rows come from softmaxes over different sets and are averaged as they
  are, so their scales differ; a gate's buffers with a row per expert are merged likewise.
- With every expert held it is FedAvg, bit for bit.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from fedloom.core import Batches, ClientId, Context, Method, Payload, Reply, Table, Update
from fedloom.core.batches import Inputs
from fedloom.core.moe import moe_layers, need_moe_layers
from fedloom.local import LocalSGD
from fedloom.local.routing_statistics import RoutingStatistics, measured_routing
from fedloom.methods.expert_subsets import (
    MODEL,
    entropy,
    expert_facts,
    held_part,
    merged_parts,
    restricted,
    whole_model,
)
from fedloom.select.experts import Choose, Covering, recommended

PRESETS: dict[str, dict[str, Any]] = {"paper": {}}
ABLATIONS: dict[str, dict[str, Any]] = {
    "no-recommendation": {"recommend_every": 0},
    "full-budget": {"budget": 1.0},
}
Share = Annotated[float, Gt(0), Le(1)]
COUNTS = RoutingStatistics(centroids=False)


@dataclass(frozen=True)
class FedMoE(Method):
    """Server: the model, "held" (bool) and "use" (f), each {"clients": [N, L, E]} with zeros for clients without.

    choose: (f [L, E], top-k per layer) -> bool [L, E].
    """

    local: LocalSGD
    choose: Choose
    warm_rounds: int = 1
    recommend_every: int = 5

    needs_experts: ClassVar[bool] = True
    ragged: ClassVar[Collection[str]] = MODEL
    reveals: ClassVar[Mapping[str, str]] = {
        "params": "a part of a model trained on the client's data: open to gradient inversion, membership inference",
        "buffers": "statistics of the client's data, where the network keeps any",
        "routing": "how many tokens the client has, and how many of them each expert processes",
    }

    def init_server(self, ctx: Context) -> Payload:
        """The model, and no sets."""
        layers = need_moe_layers(ctx.net.module, type(self).__name__.lower())
        shape = (ctx.num_clients, len(layers), layers[0].num_experts)
        tables = {"held": {"clients": torch.zeros(shape, dtype=torch.bool)}, "use": {"clients": torch.zeros(shape)}}
        return {**ctx.init_state(), **tables}

    def send(self, server: Payload, client: ClientId | None, ctx: Context) -> Payload:
        """What the client holds, and which experts these are; the model to clients without a set."""
        held = None if client is None else server["held"]["clients"][client]
        if held is None or not bool(held.any()):
            return {field: server[field] for field in MODEL}
        return {**held_part(server, held, ctx), "held": {"experts": held.clone()}}

    def client_update(self, down: Payload, state: Payload, data: Batches, ctx: Context) -> Update:
        """Train what is held; upload it, and what `measured` finds."""
        layers, held = moe_layers(ctx.net.module), down["held"]["experts"] if "held" in down else None
        with restricted(ctx, held):
            end = self.local(down if held is None else whole_model(down, held, ctx), data, ctx)
            found, metrics = self.measured(held, data, ctx)
        mine = torch.ones(len(layers), layers[0].num_experts, dtype=torch.bool) if held is None else held
        up = {**held_part({"params": end.params, "buffers": end.buffers}, mine, ctx), **found}
        return Update(state, up, metrics={**end.metrics, "held_experts": float(mine.sum()), **metrics})

    def measured(self, held: Tensor | None, data: Batches, ctx: Context) -> tuple[Payload, Mapping[str, float]]:
        """Fields and metrics on the trained network, which is bound: n_i(e) and |T_i|, of a client without a set."""
        if held is not None:
            return {}, {}
        size = self.local.batch_size
        sums = measured_routing(ctx, data, COUNTS, batch_size=size, max_batches=-(-len(data) // size))
        found = {name: sums[name].float().cpu() for name in ("count", "tokens")}
        return {"routing": found}, {"expert_entropy": entropy(found["count"])}

    def use_of(self, reply: Reply, ctx: Context) -> Tensor:
        """f_i, float32 [L, E]."""
        chosen = torch.tensor([[layer.top_k] for layer in moe_layers(ctx.net.module)])
        return reply.up["routing"]["count"] / (chosen * reply.up["routing"]["tokens"].clamp(min=1))

    def server_update(self, server: Payload, replies: Sequence[Reply], ctx: Context) -> Payload:
        """Merge, note the use of clients without a set, choose sets once stage 1 is over, and recommend."""
        layers, sets = moe_layers(ctx.net.module), server["held"]["clients"]
        without = ~sets.flatten(1).any(1)
        model = self.merged(server, replies, [sets[r.client] | without[r.client] for r in replies], ctx)
        use, held = server["use"]["clients"].clone(), sets.clone()
        for reply in replies:
            if without[reply.client]:
                use[reply.client] = self.use_of(reply, ctx)
        top_k = [layer.top_k for layer in layers]
        known = use.flatten(1).any(1)
        if ctx.global_round + 1 >= self.warm_rounds:
            for client in (known & without).nonzero().flatten().tolist():
                held[client] = self.choose(use[client], top_k)
        ready = held.flatten(1).any(1).nonzero().flatten()
        if self.recommend_every and (ctx.global_round + 1) % self.recommend_every == 0 and len(ready):
            held[ready], use[ready] = recommended(use[ready], held[ready], top_k)
        return {**server, **model, "held": {"clients": held}, "use": {"clients": use}}

    def merged(self, server: Payload, replies: Sequence[Reply], held: Sequence[Tensor], ctx: Context) -> Payload:
        """Means over the holders, by their examples. held: bool [L, E] of every reply, all for a client without."""
        use = [mine * reply.weight for mine, reply in zip(held, replies, strict=True)]
        return merged_parts(server, replies, held, use, ctx)

    def predict(self, down: Payload, state: Payload, x: Inputs, ctx: Context) -> Tensor:
        """Scores of the client's part, or of the whole mixture."""
        if "held" not in down:
            return super().predict(down, state, x, ctx)
        held = down["held"]["experts"]
        with restricted(ctx, held):
            return self.deployed(whole_model(down, held, ctx), state, ctx).scores(x)

    def facts(self, server: Payload, states: Mapping[ClientId, Payload], ctx: Context) -> Sequence[Table]:
        """The sets of the clients."""
        sets = server["held"]["clients"]
        held = {int(client): sets[client] for client in sets.flatten(1).any(1).nonzero().flatten()}
        return expert_facts(held, moe_layers(ctx.net.module))


def fedmoe(
    *,
    local: LocalSGD,
    rho: Share = 0.9,
    budget: Share = 0.5,
    warm_rounds: Annotated[int, Ge(1)] = 1,
    recommend_every: Annotated[int, Ge(0)] = 5,
) -> FedMoE:
    """Assemble FedMoE.

    rho: share of a client's choices in a layer that the experts it holds must cover.
    budget: most of the network's experts that a client holds, as a share.
    warm_rounds: first rounds, on the whole model, in which use is measured.
    recommend_every: rounds from one recommendation to the next; 0 for none.
    """
    return FedMoE(local, Covering(rho, budget), warm_rounds, recommend_every)
