"""The server's side of Fed-Duet: a pool of prompts, a gate that learns whom they suit, and what each client is sent.

Source: Guo, Chen, Cui, "Fed-Duet" (ICLR 2026), the knowledge orchestrator. The parts are in
`fedloom.models.clip.anchors` (the pool), `fedloom.merge.prompt_gate` (the gate) and `fedloom.select.dispatch` (the
choice). All that it knows is in fields of the server's state, so that a run resumes and moves between machines:

- "pool": "prompts" [K, n_ctx, d_t];
- "gate", "gate_optimizer": see `fedloom.merge.prompt_gate`;
- "clients": "summary" [N, d], "known" [N] bool, "usual" [N] (running mean of losses), "begun" int64 [N] (the last
  task that the client took part in, -1 for none), "index" [N, n], the prompts that each client is sent next, "common"
  [n], those of the global view;
- "usage": "count" int64 [N, T, K], how often a client trained with a prompt in a task.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedloom.core import ClientId, Context, Payload, Reply
from fedloom.core.seeds import generator
from fedloom.core.tree import Tensors
from fedloom.merge import prompt_gate
from fedloom.merge.prompt_gate import Feedback
from fedloom.models.clip.anchors import initial_pool
from fedloom.models.clip.network import ClipNetwork
from fedloom.select.dispatch import ByGate, Dispatch

BY_GATE = ByGate()
FIELDS = ("pool", "gate", "gate_optimizer", "clients", "usage")


@dataclass(frozen=True)
class Pool:
    """Where the prompts come from, by names of `fedloom.models.clip.anchors`."""

    words: str = "imagenet"
    vectors: str = "content"
    form: str = "rescaled"
    layout: str = "template"

    def __call__(self, module: ClipNetwork, prompt: Tensor | None, size: int, seed: int) -> Tensor:
        """Prompts [size, n_ctx, d_t] on the CPU; none for a network without a local prompt.

        prompt: the server's, [n_ctx, d_t]; what the network is bound to may be any client's.
        """
        if prompt is None:
            return torch.zeros(0, 0, module.towers.text_width)
        return initial_pool(module.towers, module.words, size, seed, prompt=prompt, **vars(self)).cpu()


POOL = Pool()


@dataclass(frozen=True)
class Orchestrator:
    """pool: what is in it at the start. size: K. count: n, prompts per client.

    dispatch: the choice. target, over: what the gate learns, and over which entries (see `TARGETS` and `OVER` of
    `fedloom.merge.prompt_gate`). hidden, lr: of the gate. persists: pool, gate and summaries live on when a task ends.
    Without a pool (size 0) nobody is sent a prompt.
    """

    pool: Pool = POOL
    size: int = 64
    count: int = 8
    dispatch: Dispatch = BY_GATE
    target: str = "dispatched"
    over: str = "all"
    hidden: int = 512
    lr: float = 1e-3
    persists: bool = True

    def initial(self, ctx: Context, params: Tensors) -> dict[str, Any]:
        """Fields before the first round; every client's first prompts are drawn. params: of the server's model."""
        module: ClipNetwork = ctx.net.module  # type: ignore[assignment]
        width, clients = module.towers.width, ctx.num_clients
        gate = prompt_gate.initial(width, max(1, self.size), hidden=self.hidden, seed=ctx.seed)
        prompts = self.pool(module, params.get("context"), self.size, ctx.seed)
        known = {"known": torch.zeros(clients, dtype=torch.bool), "summary": torch.zeros(clients, width)}
        fields: dict[str, Any] = {
            "pool": {"prompts": prompts},
            "gate": gate,
            "gate_optimizer": prompt_gate.initial_optimizer(gate),
            "usage": {"count": torch.zeros(clients, ctx.stage.count, self.size, dtype=torch.int64)},
        }
        known |= {"usual": torch.zeros(clients), "begun": torch.full((clients,), -1)}
        return fields | {"clients": self._choices(gate, known, ctx, start=True)}

    def sent(self, server: Payload, client: ClientId | None) -> dict[str, Any]:
        """The field "prompts" of what a client receives: "shared" [n, n_ctx, d_t]; None: those of the global view."""
        clients = server["clients"]
        index = clients["common"] if client is None else clients["index"][client]
        return {"prompts": {"shared": server["pool"]["prompts"][index]}}

    def updated(self, server: Payload, replies: Sequence[Reply], ctx: Context) -> dict[str, Any]:
        """Fields after a round: one step of the gate on what the clients told, then new choices for everybody.

        server: with the model as it is after the round.
        """
        replies = sorted(replies, key=lambda reply: reply.client)
        clients, ids = server["clients"], torch.tensor([reply.client for reply in replies], dtype=torch.long)
        told = [reply.up["summary"] for reply in replies]
        summaries = torch.stack([t["feature"] for t in told]) if told else clients["summary"][:0]
        losses = torch.cat([t["loss"] for t in told]) if told else clients["usual"][:0]
        index = clients["index"][ids]
        fields: dict[str, Any] = {"usage": {"count": _counted(server["usage"]["count"], ids, index, ctx.stage.index)}}
        if not self.persists and ctx.round == ctx.stage.rounds - 1:
            return {**self.initial(ctx, server["params"]), **fields}
        gate = self._step(server, summaries, losses, index, clients["usual"][ids], told, ctx) if self.size else {}
        usable = summaries.isfinite().all(1)
        state = {name: clients[name].clone() for name in ("known", "summary", "usual", "begun")}
        state["known"][ids[usable]], state["summary"][ids[usable]] = True, summaries[usable]
        state["usual"][ids] = prompt_gate.running_loss(clients["usual"][ids], losses)
        state["begun"][ids] = ctx.stage.index
        return fields | gate | {"clients": self._choices(gate.get("gate", server["gate"]), state, ctx)}

    def _step(
        self,
        server: Payload,
        summaries: Tensor,
        losses: Tensor,
        index: Tensor,
        usual: Tensor,
        told: Sequence[Any],
        ctx: Context,
    ) -> dict[str, Any]:
        held = prompt_gate.spread(index, self.size)
        attention = None
        if told and all("attention" in t for t in told):
            attention = prompt_gate.spread(index, self.size, torch.stack([t["attention"] for t in told]))
        targets = prompt_gate.TARGETS[self.target](Feedback(held, losses, usual, attention))
        mask = prompt_gate.OVER[self.over](held)
        rng = generator(ctx.seed_for("gate"))
        gate, optimizer, _ = prompt_gate.step(
            server["gate"], server["gate_optimizer"], summaries, targets, losses, mask, rng=rng, lr=self.lr
        )
        return {"gate": gate, "gate_optimizer": optimizer}

    def _choices(self, gate: Any, state: dict[str, Tensor], ctx: Context, *, start: bool = False) -> dict[str, Tensor]:
        """The state with every client's next prompts; draws are named by stage, round and client."""
        scores = prompt_gate.scores(gate, state["summary"])
        rows = []
        for client, known in enumerate(state["known"].tolist()):
            rng = generator(ctx.seed_for("dispatch", client, start))
            rows.append(self.dispatch(scores[client] if known else None, self.size, min(self.count, self.size), rng))
        mean = scores[state["known"]].mean(0) if bool(state["known"].any()) else -torch.arange(float(max(1, self.size)))
        common = mean.sort(descending=True, stable=True).indices[: self.count].sort().values
        empty = torch.zeros(0, dtype=torch.long)
        index = torch.stack(rows) if rows else empty[None]
        return {**state, "index": index, "common": common if self.size else empty}


def _counted(count: Tensor, ids: Tensor, index: Tensor, stage: int) -> Tensor:
    """`count` with one more use of every prompt that the clients held."""
    new = count.clone()
    for client, held in zip(ids.tolist(), index, strict=True):
        new[client, stage, held] += 1
    return new
