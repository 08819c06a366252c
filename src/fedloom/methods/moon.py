"""MOON: FedAvg whose clients pull their features to the global model's, away from their own of the round before.

Source: Li, He and Song, "Model-Contrastive Federated Learning" (CVPR 2021, arXiv 2103.16257), algorithm 1. With z the
features of the model that trains, z_glob those of the downloaded one and z_prev those of the model with which this
client ended its last participation, all of the same batch:

    loss = CE + mu * mean_b -log(e^{cos(z, z_glob) / tau} / (e^{cos(z, z_glob) / tau} + e^{cos(z, z_prev) / tau}))

The features are the outputs of a projection head: backbone -> Linear(d, d) -> ReLU -> Linear(d, out_dim) -> classifier.
It travels like the rest of the model. `head: none` contrasts the backbone's features, without a projection.

Decisions where the paper is silent:

- A client without a previous model, in its first participation, has no contrastive term, as in the authors' code, whose
  pool of previous models is empty then. (With the downloaded model in its place the model would be the same: the two
  cosines are equal, their gradients cancel, and only the reported loss grows by mu log 2.)
- One previous model is kept: the client's own, before the server's merge. It stays while the client is away, across
  stages too, with the batch-norm statistics that it ended with.
- The downloaded and the previous model see the same augmented batch, in evaluation mode: their batch-norm statistics
  stay as they are, and nothing is differentiated through them. A step costs two forward passes more than FedAvg's.
- The previous model stays on the client, so what travels is FedAvg's; and it has no part in predictions.
- With mu = 0 nothing is kept, and the model is that of FedAvg on the same network, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt
from torch import nn

from fedloom.core import Batches, Context, ModelSpec, Payload, Update
from fedloom.core.errors import pick
from fedloom.local import LocalSGD
from fedloom.local.features import feats_needed
from fedloom.local.terms import CrossEntropy
from fedloom.local.terms.contrastive import FrozenFeats, ModelContrast
from fedloom.methods.fedavg import FedAvg
from fedloom.models.projection import projected_classifier

PRESETS: dict[str, dict[str, Any]] = {"paper": {}}
ABLATIONS: dict[str, dict[str, Any]] = {"no-contrast": {"mu": 0.0}, "no-projection": {"head": "none"}}
PREVIOUS = ("previous_params", "previous_buffers")  # client: the model with which it ended its last participation

Head = Callable[[ModelSpec, int], nn.Module]
HEADS: Mapping[str, Head] = {"projection": projected_classifier, "none": lambda spec, width: spec.classifier()}


@dataclass(frozen=True)
class Moon(FedAvg):
    """Server state: the model. Client state, once it has taken part: its previous local model.

    contrast: the term that is added to those of `local`; with mu = 0 this is FedAvg. head: of `HEADS`, with features of
    width out_dim.
    """

    contrast: ModelContrast = field(default_factory=ModelContrast)
    head: str = "projection"
    out_dim: int = 256

    def module(self, spec: ModelSpec) -> nn.Module:
        """The classifier, on a projection of the backbone's features where there is one."""
        return pick("method.head", self.head, HEADS)(spec, self.out_dim)

    def client_update(self, down: Payload, state: Payload, data: Batches, ctx: Context) -> Update:
        """Train, with the contrast where there is a previous model; keep the local model as the next one."""
        if not self.contrast.mu:
            return super().client_update(down, state, data, ctx)
        end = self._contrasted(down, state, ctx)(down, data, ctx)
        kept = dict(zip(PREVIOUS, (end.params, end.buffers), strict=True))
        return Update(kept, {"params": end.params, "buffers": end.buffers}, metrics=end.metrics)

    def _contrasted(self, down: Payload, state: Payload, ctx: Context) -> LocalSGD:
        if not state:
            return replace(self.local, decisions=(*self.local.decisions, feats_needed))
        near = ctx.teacher(down["params"], down["buffers"], name="global")
        far = ctx.teacher(state["previous_params"], state["previous_buffers"], name="previous")
        frozen = (FrozenFeats(near, self.contrast.positive), FrozenFeats(far, self.contrast.negative))
        terms, decisions = (*self.local.terms, self.contrast), (*self.local.decisions, *frozen)
        return replace(self.local, terms=terms, decisions=decisions)


def moon(
    *,
    local: LocalSGD,
    mu: Annotated[float, Ge(0)] = 5.0,
    tau: Annotated[float, Gt(0)] = 0.5,
    head: Literal["projection", "none"] = "projection",
    out_dim: Annotated[int, Ge(1)] = 256,
    label_scope: Literal["seen", "current"] = "seen",
    uniform: bool = False,
    buffers: Literal["mean", "pooled", "frozen"] = "mean",
) -> Moon:
    """Assemble MOON; the options that are not named here are FedAvg's.

    mu: weight of the contrast; 0 is FedAvg.
    tau: temperature of the contrast.
    head: what the contrast compares: the outputs of a `projection` between backbone and classifier, or, with `none`,
        the backbone's features.
    out_dim: width of the projection's output.
    """
    local = replace(local, terms=(CrossEntropy(label_scope),))
    return Moon(local, uniform, buffers, ModelContrast(mu, tau), head, out_dim)
