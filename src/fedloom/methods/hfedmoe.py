"""HFedMoE: every client trains the experts that matter most to its data, and counts in the merge by how much they do.

Source: Fang et al., HFedMoE (arXiv 2601.00583), for the idea; the rules are ours. d(e|t) says whether expert e has
processed token t, p(e|t) is its share of the gate, f_e(h) what it makes of its input:

    client   I_i(e) = sum_t d(e|t) p(e|t) ||f_e(h_t)||, divided by its sum over the experts of the layer
    server   w(e) <- sum_i n_i I_i(e) w_i(e) / sum_i n_i I_i(e); gate rows too; I = 0 for all: as it was; rest: FedAvg

Decisions:

- A client holds the most important experts, the share `budget` of all experts of the network, and at least top-k in
  each layer; none without importance but for these. Everything else about the sets is FedMoE's (`fedmoe`): the first
  `warm_rounds` rounds on the whole model, the zeros, predictions. Nothing is recommended.
- I_i is measured after every local training, with the trained model in evaluation mode; under a set it is 0 outside.
  The set stays the one chosen after training the whole model. Normalising takes the scale of a client's outputs away.
- Softmax ignores a vector added to all rows of a gate, but weights that differ by row do not. So each client's rows are
  moved by their mean difference from the server's, over the rows that it holds, and the sample-weighted mean of these
  differences is added back: with every expert held this centres the rows and adds back the mean row. Gates with sigmoid
  scores have no such freedom and are averaged as they are.
- `weighting="samples"` lets every active expert count by its client's examples alone.
- With equal importance everywhere and every expert held it is FedAvg, up to rounding.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge
from torch import Tensor

from fedloom.core import Batches, Context, Payload, Reply
from fedloom.core.errors import pick
from fedloom.core.moe import moe_layers
from fedloom.core.tree import Tensors
from fedloom.local import LocalSGD
from fedloom.local.expert_use import expert_importance
from fedloom.merge.mean import weighted_mean
from fedloom.methods.expert_subsets import MODEL, entropy, merged_parts
from fedloom.methods.fedmoe import FedMoE, Share
from fedloom.select.experts import Covering

PRESETS: dict[str, dict[str, Any]] = {"paper": {}}
ABLATIONS: dict[str, dict[str, Any]] = {"no-importance": {"weighting": "samples"}, "full-budget": {"budget": 1.0}}
Weigh = Callable[[Tensor], Tensor]


def by_importance(scores: Tensor) -> Tensor:
    """I_i."""
    return scores


def by_samples(scores: Tensor) -> Tensor:
    """1 where an expert is active."""
    return (scores > 0).float()


WEIGHINGS: dict[str, Weigh] = {"importance": by_importance, "samples": by_samples}


@dataclass(frozen=True)
class HFedMoE(FedMoE):
    """As FedMoE; "use" is the importance I. weigh: I_i [L, E] -> what the client's experts count for, per example."""

    recommend_every: int = 0
    weigh: Weigh = by_importance

    reveals: ClassVar[Mapping[str, str]] = {
        **{name: text for name, text in FedMoE.reveals.items() if name in MODEL},
        "importance": "how much each expert contributes on the client's data",
    }

    def measured(self, held: Tensor | None, data: Batches, ctx: Context) -> tuple[Payload, Mapping[str, float]]:
        """I_i."""
        scores = expert_importance(ctx, data, self.local.batch_size)
        return {"importance": {"score": scores}}, {"expert_entropy": entropy(scores)}

    def use_of(self, reply: Reply, ctx: Context) -> Tensor:
        """I_i, float32 [L, E]."""
        return reply.up["importance"]["score"]

    def merged(self, server: Payload, replies: Sequence[Reply], held: Sequence[Tensor], ctx: Context) -> Payload:
        """Means weighted by n_i I_i, of gate rows after `levelled`. held: bool [L, E] of every reply."""
        layers = moe_layers(ctx.net.module)
        use = [self.weigh(self.use_of(reply, ctx)) * reply.weight for reply in replies]
        for index, layer in enumerate(layers):
            if layer.score == "softmax":
                names = [name for name in layer.gate if name in server["params"]]
                replies = levelled(replies, server["params"], names, [mine[index] for mine in held])
        return merged_parts(server, replies, held, use, ctx)


def levelled(replies: Sequence[Reply], old: Tensors, names: Sequence[str], held: Sequence[Tensor]) -> list[Reply]:
    """The replies with gate rows whose mean difference from `old` is that of all clients together.

    names: tensors with a row per expert, of "params". held: bool [E], the rows that each reply has.
    """
    new: list[dict[str, Tensor]] = [{} for _ in replies]
    for name in names:
        rows = [reply.up["params"][name].double() for reply in replies]
        drifts = [{name: (mine - old[name][at].double()).mean(0)} for mine, at in zip(rows, held, strict=True)]
        common = weighted_mean(drifts, [reply.weight for reply in replies], drifts[0])[name]
        for found, mine, drift in zip(new, rows, drifts, strict=True):
            found[name] = (mine - drift[name] + common).to(old[name].dtype)
    return [
        reply._replace(up={**reply.up, "params": ChainMap(found, reply.up["params"])})
        for reply, found in zip(replies, new, strict=True)
    ]


def hfedmoe(
    *,
    local: LocalSGD,
    budget: Share = 0.5,
    weighting: Literal["importance", "samples"] = "importance",
    warm_rounds: Annotated[int, Ge(1)] = 1,
) -> HFedMoE:
    """Assemble HFedMoE.

    budget: share of the network's experts that a client holds.
    weighting: what a client counts for in an expert: examples times `importance`, or `samples` alone.
    warm_rounds: first rounds, on the whole model.
    """
    return HFedMoE(local, Covering(1.0, budget), warm_rounds, weigh=pick("weighting", weighting, WEIGHINGS))
