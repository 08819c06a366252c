"""pFedMoAP: clients mix the texts of their own prompt with those of other clients' prompts by a private attention.

Source: Luo, Chen, Wu, "Mixture of Experts Made Personalized: Federated Prompt Learning for Vision-Language Models"
(ICLR 2025, arXiv 2410.10114). The server keeps the last prompt of every client. Client i, with f a picture's feature,
t_c the text of class c in its own prompt v, u_c^j in the downloaded prompt j, pi a pooling, and A_i its attention:

    download   v <- sum_k (n_k / n) v_k, and the M - 1 prompts v_j of other clients nearest to its own last one
    train      v and A_i on CE(lam exp(ls) f . t_c + exp(ls) pi(f) . A_i(pi(f); pi(t_c), pi(u_c^1), ...))
    upload     v

The attention is `fedloom.models.clip.fusion.CrossAttention`; there is no factor 1 - lam. The downloaded prompts are
frozen, and encoded once per round.

Decisions:

- M = `experts` counts the averaged prompt. Fewer than M - 1 known prompts: all of them; M = 1: PromptFL, bit for bit.
- A client's first round is PromptFL's: it gets no experts and its attention rests. The release decides this by a test
  that is never true, so that a new client goes on with another client's attention.
- `choose`: the release draws the experts at random (`random`, anew for every round and evaluation), whatever is asked.
- v follows the section `training` (the paper: SGD 0.002 with a cosine, 5 local epochs, batches of 32), A_i plain SGD of
  constant rate `gate_lr` in the same steps.
- A client predicts with its own attention, the averaged prompt, and the experts that it would be sent now; one that has
  not taken part, and the global view, with the averaged prompt alone.
- In a stream the attention and the table of prompts outlive stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Ge, Gt
from torch import Tensor

from fedloom.core import Batches, ClientId, Context, Payload, Reply, Update
from fedloom.core.errors import pick
from fedloom.local import SGD, LocalSGD, Phase
from fedloom.local.sgd import Group
from fedloom.local.terms import CrossEntropy
from fedloom.methods.clip_based import ClipMethod, LabelScope, show
from fedloom.models.clip.prompted import Mixed, Prompted, PromptMixture
from fedloom.models.clip.words import Position
from fedloom.select.neighbours import NEIGHBOURS, Neighbours, nearest

PRESETS: dict[str, dict[str, Any]] = {"paper": {}}
ABLATIONS: dict[str, dict[str, Any]] = {"no-experts": {"experts": 1}, "random-experts": {"choose": "random"}}
PROMPT, GATE = "context", "fusion.*"


@dataclass(frozen=True)
class PFedMoAP(ClipMethod):
    """Server: the averaged prompt, and "prompts" {"last": [N, n, width], "known": bool [N]}. Client: "gate".

    experts: M. choose: (table, known, client, how many, seed) -> ids.
    """

    experts: int = 10
    choose: Neighbours = nearest

    personal: ClassVar[bool] = True
    reveals: ClassVar[Mapping[str, str]] = {
        "params": "context vectors trained on the client's data, which other clients are handed as they are",
        "buffers": "nothing: there are none",
    }

    def init_server(self, ctx: Context) -> Payload:
        """The first prompt, and nobody's."""
        prompt = ctx.init_state()["params"][PROMPT]
        table = {"last": prompt.new_zeros(ctx.num_clients, *prompt.shape)}
        known = {"known": torch.zeros(ctx.num_clients, dtype=torch.bool)}
        return {"params": {PROMPT: prompt}, "buffers": {}, "prompts": table | known}

    def init_client(self, ctx: Context) -> Payload:
        """The initial attention."""
        return {"gate": gate_of(ctx.init_state()["params"])}

    def send(self, server: Payload, client: ClientId | None, ctx: Context) -> Payload:
        """The averaged prompt; to a client that has taken part "experts" {"prompts": [at most M - 1, n, width]} too."""
        model, last, known = self.send_model(server, client, ctx), server["prompts"]["last"], server["prompts"]["known"]
        if client is None or not bool(known[client]):
            return model
        ids = self.choose(last, known, client, self.experts - 1, ctx.seed_for("experts", client))
        return {**model, "experts": {"prompts": last[ids]}} if len(ids) else model

    def client_update(self, down: Payload, state: Payload, data: Batches, ctx: Context) -> Update:
        """Train the prompt, and the attention where there are experts; upload the prompt."""
        show(ctx, self.label_scope)
        receive(down, ctx)
        local = self.local if "experts" in down else replace(self.local, groups=(), phases=(Phase((PROMPT,)),))
        end = local(joined(down, state), data, ctx)
        up = {"params": {PROMPT: end.params[PROMPT]}, "buffers": {}}
        return Update({"gate": gate_of(end.params)}, up, metrics=end.metrics)

    def server_update(self, server: Payload, replies: Sequence[Reply], ctx: Context) -> Payload:
        """Average the prompts, and note each."""
        last, known = (server["prompts"][name].clone() for name in ("last", "known"))
        for reply in replies:
            last[reply.client], known[reply.client] = reply.up["params"][PROMPT], True
        return {**super().server_update(server, replies, ctx), "prompts": {"last": last, "known": known}}

    def deployed(self, down: Payload, state: Payload, ctx: Context) -> Context:
        """The client's own mixture, or the averaged prompt alone."""
        receive(down, ctx)
        return super().deployed(joined(down, state), state, ctx)


