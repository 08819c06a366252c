"""FedDyn: FedAvg with a dynamic regulariser, under which what is stationary for the clients is so for all their data.

Source: Acar et al., "Federated Learning Based on Dynamic Regularization" (ICLR 2021, arXiv 2111.04263), algorithm 1.
theta is the global model, theta_i a local one, L_i the loss of client i of all N, S the clients of the round:

    client   theta_i = argmin L_i(w) - <g_i, w> + (alpha / 2) ||w - theta||^2;      g_i <- g_i - alpha (theta_i - theta)
    server   h <- h - (alpha / N) sum_S(theta_i - theta);                           theta <- mean_S theta_i - h / alpha

g_i and h begin at 0, so h is the mean of all g_i at any time. After an exact minimisation g_i is the gradient of L_i at
theta_i. Local training is not exact: K short steps of rate eta move g_i by the share alpha K eta of its way there.

Decisions where the paper is silent:

- The mean over S is uniform, and so is that of buffers (batch-norm statistics), which have neither g nor h: they are
  those of the models theta_i, not of the shifted theta.
- N is every client of the federation, also those that have not taken part: their g_i is 0. A client keeps its g_i while
  it is away, across stages too.
- Weight decay is part of the gradient that SGD applies, so L_i is the decayed loss.
- The model that is served is theta. (The authors' code also reports the plain means of the theta_i.)
- g_i and h are on the scale of gradients, as in the paper. The authors' code keeps -g_i / alpha, which is the same, and
  writes the quadratic term as weight decay; it divides alpha by the client's share of the data, times N, which is the
  same where clients are of equal size. Here alpha is one number, since a client does not know its share.
- Rows of classes that have not arrived have theta_i = theta and g_i = h = 0, so they stay by the equations themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

from annotated_types import Gt

from fedloom.core import Batches, ClientId, Context, Method, Payload, Reply, Update
from fedloom.core.payload import ClassRows
from fedloom.core.tree import Tensors, axpy, on_device, sub, zeros_like
from fedloom.local import LocalSGD
from fedloom.local.terms import Proximal
from fedloom.local.terms.linear import LinearTerm
from fedloom.merge.mean import replies_mean

PRESETS: dict[str, dict[str, Any]] = {"paper": {}}
MODEL = ("params", "buffers")


def refreshed(gradient: Tensors, start: Tensors, end: Tensors, step: float) -> Tensors:
    """`gradient` - step * (end - start): of g_i with step alpha, of h with alpha |S| / N and the mean of the ends."""
    return axpy(-step, sub(end, start), gradient)


@dataclass(frozen=True)
class FedDyn(Method):
    """Server state: the model and `gradient` (h). Client state: `gradient` (g_i). The model alone travels.

    alpha: weight of the quadratic term, which is added to the terms of `local` with the linear one; above 0.
    """

    local: LocalSGD
    alpha: float = 0.01
    personal: ClassVar[bool] = False
    reveals: ClassVar[Mapping[str, str]] = {
        "params": "a model trained on the client's data",
        "buffers": "activation statistics of the client's data",
    }

    def init_server(self, ctx: Context) -> Payload:
        """The model, and h = 0."""
        state = ctx.init_state()
        return {**state, "gradient": zeros_like(state["params"])}

    def init_client(self, ctx: Context) -> Payload:
        """g_i = 0."""
        return {"gradient": zeros_like(ctx.init_state()["params"])}

    def send(self, server: Payload, client: ClientId | None, ctx: Context) -> Payload:
        """The model."""
        return {field: server[field] for field in MODEL}

    def client_update(self, down: Payload, state: Payload, data: Batches, ctx: Context) -> Update:
        """Train with the regulariser; upload the model, keep the new g_i."""
        local = replace(self.local, terms=(*self.local.terms, Proximal(self.alpha), LinearTerm("gradient")))
        end = local(down, data, ctx, ref={"gradient": state["gradient"]})
        own = refreshed(state["gradient"], down["params"], on_device(end.params, "cpu"), self.alpha)
        return Update({"gradient": own}, {"params": end.params, "buffers": end.buffers}, metrics=end.metrics)

    def server_update(self, server: Payload, replies: Sequence[Reply], ctx: Context) -> Payload:
        """The new h, and the mean of the models less h / alpha."""
        mean = {field: replies_mean(replies, field, server[field], uniform=True) for field in MODEL}
        share = len(replies) / ctx.num_clients
        gradient = refreshed(server["gradient"], server["params"], mean["params"], self.alpha * share)
        params = axpy(-1 / self.alpha, gradient, mean["params"])
        return {**server, "params": params, "buffers": mean["buffers"], "gradient": gradient}

    def class_rows(self, ctx: Context) -> ClassRows:
        """h has the class rows of the parameters."""
        return {**super().class_rows(ctx), **{("gradient", name): dim for name, dim in ctx.class_rows.items()}}


def feddyn(*, local: LocalSGD, alpha: Annotated[float, Gt(0)] = 0.01) -> FedDyn:
    """Assemble FedDyn.

    alpha: weight of the dynamic regulariser.
    """
    return FedDyn(local, alpha)
