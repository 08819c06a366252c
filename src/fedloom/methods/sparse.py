"""Federated training of a sparse model: the base of methods that keep single weights by a mask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from fedloom.core import Batches, ClientId, Context, Exchange, Method, ModelSpec, Payload, Reply, Table, Update
from fedloom.core.tree import Tensors, on_device, zeros_like
from fedloom.local import LocalSGD
from fedloom.local.continued import Continued
from fedloom.local.transforms.masked import MaskedGradients
from fedloom.local.transforms.recorded import PerStep, Record, RecordGradients
from fedloom.merge.mean import replies_mean
from fedloom.methods.channel_facts import kept_weights
from fedloom.methods.fedavg import FedAvg
from fedloom.models.sparse import Times, by_macs, kept, nonzero_parameters, opened, packed
from fedloom.select.unstructured import Reconfiguration, steady

FIELDS = ("params", "values", "buffers")


class Sparse(NamedTuple):
    """A model with its masks: dense parameters, 0 where a mask is false; masks by name of a weight; buffers."""

    params: Tensors
    masks: Tensors
    buffers: Tensors

    @property
    def active(self) -> int:
        """Number of weights that are kept."""
        return sum(int(mask.sum()) for mask in self.masks.values())

    @property
    def weights(self) -> dict[str, Tensor]:
        """The parameters that have masks."""
        return {name: self.params[name] for name in self.masks}

    def payload(self) -> dict[str, Tensors]:
        """As it is stored and sent, see `fedloom.models.sparse`, with its buffers."""
        return {**packed(self.params, self.masks), "buffers": self.buffers}

    def upload(self) -> dict[str, Tensors]:
        """The same without the masks, which the server knows."""
        return {**kept(self.params, self.masks), "buffers": self.buffers}


@dataclass(frozen=True)
class SparseMethod(Method):
    """Server state: the payload of a `Sparse` model. Clients keep nothing. rule: makes masks. time: of the weights."""

    local: LocalSGD
    rule: Reconfiguration
    time: Times = by_macs

    personal: ClassVar[bool] = False
    reveals: ClassVar[Mapping[str, str]] = {**FedAvg.reveals, "values": "the kept weights of that model"}

    def module(self, spec: ModelSpec) -> nn.Module:
        """The classifier, with the times of its weights and a count of the parameters that are not 0."""
        module: Any = spec.classifier()
        module.times = self.time(module, getattr(spec, "input_shape", None))
        module.active_parameters = partial(nonzero_parameters, module)
        return module

    def init_server(self, ctx: Context) -> Payload:
        """The model at its largest density."""
        state = ctx.init_state()
        masks = self.rule.initial({name: state["params"][name] for name in times(ctx)})
        return Sparse(state["params"], masks, state["buffers"]).payload()

    def model(self, stored: Payload, ctx: Context) -> Sparse:
        """The model of a payload."""
        shapes = {name: param.shape for name, param in ctx.net.module.named_parameters()}
        return Sparse(*opened(stored, shapes), stored["buffers"])

    def send(self, server: Payload, client: ClientId | None, ctx: Context) -> Payload:
        """The dense model, with zeros: what serves."""
        model = self.model(server, ctx)
        return {"params": model.params, "buffers": model.buffers}

    def send_sparse(self, server: Payload, client: ClientId | None, ctx: Context) -> Payload:
        """The sparse model: what is trained."""
        return server

    def trained(
        self, model: Sparse, data: Batches, ctx: Context, record: Record | None = None
    ) -> tuple[Sparse, dict[str, float]]:
        """The model after training what its masks keep, and metrics. record: is shown the gradients of all weights."""
        transforms = (*self.local.transforms, *((RecordGradients(),) if record else ()), MaskedGradients())
        down, ref = {"params": model.params, "buffers": model.buffers}, {"masks": model.masks, "record": record}
        end = replace(self.local, transforms=transforms)(down, data, ctx, ref=ref)
        return Sparse(on_device(end.params, "cpu"), model.masks, end.buffers), end.metrics

    def settled(self, model: Sparse, data: Batches, ctx: Context, checks: int) -> tuple[Sparse, dict[str, float]]:
        """The model after one client has trained and made new masks by turns until its size is steady, and metrics."""
        metrics, sizes = dict[str, float](), [model.active]
        while len(sizes) <= checks and not steady(sizes):
            record, check = PerStep(list(model.masks)), len(sizes) - 1
            model, metrics = self.trained(model, Continued(data, check * self.local.epochs), ctx, record)
            model = remade(model, self.rule, on_device(record.squares(), "cpu"), check, ctx)
            sizes.append(model.active)
        return model, metrics

    def client_update(self, down: Payload, state: Payload, data: Batches, ctx: Context) -> Update:
        """Train; upload the kept weights and all that is never pruned."""
        end, metrics = self.trained(self.model(down, ctx), data, ctx)
        return Update(state, end.upload(), metrics=metrics)

    def server_update(self, server: Payload, replies: Sequence[Reply], ctx: Context) -> Payload:
        """Means by number of examples, under the mask that all had."""
        return {**server, **{field: replies_mean(replies, field, server[field]) for field in FIELDS}}

    def exchanges(self) -> Mapping[str, Exchange]:
        """Training goes by sparse models; `send` gives the dense one."""
        return {"train": Exchange(self.send_sparse, self.client_update, self.server_update)}

    def facts(self, server: Payload, states: Mapping[ClientId, Payload], ctx: Context) -> Sequence[Table]:
        """The share of each tensor's weights that the masks keep."""
        masks = self.model(server, ctx).masks
        return [kept_weights({name: masks[name] for name in times(ctx)})]


def times(ctx: Context) -> dict[str, float]:
    """Name of a weight that may be pruned -> the time t that one entry of it takes."""
    module: Any = ctx.net.module
    found: dict[str, float] = module.times
    return found


def remade(model: Sparse, rule: Reconfiguration, squares: Tensors, age: float, ctx: Context) -> Sparse:
    """The model under new masks: what leaves them becomes 0, and what enters was 0. squares: g^2, 0 where not named."""
    squares = {**zeros_like(model.weights), **squares}
    masks = rule(model.weights, model.masks, squares, times(ctx), age)
    params = {name: torch.where(masks[name], p, 0) if name in masks else p for name, p in model.params.items()}
    return Sparse(params, masks, model.buffers)
