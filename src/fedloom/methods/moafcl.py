"""MoAFCL: k generators of context vectors on the server, one per cluster of clients, and a gate over them.

Source: the public code `bear-zd/MoAFCL` (ICMR 2025; the paper was not at hand). A generator makes the context vectors
of a batch from h, the mean token behind an early block of a frozen CLIP (`fedloom.models.clip.context_generator`). Once
per stage a client receives the generator assigned to it, trains it on the cross-entropy in `local_epochs` passes for
each round of the stage, and uploads it with h of every example and the histogram t of the gate's choices. The server

    clusters   in stage 0 and every 11th by k-means of the clients' mean noisy h, else by assignment; generator j
               becomes the plain mean over cluster j, and stays as it was where the cluster is empty;
    learns     the gate g on all uploaded h with the client's histogram as target (`fedloom.merge.sample_gate`);
    assigns    each client the generator that most of its h choose, for its next stage (or a random one).

In evaluation the gate chooses one generator for every picture.

Decisions:

- There is one exchange per stage, as in the code. It has the visits of all the stage's rounds; schedules by round or by
  stage stand still in it. Every pass has an optimiser of its own (there: Adam 1e-4, betas (0.9, 0.98), eps 1e-6, weight
  decay 0.2, batches of 100).
- Laplace noise of scale `noise` is added to h on the client; the code adds it on the server, where it protects nothing.
  Without clipping it is no guarantee of privacy. The histogram is of the clean h.
- The code clusters flattened features, for which all clients need equally many examples: here it is their means, and no
  more clusters than there are distinct ones.
- A generator's context in evaluation is its mean over the uploaded h that the gate gives to it, over all where it gives
  none: the code averages over the test batch, so that a prediction depends on its neighbours.
- All generators start from the same values, so the first means are of models that began alike.
- The gate learns to imitate its own past choices; `gate_target="cluster"` teaches it the clusters instead.
- A client that was away keeps its assignment.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt

from fedloom.core import Batches, ClientId, Context, Payload, Reply, Stage, Trip, Update
from fedloom.core.seeds import generator
from fedloom.local import LocalSGD, Phase
from fedloom.local.summary import laplace
from fedloom.local.terms import CrossEntropy
from fedloom.merge.sample_gate import choices
from fedloom.methods.adapter_pool import AdapterPool
from fedloom.methods.clip_based import ClipMethod, show
from fedloom.models.clip.context_generator import Generator, early_features

PRESETS: dict[str, dict[str, Any]] = {"paper": {}}


@dataclass(frozen=True)
class MoAFCL(ClipMethod):
    """pool: what the server does. noise: scale of the Laplace noise on uploaded features."""

    pool: AdapterPool = field(default_factory=AdapterPool)
    noise: float = 0.01

    personal: ClassVar[bool] = False
    ragged: ClassVar[tuple[str, ...]] = ("features",)
    reveals: ClassVar[Mapping[str, str]] = {
        "params": ClipMethod.reveals["params"],
        "features": "of every example what an early block sees on average, with noise: open to feature inversion",
        "histogram": "how the client's examples spread over the generators",
    }

    def init_server(self, ctx: Context) -> Payload:
        """The fields of `AdapterPool`."""
        return self.pool.initial(ctx)

    def plan(self, stage: Stage) -> Iterable[Trip]:
        """One trip, with the cohort of the stage's first round."""
        return [Trip("train", 0)] if stage.rounds else []

    def send(self, server: Payload, client: ClientId | None, ctx: Context) -> Payload:
        """The client's generator and the gate; to predict, the gate and the contexts."""
        if client is None or ctx.exchange == "evaluate":
            gate = {f"gate.{name}": tensor for name, tensor in server["gate"].items()}
            return {"params": {**gate, **server["contexts"]}, "buffers": {}}
        mine = int(server["assigned"]["clients"][client])
        return {"params": self.pool.generator(server, mine), "buffers": {}, "gate": server["gate"]}

    def client_update(self, down: Payload, state: Payload, data: Batches, ctx: Context) -> Update:
        """Train the generator; upload it, noisy features and the histogram of the gate's choices."""
        show(ctx, self.label_scope)
        passes = (Phase(epochs=1),) * (self.local.epochs * ctx.stage.rounds)
        end = replace(self.local, phases=passes)(down, data, ctx)
        features = early_features(ctx, data)
        share = choices(down["gate"], features).bincount(minlength=self.pool.size) / max(1, len(features))
        noise = self.noise * laplace(features.shape, generator(ctx.seed_for("laplace"))).float()
        up = {"params": end.params, "features": {"early": features + noise}, "histogram": {"share": share}}
        return Update(state, up, metrics=end.metrics)

    def server_update(self, server: Payload, replies: Sequence[Reply], ctx: Context) -> Payload:
        """See `AdapterPool.updated`."""
        return self.pool.updated(server, replies, ctx)

    def deployed(self, down: Payload, state: Payload, ctx: Context) -> Context:
        """The mixture of all contexts, scoring every class that has arrived."""
        served = ctx.rebuild(self.pool.size)
        served.bind(down["params"], down["buffers"])
        show(served, "seen")
        return served


def moafcl(
    *,
    local: LocalSGD,
    adapters: Annotated[int, Ge(1)] = 5,
    context: Annotated[int, Ge(1)] = 8,
    extract_layer: Annotated[int, Ge(1)] = 1,
    noise: Annotated[float, Ge(0)] = 0.01,
    cluster_every: Annotated[int, Ge(1)] = 11,
    assign: Literal["majority", "random"] = "majority",
    gate_target: Literal["histogram", "cluster"] = "histogram",
    gate_epochs: Annotated[int, Ge(0)] = 500,
    gate_lr: Annotated[float, Gt(0)] = 1.5,
    balance: Annotated[float, Ge(0)] = 0.02,
    label_scope: Literal["current", "seen"] = "current",
) -> MoAFCL:
    """Assemble MoAFCL.

    adapters: generators on the server (k).
    context: vectors that a generator puts before a class name.
    extract_layer: block behind which tokens are taken for the generators, from 1.
    noise: scale of Laplace noise on what a client uploads of its pictures.
    cluster_every: stages from one clustering of the clients to the next.
    assign: a client's next generator: the one that the gate gives most of its pictures (`majority`), or a `random` one.
    gate_target: what the gate learns: the clients' `histogram` of its own choices, or their `cluster`.
    gate_epochs: passes of the gate over all uploads per stage.
    gate_lr: its rate.
    balance: weight of CV^2, the unevenness of choices, in the gate's loss.
    label_scope: classes that a client scores in training: those of its task (`current`) or all so far (`seen`).
    """
    return MoAFCL(
        replace(local, terms=(CrossEntropy(label_scope),)),
        build=Generator(context, extract_layer),
        label_scope=label_scope,
        pool=AdapterPool(adapters, cluster_every, assign, gate_target, gate_epochs, gate_lr, balance),
        noise=noise,
    )
