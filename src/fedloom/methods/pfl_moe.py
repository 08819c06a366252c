"""PFL-MoE: FedAvg, then every client mixes the global model with a head of its own by a gate of its own.

Source: Guo et al., "PFL-MoE: Personalized Federated Learning Based on Mixture of Experts" (APWeb-WAIM 2021, arXiv
2012.15589), and the authors' code. The two experts are models, not layers. Training is FedAvg; after it, on a client:

    head   theta_p = theta_g; the personal part of theta_p trains on 3/4 of the examples, all else is frozen
    gate   g = sigmoid(w . u + b) trains on the other 1/4; nothing else moves:
           y = g * y(theta_g) + (1 - g) * y(theta_p), the loss is the cross-entropy of the mixed logits y

u is the features of the global model (`gate_input: features`, PFL-MF) or the raw input (`inputs`, PFL-MFE; of text the
mean token embedding). The code's constants: SGD with momentum 0.9, weight decay 5e-4, batches of 64 for the head, Adam
for the gate. It trains both for 200 epochs at 1e-3, which suits LeNet; that is the preset `code_2020`, with its
unweighted mean. The defaults are fewer epochs at higher rates.

Decisions where paper and code are silent:

- Both phases are a trip at the end of every stage, to every client with data at it: the model comes down, nothing goes
  up. Head and gate start anew from that stage's model; a client without data at a stage keeps what it has.
- The personal part (`scope`) is the head (rows per class, or the child `head`), or that and the last layer of experts
  with its gate, or that and all experts. The base rests as a whole, batch statistics and dropout included.
- The gate starts at w = 0, b = 0; a client of fewer than 4 examples has none for it and keeps g = 1/2. Adam's weight
  decay is the term (5e-4 / 2) ||(w, b)||^2, which is the same. It learns from outputs computed once, unaugmented.
- The global view is FedAvg's model. The code keeps the checkpoint with the best test accuracy; we keep the last.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Ge, Gt
from torch import Tensor, nn

from fedloom.core import Batches, Context, Exchange, ModelSpec, Payload, Stage, Trip, Update
from fedloom.core.batches import Inputs
from fedloom.core.errors import pick
from fedloom.core.tree import Tensors, on_device
from fedloom.local import SGD, AdamW, LocalSGD, Phase, Schedule
from fedloom.local.held_out import held_out
from fedloom.local.on_outputs import train_on_outputs
from fedloom.local.resting import resting
from fedloom.local.terms import CrossEntropy, Proximal
from fedloom.methods.fedavg import FedAvg
from fedloom.models.mixing import GATE_INPUTS, MixingGate, check_gate_input, mixed
from fedloom.models.personal_parts import personal_names

RELEASE: dict[str, Any] = {"personal_epochs": 200, "gate_epochs": 200, "personal_lr": 1e-3, "gate_lr": 1e-3}
PRESETS: dict[str, dict[str, Any]] = {"paper": {}, "code_2020": {**RELEASE, "uniform": True}}
ABLATIONS: dict[str, dict[str, Any]] = {"no-head": {"personal_epochs": 0}, "no-gate": {"gate_epochs": 0}}


@dataclass(frozen=True)
class PFLMoE(FedAvg):
    """Server: the model. Client: "personal", its part of the model, and "gate" (empty: g = 1/2).

    head, gate: the loops of the two phases. scope, gate_input: see the module docstring.
    """

    head: LocalSGD = field(default_factory=LocalSGD)
    gate: LocalSGD = field(default_factory=LocalSGD)
    scope: str = "head"
    gate_input: str = "features"

    personal: ClassVar[bool] = True

    def module(self, spec: ModelSpec) -> nn.Module:
        """The classifier; refused where the scope names nothing in it, or where it has no features for the gate."""
        check_gate_input(module := spec.classifier(), self.gate_input)
        personal_names(module, self.scope, "pfl_moe")
        return module

    def exchanges(self) -> Mapping[str, Exchange]:
        """FedAvg's, and the trip that only comes down."""
        own = Exchange(self.send_model, self.personalise, lambda server, replies, ctx: server)
        return {**super().exchanges(), "personalise": own}

    def plan(self, stage: Stage) -> Iterable[Trip]:
        """FedAvg, then every client on its own."""
        return [*super().plan(stage), Trip("personalise", None, "all")]

    def personalise(self, down: Payload, state: Payload, data: Batches, ctx: Context) -> Update:
        """Train the personal part, then the gate; both stay here."""
        for_head, for_gate = held_out(data, 4, ctx.seed_for("held out"))
        with resting(ctx.net.module, names := personal_names(ctx.net.module, self.scope, "pfl_moe")):
            end = replace(self.head, phases=(Phase(names),))(down, for_head, ctx)
        personal = {name: end.params[name] for name in names}
        gate, metrics = self._gated(self._outputs(down, personal, ctx), for_gate, ctx)
        losses = {f"personal_{name}": value for name, value in end.metrics.items()}
        return Update({"personal": personal, "gate": gate}, {}, metrics={**losses, **metrics})

    def predict(self, down: Payload, state: Payload, x: Inputs, ctx: Context) -> Tensor:
        """The mixture on a client that has a personal part, else the global model."""
        if not state:
            return super().predict(down, state, x, ctx)
        out = self._outputs(down, state["personal"], ctx)(x)
        return ctx.mask_unseen(mixed(**out, gate=on_device(state["gate"], ctx.net.forward.device))[0])

    def _outputs(self, down: Payload, personal: Tensors, ctx: Context) -> Callable[[Inputs], dict[str, Tensor]]:
        """What the gate reads, the global and the personal logits of a batch, in evaluation mode."""
        own = ctx.teacher({**down["params"], **on_device(personal, "cpu")}, down["buffers"], name="personal")
        ctx.bind(down["params"], down["buffers"])
        read = pick("gate_input", self.gate_input, GATE_INPUTS)

        def run(x: Inputs) -> dict[str, Tensor]:
            with ctx.evaluating():
                out = ctx.apply(x)
                inputs = read(ctx.net.module, x, out)
                return {"inputs": inputs, "common": out["logits"], "personal": own(x)["logits"]}

        return run

    def _gated(
        self, outputs: Callable[[Inputs], dict[str, Tensor]], data: Batches, ctx: Context
    ) -> tuple[Tensors, dict[str, float]]:
        """The trained gate, and its mean g over the examples that trained it; nothing of both without examples."""
        seen = [(outputs(batch.x), batch.y) for batch in data.epoch(batch_size=64, purpose="gate", shuffle=False)]
        if not seen:
            return {}, {}
        x = {name: torch.cat([out[name].cpu() for out, _ in seen]) for name in seen[0][0]}
        make = partial(MixingGate, x["inputs"].shape[1])
        end = train_on_outputs(self.gate, make, x, torch.cat([y for _, y in seen]), ctx)
        return end.params, {"gate": float(mixed(**x, gate=on_device(end.params, "cpu"))[1].mean())}


