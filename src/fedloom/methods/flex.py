"""FLEx: pretrained experts stay frozen, everything else is averaged, and every client grafts experts of its own.

Source: Liu et al., "FLEx: Personalized Federated Learning for Mixture-of-Experts LLMs via Expert Grafting" (arXiv
2506.00965), as far as its abstract goes; the formulas are ours. On client i, in every mixture-of-experts layer:

    y = MoE(h) + sigmoid(w_i . h + b_i) P_i(h)

The experts in MoE never change and never travel. The client trains P_i, w_i, b_i and the shared tensors (attention,
norms, embeddings, routers, shared experts, head); the shared ones are averaged as in FedAvg, the grafts stay.

Decisions:

- A graft is made at a client's first participation, of the network that it downloads: the expert whose output alone is
  closest to the layer's on the client's tokens (`graft: closest`), or the one that most tokens go to ("most_used").
  Then its second layer is fitted by least squares with a `ridge` toward what it was, so the reconstruction error is
  never above that expert's own; with "closest", never above the best single expert's. "none" grafts nothing.
- The fit reads `graft_examples` of the client's examples at most, drawn at random, twice, without training.
- b_i starts at `bias` = -2, w_i at 0. The graft keeps learning in later rounds and stages.
- The global view, which is also what a client has before its first round, has no graft: there P is 0.
- Shared layers move under frozen experts: where that hurts, lower training.optimizer.lr, which is one for all.
- Experts start from the configured weights; with random ones they stay random.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor, nn

from fedloom.core import Batches, Context, ModelSpec, Payload, Update
from fedloom.core.errors import pick
from fedloom.core.seeds import generator
from fedloom.core.tree import Tensors
from fedloom.local import LocalSGD
from fedloom.local.terms import CrossEntropy
from fedloom.methods.fedavg import FedAvg
from fedloom.models.moe_lm.grafts import GRAFTS, experts_frozen, grafted
from fedloom.models.moe_lm.refit import COSTS, fitted_grafts

PRESETS: dict[str, dict[str, Any]] = {"paper": {}}
ABLATIONS: dict[str, dict[str, Any]] = {"no-graft": {"graft": "none"}}


def parted(params: Tensors) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The parameters that are shared, and those of the grafts."""
    own = {name: tensor for name, tensor in params.items() if name.startswith(f"{GRAFTS}.")}
    return {name: tensor for name, tensor in params.items() if name not in own}, own


@dataclass(frozen=True)
class FLEx(FedAvg):
    """Server: the model without experts and grafts. Client: "grafts", once it has taken part.

    graft: of `COSTS`, or "none". bias: b at the start. ridge, examples: of the fit.
    """

    graft: str = "closest"
    bias: float = -2.0
    ridge: float = 1e-3
    examples: int = 512

    personal: ClassVar[bool] = True
    needs_experts: ClassVar[bool] = True
    reveals: ClassVar[Mapping[str, str]] = {
        **FedAvg.reveals,
        "params": "all of a model but its experts, trained on the client's data: open to gradient inversion",
    }

    def module(self, spec: ModelSpec) -> nn.Module:
        """The classifier with frozen experts and, unless there are none, grafts."""
        return (experts_frozen if self.graft == "none" else grafted)(spec.classifier(), "flex")

    def init_server(self, ctx: Context) -> Payload:
        """The initial model without its grafts."""
        state = ctx.init_state()
        return {**state, "params": parted(state["params"])[0]}

    def client_update(self, down: Payload, state: Payload, data: Batches, ctx: Context) -> Update:
        """Graft where there is no graft yet, train, keep the grafts, upload the rest."""
        if self.graft != "none" and not state and len(data):
            state = {GRAFTS: self._fitted(down, data, ctx)}
        end = self.local(self._whole(down, state, ctx), data, ctx)
        shared, own = parted(end.params)
        return Update(
            {GRAFTS: own} if state else state, {"params": shared, "buffers": end.buffers}, metrics=end.metrics
        )

    def deployed(self, down: Payload, state: Payload, ctx: Context) -> Context:
        """The network with the client's grafts, or with none."""
        return super().deployed(self._whole(down, state, ctx), state, ctx)

    def _whole(self, down: Payload, state: Payload, ctx: Context) -> Payload:
        own = state.get(GRAFTS) or parted(ctx.init_state()["params"])[1]
        return {**down, "params": {**down["params"], **own}}

    def _fitted(self, down: Payload, data: Batches, ctx: Context) -> Tensors:
        whole = self._whole(down, {}, ctx)
        ctx.bind(whole["params"], whole["buffers"])
        order = torch.randperm(len(data), generator=generator(ctx.seed_for("graft")))
        some = data.subset(order[: self.examples])
        return fitted_grafts(ctx, some, pick("graft", self.graft, COSTS), self.ridge, self.bias)


def flex(
    *,
    local: LocalSGD,
    graft: Literal["closest", "most_used", "none"] = "closest",
    bias: Annotated[float, Ge(-50), Le(50)] = -2.0,
    ridge: Annotated[float, Gt(0)] = 1e-3,
    graft_examples: Annotated[int, Ge(1)] = 512,
    label_scope: Literal["seen", "current"] = "seen",
    uniform: bool = False,
    buffers: Literal["mean", "pooled", "frozen"] = "mean",
) -> FLEx:
    """Assemble FLEx; the options that are not named here are FedAvg's.

    graft: expert that a client's own one starts from: the `closest` in output, the `most_used`, or `none` is grafted.
    bias: b at the start, the logit of the graft's weight.
    ridge: pull of the fitted layer to what it was.
    graft_examples: most examples that the fit reads.
    """
    local = replace(local, terms=(CrossEntropy(label_scope),))
    return FLEx(local, uniform, buffers, graft, bias, ridge, graft_examples)
