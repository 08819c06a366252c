"""What the server of MoAFCL does with the clients' generators and features; see `fedloom.methods.moafcl`.

The fields of its state: "adapters", name -> [k, ...], the generators' parameters on top of each other; "gate", a tree
of `fedloom.merge.prompt_gate`; "contexts" [k, n, text width], of evaluation; "assigned", "clients" int64 [clients].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.core import Context, Payload, Reply
from fedloom.core.errors import pick
from fedloom.core.seeds import generator
from fedloom.core.tree import Tensors
from fedloom.merge.mean import replies_mean
from fedloom.merge.prompt_gate import initial
from fedloom.merge.sample_gate import choices, trained
from fedloom.models.clip.anchors import kmeans
from fedloom.models.clip.context_generator import GATE_HIDDEN, ContextGenerator, mean_context

Target = Callable[[Tensor, Tensor], Tensor]  # (histograms [n, k], clusters int64 [n]) of n clients -> [n, k]
TARGETS: dict[str, Target] = {
    "histogram": lambda histograms, clusters: histograms,
    "cluster": lambda histograms, clusters: F.one_hot(clusters, histograms.shape[1]).float(),
}


@dataclass(frozen=True)
class AdapterPool:
    """size: k. cluster_every: stages from one clustering to the next. assign: "majority" or "random".

    target: what the gate learns, a key of `TARGETS`. epochs, lr, balance: of its training.
    """

    size: int = 5
    cluster_every: int = 11
    assign: str = "majority"
    target: str = "histogram"
    epochs: int = 500
    lr: float = 1.5
    balance: float = 0.02

    def initial(self, ctx: Context) -> dict[str, Any]:
        """Equal generators, a random gate, and everybody with the first generator."""
        module: ContextGenerator = ctx.net.module  # type: ignore[assignment]
        width, params = module.towers.image_width, ctx.init_state()["params"]
        adapters = {name: torch.stack([tensor] * self.size) for name, tensor in params.items()}
        gate = initial(width, self.size, hidden=GATE_HIDDEN, seed=ctx.seed)
        contexts = self._contexts(adapters, gate, torch.zeros(1, width), ctx)
        assigned = {"clients": torch.zeros(ctx.num_clients, dtype=torch.int64)}
        return {"adapters": adapters, "gate": gate, "contexts": contexts, "assigned": assigned}

    def generator(self, server: Payload, j: int) -> dict[str, Tensor]:
        """The parameters of generator j."""
        return {name: tensor[j] for name, tensor in server["adapters"].items()}

    def updated(self, server: Payload, replies: Sequence[Reply], ctx: Context) -> dict[str, Any]:
        """Cluster and average, train the gate, assign, and make the contexts of evaluation."""
        replies = sorted(replies, key=lambda reply: reply.client)
        features = [reply.up["features"]["early"] for reply in replies]
        clusters, known = self.clusters(server, replies, features, ctx), torch.cat(features)
        merged = [self._merged(server, replies, clusters, j) for j in range(self.size)]
        adapters = {name: torch.stack([tree[name] for tree in merged]) for name in server["adapters"]}
        histograms = torch.stack([reply.up["histogram"]["share"] for reply in replies])
        each = pick("method.target", self.target, TARGETS)(histograms, clusters)
        targets = each.repeat_interleave(torch.tensor([len(rows) for rows in features]), 0)
        given = {"epochs": self.epochs, "lr": self.lr, "balance": self.balance}
        gate = trained(server["gate"], known, targets, ctx.seed_for("gate"), **given)
        contexts = self._contexts(adapters, gate, known, ctx)
        assigned = {"clients": self._assigned(server, gate, replies, features, ctx)}
        return {"adapters": adapters, "gate": gate, "contexts": contexts, "assigned": assigned}

    def clusters(self, server: Payload, replies: Sequence[Reply], features: Sequence[Tensor], ctx: Context) -> Tensor:
        """The cluster of each reply, int64 [n]: by k-means of mean features, or the generator that it had."""
        if ctx.stage.index % self.cluster_every:
            mine: Tensor = server["assigned"]["clients"][[reply.client for reply in replies]]
            return mine
        means = torch.stack([rows.mean(0) for rows in features])
        return kmeans(means, torch.ones(len(means)), min(self.size, len(means.unique(dim=0))), ctx.seed_for("clusters"))

    def _merged(self, server: Payload, replies: Sequence[Reply], clusters: Tensor, j: int) -> Tensors:
        members = [reply for reply, cluster in zip(replies, clusters.tolist(), strict=True) if cluster == j]
        return replies_mean(members, "params", self.generator(server, j), uniform=True)

    def _assigned(
        self, server: Payload, gate: Tensors, replies: Sequence[Reply], features: Sequence[Tensor], ctx: Context
    ) -> Tensor:
        assigned = server["assigned"]["clients"].clone()
        if self.assign == "random":
            return torch.randint(self.size, assigned.shape, generator=generator(ctx.seed_for("assigned")))
        for reply, rows in zip(replies, features, strict=True):
            assigned[reply.client] = choices(gate, rows).bincount(minlength=self.size).argmax()
        return assigned

    def _contexts(self, adapters: Tensors, gate: Tensors, features: Tensor, ctx: Context) -> dict[str, Tensor]:
        chosen, found = choices(gate, features), []
        for j in range(self.size):
            own = features[chosen == j]
            tree = {name: tensor[j] for name, tensor in adapters.items()}
            found.append(mean_context(ctx, tree, own if len(own) else features))
        return {"contexts": torch.stack(found)}
