"""PromptFL: FedAvg of the context vectors of a prompt, around a frozen CLIP.

Source: T. Guo, S. Guo, Wang, Tang, Xu, "PromptFL: Let Federated Participants Cooperatively Learn Prompts Instead of
Models" (IEEE TMC 2023, arXiv 2208.11625); the prompt is that of CoOp (Zhou et al., IJCV 2022). With f a picture's
feature and t_c(v) that of the sentence [v_1 ... v_n, name of class c, "."], all of length 1:

    logits_c = exp(ls) f . t_c(v);   clients train v on the cross-entropy;   v <- sum_i (n_i / n) v_i

Decisions:

- Clients count by their examples, as the paper says; its release averages references to one live model, which gives
  the last client's v. `uniform`: all the same.
- `class_specific`: every class has a v of its own. It moves on every client as a negative of the others, so it is
  averaged over the clients that hold examples of the class alone, which they tell. Nobody's stays as it was; a class
  that arrives starts from the mean over the classes that had arrived before, where there are any.
- The paper trains with SGD 0.001, a cosine after one constant epoch at 1e-5, 5 local epochs and batches of 32; here
  that is the section `training`. Optimiser state is fresh in every call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Ge
from torch import Tensor

from fedloom.core import Batches, ClientId, Context, Payload, Reply, Update
from fedloom.core.tree import Tensors
from fedloom.local import LocalSGD
from fedloom.local.terms import CrossEntropy
from fedloom.merge.masked import masked_mean
from fedloom.merge.mean import reply_trees
from fedloom.methods.clip_based import ClipMethod, LabelScope
from fedloom.models.clip.prompted import ClassPrompted, Prompted
from fedloom.models.clip.words import Position

PRESETS: dict[str, dict[str, Any]] = {"paper": {}}


@dataclass(frozen=True)
class ClassPromptFL(ClipMethod):
    """Server: the contexts [classes, n, text width], and "started" {"classes": bool}: the classes that had a round."""

    reveals: ClassVar[Mapping[str, str]] = {**ClipMethod.reveals, "holds": "which classes the client has examples of"}

    def init_server(self, ctx: Context) -> Payload:
        """The contexts; no class has started."""
        return {**super().init_server(ctx), "started": {"classes": torch.zeros(ctx.num_classes, dtype=torch.bool)}}

    def send(self, server: Payload, client: ClientId | None, ctx: Context) -> Payload:
        """The contexts, those of classes that have just arrived at their start."""
        return {"params": self.begun(server, ctx), "buffers": server["buffers"]}

    def begun(self, server: Payload, ctx: Context) -> Tensors:
        """The parameters, with the mean context of the classes that have had a round for those that are new."""
        started, new = server["started"]["classes"], ~server["started"]["classes"] & _seen(ctx)
        if not (bool(started.any()) and bool(new.any())):
            return server["params"]
        context = server["params"]["context"].clone()
        context[new] = context[started].mean(0)
        return {**server["params"], "context": context}

    def client_update(self, down: Payload, state: Payload, data: Batches, ctx: Context) -> Update:
        """Train; tell which classes there are examples of."""
        update = super().client_update(down, state, data, ctx)
        holds = torch.zeros(ctx.num_classes, dtype=torch.bool)
        holds[list(data.classes)] = True
        return update._replace(up={**update.up, "holds": {"classes": holds}})

    def server_update(self, server: Payload, replies: Sequence[Reply], ctx: Context) -> Payload:
        """Average the context of each class over the clients that hold it."""
        trees, weights, who = reply_trees(replies, "params", self.uniform)
        masks = [{"context": reply.up["holds"]["classes"]} for reply in replies]
        params = masked_mean(trees, masks, weights, self.begun(server, ctx), who=who)
        return {**server, "params": params, "started": {"classes": server["started"]["classes"] | _seen(ctx)}}


def _seen(ctx: Context) -> Tensor:
    seen = torch.ones(ctx.num_classes, dtype=torch.bool)
    seen[ctx.unseen] = False
    return seen


def promptfl(
    *,
    local: LocalSGD,
    n_ctx: Annotated[int, Ge(1)] = 16,
    position: Position = "end",
    class_specific: bool = False,
    label_scope: LabelScope = "current",
    uniform: bool = False,
) -> ClipMethod:
    """Assemble PromptFL; the options that are not named here are FedAvg's.

    n_ctx: number of context vectors.
    position: where the class name stands: behind the context (`end`), between two halves (`middle`) or before it
        (`front`).
    class_specific: give every class context vectors of its own, averaged over the clients that hold the class.
    label_scope: classes that a client scores in training: those of its task (`current`) or all so far (`seen`).
    """
    kind, build = (ClassPromptFL, ClassPrompted) if class_specific else (ClipMethod, Prompted)
    local = replace(local, terms=(CrossEntropy(label_scope),))
    return kind(local, uniform, build=build(n_ctx, position), label_scope=label_scope)
