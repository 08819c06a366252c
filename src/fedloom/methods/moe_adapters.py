"""MoE-Adapters in a federation: FedAvg of routed adapters in every block of both towers of a frozen CLIP.

Source: Yu et al., "Boosting Continual Learning of Vision-Language Models via Mixture-of-Experts Adapters" (CVPR 2024,
arXiv 2403.11549); the federation around it is ours. After a block's attention, with x the stream and h one token of it,

    x <- x + MLP(LN x) + sum_{e in top-k} g_e A_e(x),   g = softmax over the k largest entries of W h,
    A_e(x) = scale (W_up drop(relu(W_down x + b_down)) + b_up)

in training with noise on W h (`fedloom.models.clip.adapters`, without shared adapters). Clients minimise the
cross-entropy over the classes of their task; the server averages experts and routers by numbers of examples, in every
round.

Decisions:

- Defaults are those of the paper's class-incremental experiments, where k = E: every expert works for every sample.
- The router of a text reads SOT as in the public code, which is the same for all sentences, because a causal mask hides
  the rest from it; `token="eot"` routes by the sentence. Of pictures it reads the class token.
- The code's routing noise and the cropping of test pictures, which it leaves on in evaluation, are off there.
- `routers="local"`: routers stay with the clients and are restored; the global view has the initial ones.
- `freeze`: when a task begins, so many more experts of every layer are held still, the ones with the largest sum of
  gates over all clients in the task before; one stays free. The paper does this in its multi-domain experiments.
- The auto-selector that sends foreign pictures to plain CLIP is not there: all classes that arrived are scored.
- The paper trains with AdamW 1e-3 without weight decay, batches of 128, one pass per task.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Lt
from torch import Tensor

from fedloom.core import Batches, ClientId, Context, Payload, Reply, Update
from fedloom.core.tree import Tensors
from fedloom.local import LocalSGD
from fedloom.local.carries.gate_mass import GateMass
from fedloom.local.frozen_experts import frozen_experts
from fedloom.local.terms import CrossEntropy
from fedloom.methods.activate_freeze import ActivateFreeze
from fedloom.methods.clip_based import ClipMethod, show
from fedloom.models.clip.adapters import Adapters
from fedloom.models.clip.network import ClipNetwork
from fedloom.models.clip.routed import RoutedAdapters, by_parameter

PRESETS: dict[str, dict[str, Any]] = {"paper": {}}


@dataclass(frozen=True)
class MoEAdapters(ClipMethod):
    """kept: patterns of the parameters that clients keep, their state "kept". experts: E.

    freeze: which experts later tasks leave alone; clients then tell "usage" and are sent "frozen".
    """

    kept: tuple[str, ...] = ()
    experts: int = 2
    freeze: ActivateFreeze = field(default_factory=ActivateFreeze)

    reveals: ClassVar[Mapping[str, str]] = {
        **ClipMethod.reveals,
        "usage": "how the client's pictures and classes spread over the experts",
    }

    @property
    def personal(self) -> bool:  # type: ignore[override]  # of the class in methods that have but one
        """Where clients keep their routers."""
        return bool(self.kept)

    def _own(self, params: Tensors) -> dict[str, Tensor]:
        return {name: t for name, t in params.items() if any(fnmatchcase(name, pattern) for pattern in self.kept)}

    def init_server(self, ctx: Context) -> Payload:
        """The model; nothing used, nothing frozen."""
        return {**super().init_server(ctx), **self.freeze.initial(ctx, self.experts)}

    def init_client(self, ctx: Context) -> Payload:
        """The initial values of what it keeps."""
        return {"kept": self._own(ctx.init_state()["params"])} if self.kept else {}

    def send(self, server: Payload, client: ClientId | None, ctx: Context) -> Payload:
        """The model without what clients keep, and to train what is frozen; the global view is the model."""
        model = self.send_model(server, client, ctx)
        if client is None:
            return model
        own = self._own(model["params"])
        params = {name: tensor for name, tensor in model["params"].items() if name not in own}
        begun = self.freeze.begun(server, ctx) if ctx.exchange == "train" else {}
        return {**model, "params": params, **({"frozen": begun["frozen"]} if begun else {})}

    def client_update(self, down: Payload, state: Payload, data: Batches, ctx: Context) -> Update:
        """Train what is not frozen; upload it and the sums of the gates, keep the rest."""
        show(ctx, self.label_scope)
        start = {**down, "params": {**state.get("kept", {}), **down["params"]}}
        module: ClipNetwork = ctx.net.module  # type: ignore[assignment]
        frozen = by_parameter(module, down["frozen"]) if "frozen" in down else {}
        carries = {"usage": GateMass()} if "frozen" in down else {}
        with frozen_experts(module, frozen):
            end = replace(self.local, carries=carries)(start, data, ctx)
        own = self._own(end.params)
        params = {name: tensor for name, tensor in end.params.items() if name not in own}
        up = {"params": params, "buffers": end.buffers, **end.carry}
        return Update({"kept": own} if own else state, up, metrics=end.metrics)

    def server_update(self, server: Payload, replies: Sequence[Reply], ctx: Context) -> Payload:
        """FedAvg's merge; usage is added up."""
        return {**super().server_update(server, replies, ctx), **self.freeze.updated(server, replies, ctx)}

    def deployed(self, down: Payload, state: Payload, ctx: Context) -> Context:
        """The network with what was sent, and what the client keeps where that was not."""
        params = {**state.get("kept", {}), **down["params"]}
        return super().deployed({**down, "params": params}, state, ctx)


def moe_adapters(
    *,
    local: LocalSGD,
    experts: Annotated[int, Ge(1)] = 2,
    top_k: Annotated[int, Ge(1)] = 2,
    bottleneck: Annotated[int, Ge(1)] = 64,
    scale: Annotated[float, Ge(0)] = 0.1,
    dropout: Annotated[float, Ge(0), Lt(1)] = 0.1,
    router_std: Annotated[float, Ge(0)] = 0.0,
    token: Literal["sot", "eot"] = "sot",
    routers: Literal["shared", "local"] = "shared",
    freeze: Annotated[int, Ge(0)] = 0,
    template: str = "a bad photo of a {}.",
    label_scope: Literal["current", "seen"] = "current",
    uniform: bool = False,
) -> MoEAdapters:
    """Assemble MoE-Adapters; the options that are not named here are FedAvg's.

    experts: per block.
    top_k: experts that a sample passes.
    bottleneck: hidden units of an expert.
    scale: factor of an expert's output.
    dropout: of hidden units in training.
    router_std: deviation of the router's weights at the start; 0 starts in a tie.
    token: what the router of a text reads: the start token (`sot`), the same for all sentences, or the end (`eot`).
    routers: `shared` are averaged, `local` stay with the clients.
    freeze: experts per layer, the most used ones, that are held still from one task to the next.
    template: the sentence about a class, with {} for its name.
    label_scope: classes that a client scores in training: those of its task (`current`) or all so far (`seen`).
    """
    options = Adapters(experts, top_k, bottleneck, scale, dropout, shared=0, router_std=router_std)
    return MoEAdapters(
        replace(local, terms=(CrossEntropy(label_scope),)),
        uniform,
        build=RoutedAdapters(options, token, template),
        label_scope=label_scope,
        kept=("*.router.*",) if routers == "local" else (),
        experts=experts,
        freeze=ActivateFreeze(freeze),
    )