def gate_of(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All but the prompt."""
    return {name: tensor for name, tensor in params.items() if name != PROMPT}


def joined(down: Payload, state: Payload) -> Payload:
    """The averaged prompt and the client's attention as one model."""
    return {"params": {**state["gate"], **down["params"]}, "buffers": down["buffers"]}


def receive(down: Payload, ctx: Context) -> None:
    """Hand the network the experts that came down, or none."""
    module: PromptMixture = ctx.net.module  # type: ignore[assignment]
    module.receive(down["experts"]["prompts"] if "experts" in down else None)


def pfedmoap(
    *,
    local: LocalSGD,
    n_ctx: Annotated[int, Ge(1)] = 16,
    position: Position = "end",
    experts: Annotated[int, Ge(1)] = 10,
    choose: Literal["nearest", "random"] = "nearest",
    lam: Annotated[float, Ge(0)] = 0.5,
    pooled: Annotated[int, Ge(1)] = 128,
    heads: Annotated[int, Ge(1)] = 8,
    gate_lr: Annotated[float, Gt(0)] = 0.01,
    label_scope: LabelScope = "current",
    uniform: bool = False,
) -> PFedMoAP:
    """Assemble pFedMoAP. A CLIP whose joint width is below `pooled` is not pooled.

    n_ctx: number of context vectors.
    position: where the class name stands: behind the context (`end`), between two halves (`middle`) or before it
        (`front`).
    experts: prompts that are mixed, the averaged one among them (M); 1 is PromptFL.
    choose: the other clients' prompts: the `nearest` to the client's last one, or `random` ones.
    lam: weight of the own prompt's logits.
    pooled: entries to which features are pooled before the attention.
    heads: of the attention.
    gate_lr: rate of SGD for the attention.
    label_scope: classes that a client scores in training: those of its task (`current`) or all so far (`seen`).
    uniform: average prompts with equal weights instead of by examples.
    """
    local = replace(local, terms=(CrossEntropy(label_scope),), groups=(Group((GATE,), SGD(gate_lr)),))
    build, pick_experts = Mixed(Prompted(n_ctx, position), pooled, heads, lam), pick("choose", choose, NEIGHBOURS)
    return PFedMoAP(local, uniform, build=build, label_scope=label_scope, experts=experts, choose=pick_experts)
