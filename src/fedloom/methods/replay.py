"""Replay: every client rehearses a few examples of its past classes, chosen by herding (iCaRL on every client).

Source: Rebuffi et al., "iCaRL: Incremental Classifier and Representation Learning" (CVPR 2017): herding (algorithm 4)
and nearest-mean classification (algorithm 1); its loss with softmax in place of sigmoids, as in federated
class-incremental learning. A client keeps up to `memory` examples, m = floor(memory / classes seen) of a class.

- After each stage the clients that hold data get the final global model. Each chooses exemplars of the stage's classes
  by the features of that model (of length 1), drops those of older classes beyond the first m, and uploads per class
  the sum and the number of its exemplars' features. Inputs never leave it. A client that was away keeps what it had,
  and uses the first m of a class when it takes part again.
- Training is on new data and on exemplars of the client's other classes, m of each by the classes seen before this
  stage: cross-entropy over every class seen, and from the second stage on
  `distillation` * KL(softmax(t_old / T) || softmax(z_old / T)) from the global model of the end of the last stage.
- Prediction is by the nearest class mean (`inference="nme"`): score -|f - mu_c|^2, both of length 1, mu_c over the
  exemplars of all clients; -inf for a class without any. It is by logits (`"linear"`) while the model has moved on and
  its means are yet to come, and without memory.

Decisions: an epoch visits as many examples as the client has new ones, drawn from both kinds, so that methods without
memory have the same budget (`visits="all"`: each new example and exemplar once, as public code does). Clients count by
new examples. Exemplars are kept per class: those of one that arrives again are replaced, so in a stream of domains
hardly any of the past is rehearsed. The default memory of 100 gives the 20 clients of cifar100-fcil-small iCaRL's 2,000
exemplars, 20 a class; 20 are as scarce for the 144 examples of a client of the digits. `pool="random"` draws the
exemplars of a class. Not offered: 2,000 random ones of all past data, drawn afresh (LANDER's code), which is no memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from annotated_types import Ge, Gt
from torch import Tensor

from fedloom.core import Batches, ClientId, Context, Exchange, Payload, Reply, Stage, Trip, Update
from fedloom.core.batches import Inputs
from fedloom.core.payload import ClassRows
from fedloom.core.seeds import generator
from fedloom.local import LocalSGD
from fedloom.local.features import feats, feats_needed, features
from fedloom.local.terms import CrossEntropy, Distillation
from fedloom.methods.exemplars import POOLS, Exemplars, Pool, check_memory, chosen, herded
from fedloom.methods.nearest import MEANS, ROWS, added_up, means_of, nearness, no_means, outdated, sums_of
from fedloom.methods.teachers import TaughtFedAvg

PRESETS: dict[str, dict[str, Any]] = {"paper": {}}
ABLATIONS: dict[str, dict[str, Any]] = {
    "no-exemplars": {"memory": 0},
    "no-distillation": {"distillation": 0.0},
    "linear": {"inference": "linear"},
    "random-exemplars": {"pool": "random"},
}


@dataclass(frozen=True)
class Replay(TaughtFedAvg):
    """Server state: besides a teacher's, the class means of `fedloom.methods.nearest`. Client: teacher, exemplars.

    nearest: keep class means and predict by them. equal: as many sample visits as without memory.
    """

    memory: int = 100
    pool: Pool = herded
    nearest: bool = True
    equal: bool = True

    reveals: ClassVar[Mapping[str, str]] = {
        **TaughtFedAvg.reveals,
        MEANS: "which classes the client keeps, how many examples of each, and their mean features: what is typical "
        "of a class there can be reconstructed",
    }

    def class_rows(self, ctx: Context) -> ClassRows:
        """The means have a row per class."""
        return {**super().class_rows(ctx), **(ROWS if self.nearest else {})}

    def init_server(self, ctx: Context) -> Payload:
        """The model, and no means yet. `ConfigError` where memory cannot hold an example of every class."""
        check_memory(self.memory, ctx.num_classes)
        return {**super().init_server(ctx), **(no_means(ctx) if self.nearest else {})}

    def send(self, server: Payload, client: ClientId | None, ctx: Context) -> Payload:
        """Model and teacher as the base sends them, and to predict the class means, while they are the model's."""
        predicts = self.nearest and (client is None or ctx.exchange == "evaluate")
        return {**super().send(server, client, ctx), **(means_of(server) if predicts else {})}

    def client_update(self, down: Payload, state: Payload, data: Batches, ctx: Context) -> Update:
        """Train on new data and exemplars together."""
        past = Exemplars.of(state, data).trimmed(self.memory // max(1, len(ctx.stage.old)), without=data.classes)
        if len(past.y):
            data = data.joined(*past, quota=len(data) if self.equal else None)
        return super().client_update(down, state, data, ctx)

    def server_update(self, server: Payload, replies: Sequence[Reply], ctx: Context) -> Payload:
        """The base's merge; the class means are then of an older model."""
        return {**super().server_update(server, replies, ctx), **(outdated(server) if self.nearest else {})}

    def exchanges(self) -> Mapping[str, Exchange]:
        """Training, and the choice of exemplars."""
        return {**super().exchanges(), "consolidate": Exchange(self.send_model, self.consolidate, self.absorb)}

    def plan(self, stage: Stage) -> Iterable[Trip]:
        """Exemplars are chosen when the stage's rounds are over."""
        return [*super().plan(stage), *([Trip("consolidate", None, "all")] if self.memory else [])]

    def consolidate(self, down: Payload, state: Payload, data: Batches, ctx: Context) -> Update:
        """Choose exemplars of the stage's classes, keep fewer of the older ones; upload sums of their features."""
        if not len(data):
            return Update(state, {})
        count, new = self.memory // len(ctx.stage.seen), len(data)
        data = data.joined(*Exemplars.of(state, data).trimmed(count, without=data.classes))
        ctx.bind(down["params"], down["buffers"])
        found, labels = features(ctx, data)
        found, rng = F.normalize(found), generator(ctx.seed_for("exemplars"))
        picks = torch.cat([chosen(self.pool, found[:new], labels[:new], count, rng), torch.arange(new, len(data))])
        up = sums_of(ctx, found[picks], labels[picks]) if self.nearest else {}
        kept = {**state, **Exemplars(*data.stored(picks)).field()}
        return Update(kept, up, metrics={"exemplars": float(len(picks))})

    def absorb(self, server: Payload, replies: Sequence[Reply], ctx: Context) -> Payload:
        """The class means over the exemplars of all clients."""
        return {**server, **(added_up(server, replies) if self.nearest else {})}

    def predict(self, down: Payload, state: Payload, x: Inputs, ctx: Context) -> Tensor:
        """Scores [batch, classes]: nearness to the class means where the view has any, else logits."""
        if MEANS not in down:
            return super().predict(down, state, x, ctx)
        ctx.bind(down["params"], down.get("buffers"))
        with ctx.evaluating():
            return nearness(feats(ctx.apply(x)), **down[MEANS])


def replay(
    *,
    local: LocalSGD,
    memory: Annotated[int, Ge(0)] = 100,
    distillation: Annotated[float, Ge(0)] = 1.0,
    temperature: Annotated[float, Gt(0)] = 2.0,
    inference: Literal["nme", "linear"] = "nme",
    pool: Literal["herding", "random"] = "herding",
    visits: Literal["equal", "all"] = "equal",
    uniform: bool = False,
    buffers: Literal["mean", "pooled", "frozen"] = "mean",
) -> Replay:
    """Assemble replay; the options that are not named here are FedAvg's.

    memory: examples of past classes that a client keeps; 0 rehearses nothing.
    distillation: weight of the KL divergence from the model of the end of the last stage, from the second stage on.
    temperature: T of the distillation.
    inference: prediction by the nearest class mean of exemplars (`nme`) or by the logits (`linear`).
    pool: how the exemplars of a class are chosen: by `herding`, or at `random`.
    visits: examples of an epoch: as many as there are new ones (`equal`), or each new example and exemplar once
        (`all`).
    """
    local = replace(local, terms=(CrossEntropy("seen"),), decisions=(feats_needed,) if memory else ())
    taught = Distillation(temperature, distillation, scope="old", scale=False)
    means = memory > 0 and inference == "nme"
    return Replay(local, uniform, buffers, taught, memory, POOLS[pool], means, visits == "equal")
