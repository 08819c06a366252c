"""SCAFFOLD: FedAvg whose local steps are corrected by control variates against client drift.

Source: Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning" (ICML 2020, arXiv
1910.06378), algorithm 1 with option II. x is the global model, y a local one, c and c_i the control variates:

    client   y <- y - eta (g(y) - c_i + c), K times;   c_i+ = c_i - c + (x - y) / (K eta)
    server   x <- x + eta_g mean_S(y_i - x);           c <- c + (|S| / N) mean_S(c_i+ - c_i)

Decisions where the paper is silent:

- K counts the optimiser steps that were taken, and K eta is the sum of their rates when a schedule changes the rate
  inside a round. A round whose rates are all zero leaves c_i as it is.
- Momentum m (heavy ball or Nesterov) is corrected, not refused: the gradient of step s is then applied in all later
  steps too, so K eta is replaced by the total rate with which gradients enter y, `total_rate`, which tends to
  K eta / (1 - m) for large K. c_i is then a weighted mean of the local gradients. Other optimisers have no such total,
  and phases change what a step is: both are refused.
- A rate that FedAvg stands may be too large: c - c_i is added K times. Lower it where updates diverge.
- Weight decay is part of the gradient that SGD applies, so c_i estimates the gradient of the decayed loss.
- Clipping acts on the corrected gradient g - c_i + c. Where it shrinks the step by a factor s, c_i+ is only
  s g + (1 - s)(c_i - c): a damped estimate. Train with `clip_norm: null` for the paper's.
- N is every client of the federation, also those that have not taken part: their c_i is 0. A client keeps its c_i
  while it is away, across stages too.
- Buffers (batch-norm statistics) have no control variate and are averaged, uniformly as the parameters are.
- Rows of classes that have not arrived have x = y and c = c_i = 0, so they stay zero by the equations themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Gt

from fedloom.core import Batches, ClientId, ConfigError, Context, Method, Payload, Reply, Update
from fedloom.core.payload import ClassRows
from fedloom.core.tree import Tensors, add, axpy, on_device, scale, sub, zeros_like
from fedloom.local import SGD, LocalSGD
from fedloom.merge.mean import replies_mean

PRESETS: dict[str, dict[str, Any]] = {"paper": {"server_lr": 1.0}}
MODEL = ("params", "buffers")
SHARED = (*MODEL, "control")  # down: x and c; up: y_i and the change of c_i


@dataclass(frozen=True)
class Correction:
    """A gradient transform: g + (c - c_i), with c - c_i in `ref["correction"]` (name -> tensor like the parameter)."""

    needs: ClassVar[tuple[str, ...]] = ("correction",)

    def __call__(self, grads: Tensors, params: Tensors, ref: Mapping[str, Any]) -> Tensors:
        """The corrected gradients."""
        return add(grads, {name: ref["correction"][name] for name in grads})


def total_rate(local: LocalSGD, ctx: Context, steps: int) -> float:
    """The total rate with which `steps` gradients enter the model: a constant gradient g moves it by -total_rate g.

    Without momentum it is the sum of the learning rates. `reach` is 1 + m + m^2 + ..., what step t applies of g.
    """
    m, reach, total = local.optimizer.momentum, 0.0, 0.0
    for step in range(steps):
        reach = 1 + m * reach
        applied = 1 + m * reach if local.optimizer.nesterov else reach
        total += local.optimizer.lr * local.schedule.factor(ctx, step, steps) * applied
    return total


def refreshed(own: Tensors, correction: Tensors, start: Tensors, end: Tensors, rate: float) -> Tensors:
    """Option II: c_i+ = c_i - c + (x - y) / rate, and c_i itself where the rate is 0.

    `own` is c_i, `correction` c - c_i, `start` x and `end` y: name -> tensor, with the same names and shapes.
    """
    return sub(scale(sub(start, end), 1 / rate), correction) if rate > 0 else own


@dataclass(frozen=True)
class Scaffold(Method):
    """Server state: the model and `control` (c). Client state: `control` (c_i)."""

    local: LocalSGD
    server_lr: float = 1.0
    personal: ClassVar[bool] = False
    reveals: ClassVar[Mapping[str, str]] = {
        "params": "a model trained on the client's data",
        "buffers": "activation statistics of the client's data",
        "control": "the change, since its last round, of the mean gradient of the client's loss",
    }

    def __post_init__(self) -> None:
        if not isinstance(self.local.optimizer, SGD):
            raise ConfigError(f"scaffold needs training.optimizer.name: sgd, got {type(self.local.optimizer).__name__}")
        if self.local.phases:
            raise ConfigError("scaffold trains every parameter in every step: it cannot train in phases")

    def init_server(self, ctx: Context) -> Payload:
        """The model, and c = 0."""
        state = ctx.init_state()
        return {**state, "control": zeros_like(state["params"])}

    def init_client(self, ctx: Context) -> Payload:
        """c_i = 0."""
        return {"control": zeros_like(ctx.init_state()["params"])}

    def send(self, server: Payload, client: ClientId | None, ctx: Context) -> Payload:
        """The model and c; the global view, used to predict and to export, is the model alone."""
        return {field: server[field] for field in (MODEL if client is None else SHARED)}

    def client_update(self, down: Payload, state: Payload, data: Batches, ctx: Context) -> Update:
        """Train with corrected gradients; upload the model and c_i+ - c_i, keep c_i+."""
        correction = sub(down["control"], state["control"])
        end = self.local(down, data, ctx, ref={"correction": correction})
        rate = total_rate(self.local, ctx, end.steps)
        own = refreshed(state["control"], correction, down["params"], on_device(end.params, "cpu"), rate)
        up = {"params": end.params, "buffers": end.buffers, "control": sub(own, state["control"])}
        return Update({"control": own}, up, metrics=end.metrics)

    def server_update(self, server: Payload, replies: Sequence[Reply], ctx: Context) -> Payload:
        """x + eta_g mean(y_i - x), by a lerp that is exact for eta_g = 1, and c + (|S| / N) mean(c_i+ - c_i)."""
        mean = {field: replies_mean(replies, field, server[field], uniform=True) for field in SHARED}
        params = {name: torch.lerp(old, mean["params"][name], self.server_lr) for name, old in server["params"].items()}
        control = axpy(len(replies) / ctx.num_clients, mean["control"], server["control"])
        return {**server, "params": params, "buffers": mean["buffers"], "control": control}

    def class_rows(self, ctx: Context) -> ClassRows:
        """c and c_i have the class rows of the parameters."""
        return {**super().class_rows(ctx), **{("control", name): dim for name, dim in ctx.class_rows.items()}}


def scaffold(*, local: LocalSGD, server_lr: Annotated[float, Gt(0)] = 1.0) -> Scaffold:
    """Assemble SCAFFOLD. Raises ConfigError where training is not SGD in one phase.

    server_lr: step of the server (eta_g): 1 takes the mean of the clients' models.
    """
    return Scaffold(replace(local, transforms=(*local.transforms, Correction())), server_lr)
