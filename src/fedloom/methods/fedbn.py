"""FedBN: FedAvg whose batch normalisation stays with the clients.

Source: Li et al., "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization" (ICLR 2021, arXiv
2102.07623), algorithm 1. With norm_i the weight, bias and running statistics of every batch normalisation of client i,
and w all other tensors:

    client   (w_i, norm_i) <- training from (w, norm_i);     server   w <- mean_S(w_i)

norm_i is never sent. A client predicts with w and its own norm_i; there is no global model.

Decisions:

- Clients count the same, as in the authors' code (`uniform=False`: by number of examples).
- Batch normalisation is found by the type of the module, so that those in shortcuts are local too (the authors' code
  goes by the letters "bn" in names). Other norms keep no statistics of the data and are averaged: with a network that
  has only such ones, this is FedAvg, bit for bit.
- A client that joins later starts from the initial norm, or that of the pretrained weights.
- The global view, for evaluation and for whoever is no client, needs a norm nevertheless. `unseen="initial"` takes the
  initial one, as nothing else has reached the server: after training it predicts poorly, which is no defect of the
  method. With "mean" the clients upload their norms as well, and the view has the mean of those of the last round; no
  client is sent it. This costs its bytes and shows the server statistics of every client's data.
- A client that holds several domains has one norm for all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from torch import nn

from fedloom.core import Batches, ClientId, Context, Payload, Update
from fedloom.local import LocalSGD
from fedloom.local.terms import CrossEntropy
from fedloom.methods.fedavg import FedAvg

PRESETS: dict[str, dict[str, Any]] = {"paper": {}}
MODEL = ("params", "buffers")
NORM = "norm"
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def norm_names(module: nn.Module) -> frozenset[str]:
    """Names of the parameters and buffers of every batch normalisation in the network."""
    found: set[str] = set()
    for prefix, layer in module.named_modules():
        if isinstance(layer, BATCH_NORMS):
            found.update(name for name, _ in layer.named_parameters(prefix, recurse=False))
            found.update(name for name, _ in layer.named_buffers(prefix, recurse=False))
    return frozenset(found)


def shared(model: Payload, norm: Collection[str]) -> Payload:
    """The model's two fields without the tensors of these names."""
    return {field: {name: t for name, t in model[field].items() if name not in norm} for field in MODEL}


def own(model: Payload, norm: Collection[str]) -> Payload:
    """A client's state: the tensors of these names, of both fields of the model."""
    return {NORM: {name: tensor for field in MODEL for name, tensor in model[field].items() if name in norm}}


@dataclass(frozen=True)
class FedBN(FedAvg):
    """Server state: the model, whose batch norms no client is sent. Client state: "norm", its batch norms.

    unseen: what the batch norms of the server's model are, "initial" or "mean".
    """

    uniform: bool = True
    unseen: str = "initial"

    personal: ClassVar[bool] = True
    reveals: ClassVar[Mapping[str, str]] = {
        **FedAvg.reveals,
        "buffers": "mean and variance of the client's activations, with unseen: mean alone",
    }

    def init_client(self, ctx: Context) -> Payload:
        """The initial batch norms."""
        return own(ctx.init_state(), norm_names(ctx.net.module))

    def send(self, server: Payload, client: ClientId | None, ctx: Context) -> Payload:
        """The model without its batch norms; the global view is the whole model."""
        return self.send_model(server, client, ctx) if client is None else shared(server, norm_names(ctx.net.module))

    def client_update(self, down: Payload, state: Payload, data: Batches, ctx: Context) -> Update:
        """Train from what was sent and the own batch norms, keep these, upload the rest."""
        norm = norm_names(ctx.net.module)
        end = self.local(self._whole(down, state, ctx), data, ctx)
        model = {"params": end.params, "buffers": end.buffers}
        up = model if self.unseen == "mean" else shared(model, norm)
        return Update(own(model, norm), up, metrics=end.metrics)

    def deployed(self, down: Payload, state: Payload, ctx: Context) -> Context:
        """The network with what was sent, and the own batch norms where none were."""
        return super().deployed(self._whole(down, state, ctx), state, ctx)

    def _whole(self, down: Payload, state: Payload, ctx: Context) -> Payload:
        norm, params = state.get(NORM, {}), set(ctx.net.trainable)
        kept = {
            "params": {name: tensor for name, tensor in norm.items() if name in params},
            "buffers": {name: tensor for name, tensor in norm.items() if name not in params},
        }
        return {**down, **{field: {**kept[field], **down[field]} for field in MODEL}}


def fedbn(
    *,
    local: LocalSGD,
    label_scope: Literal["seen", "current"] = "seen",
    uniform: bool = True,
    unseen: Literal["initial", "mean"] = "initial",
) -> FedBN:
    """Assemble FedBN; the options that are not named here are FedAvg's.

    unseen: batch norms of the global view: the `initial` ones, or the `mean` of the clients', which then upload them.
    """
    return FedBN(replace(local, terms=(CrossEntropy(label_scope),)), uniform, unseen=unseen)