def pfl_moe(
    *,
    local: LocalSGD,
    scope: Literal["head", "last_moe", "experts"] = "head",
    gate_input: Literal["features", "inputs"] = "features",
    personal_epochs: Annotated[int, Ge(0)] = 10,
    personal_lr: Annotated[float, Gt(0)] = 0.01,
    gate_epochs: Annotated[int, Ge(0)] = 20,
    gate_lr: Annotated[float, Gt(0)] = 0.01,
    label_scope: Literal["seen", "current"] = "seen",
    uniform: bool = False,
    buffers: Literal["mean", "pooled", "frozen"] = "mean",
) -> PFLMoE:
    """Assemble PFL-MoE; the options that are not named here are FedAvg's.

    scope: what is personal: the `head`, it and the last layer of experts with its gate (`last_moe`), or it and all
        `experts`.
    gate_input: what the gate reads: `features` of the global model, or raw `inputs`.
    personal_epochs: epochs of the personal part; 0 leaves it as the global one.
    personal_lr: rate of SGD in these.
    gate_epochs: epochs of the gate; 0 mixes half and half.
    gate_lr: rate of Adam in these.
    """
    if uniform and (personal_epochs, gate_epochs, personal_lr, gate_lr) == tuple(RELEASE.values()):
        warnings.warn("pfl_moe follows the public code where it differs: clients count alike", stacklevel=2)
    local = replace(local, terms=(CrossEntropy(label_scope),))
    alone = replace(local, schedule=Schedule(), batch_size=64, clip_norm=None)
    head = replace(alone, optimizer=SGD(personal_lr, 0.9, 5e-4), epochs=personal_epochs)
    alone = replace(alone, terms=(*alone.terms, Proximal(5e-4)))
    gate = replace(alone, optimizer=AdamW(gate_lr, weight_decay=0.0), epochs=gate_epochs)
    return PFLMoE(local, uniform, buffers, head, gate, scope, gate_input)
