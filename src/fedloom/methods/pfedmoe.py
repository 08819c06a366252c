"""pFedMoE: private large extractors of any kind beside one small shared extractor, weighed per example by a gate.

Source: Yi et al., "pFedMoE: Data-Level Personalization with Mixture of Experts for Model-Heterogeneous Personalized
Federated Learning" (arXiv 2402.01350), as far as its abstract goes; the formulas of the gate are ours. On client k

    (a_L, a_G) = softmax(H_k(F_k(x), G(x))),   R = a_L F_k(x) + a_G P_k(G(x)),   y = header_k(R)

train together. Only the small extractor G travels: G <- sum_k (n_k / n) G_k. The extractor F_k, the gate H_k, the
projection P_k (identity where the widths agree) and the header never leave the client.

Decisions:

- F_k is the configured backbone. G has `shared_width` features: of vectors one linear layer with ReLU; of images two
  convolutions and a linear layer; of text the mean of token embeddings and a linear layer. Multiple choice is refused.
- The gate is a perceptron with `gate_width` hidden units on both features, P_k applied.
- The server merges G alone, so clients whose F_k differ in size would do; the configuration gives all one backbone.
- A gate that turns to the local extractor keeps G from learning: the metric `gate_shared` is the mean of a_G.
- There is no whole model on the server. The global view, which is also what a client has before its first round, is G
  with the initial private parts, so its header knows nothing: look at the clients' own accuracy.
- Private parts are kept while a client is away, across stages too, with their batch statistics.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge
from torch import nn

from fedloom.core import Batches, Context, ModelSpec, Payload, Update
from fedloom.core.payload import ClassRows
from fedloom.local import LocalSGD
from fedloom.local.carries.averaged import Averaged, mean
from fedloom.local.terms import CrossEntropy
from fedloom.methods.fedavg import FedAvg
from fedloom.models.paired import SHARED, paired

PRESETS: dict[str, dict[str, Any]] = {"paper": {}}
MODEL = ("params", "buffers")


def parted(model: Payload, *, shared: bool) -> Payload:
    """The model's tensors that travel, or those that do not."""
    return {field: {n: t for n, t in model[field].items() if n.startswith(SHARED) is shared} for field in MODEL}


@dataclass(frozen=True)
class PFedMoE(FedAvg):
    """Server: G. Client: all else of its network, in "params" and "buffers".

    shared_width: features of G. gate_width: hidden units of the gate. `local` holds the carry "gates".
    """

    shared_width: int = 64
    gate_width: int = 32

    personal: ClassVar[bool] = True
    reveals: ClassVar[Mapping[str, str]] = {
        "params": "a small extractor trained on the client's data; the classifier on it is never seen",
        "buffers": "nothing: the small extractor has no batch statistics",
    }

    def module(self, spec: ModelSpec) -> nn.Module:
        """Both extractors, gate and header."""
        return paired(spec, self.shared_width, self.gate_width)

    def class_rows(self, ctx: Context) -> ClassRows:
        """None: the header does not travel."""
        return {}

    def init_server(self, ctx: Context) -> Payload:
        """The initial G."""
        return parted(ctx.init_state(), shared=True)

    def init_client(self, ctx: Context) -> Payload:
        """The initial private parts."""
        return parted(ctx.init_state(), shared=False)

    def client_update(self, down: Payload, state: Payload, data: Batches, ctx: Context) -> Update:
        """Train all parts together; upload G, keep the rest."""
        end = self.local(joined(down, state), data, ctx)
        model = {"params": end.params, "buffers": end.buffers}
        metrics = {**end.metrics, "gate_shared": mean(end.carry["gates"])}
        return Update(parted(model, shared=False), parted(model, shared=True), metrics=metrics)

    def deployed(self, down: Payload, state: Payload, ctx: Context) -> Context:
        """The network of G and the client's own parts."""
        return super().deployed(joined(down, state), state, ctx)


def joined(down: Payload, state: Payload) -> Payload:
    """G and the private parts as one model."""
    return {field: {**state[field], **down[field]} for field in MODEL}


def pfedmoe(
    *,
    local: LocalSGD,
    shared_width: Annotated[int, Ge(1)] = 64,
    gate_width: Annotated[int, Ge(1)] = 32,
    label_scope: Literal["seen", "current"] = "seen",
    uniform: bool = False,
) -> PFedMoE:
    """Assemble pFedMoE; the options that are not named here are FedAvg's.

    shared_width: features of the shared extractor.
    gate_width: hidden units of the gate.
    """
    carries = {"gates": Averaged("gates", column=1)}
    local = replace(local, terms=(CrossEntropy(label_scope),), carries=carries)
    return PFedMoE(local, uniform, shared_width=shared_width, gate_width=gate_width)
