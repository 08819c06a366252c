"""FedAvg over a pool of experts with a gate: the base of methods that route samples to experts.

Clients train whatever `local` says and upload the whole pool; the server averages it as it is, or each expert over
the clients that used it. Prediction needs no label: the gate chooses and weighs the experts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from torch import Tensor, nn

from fedloom.core import ClientId, Context, ModelSpec, Payload, Reply
from fedloom.core.batches import Inputs
from fedloom.core.tree import Tensors
from fedloom.local.carries.routing import usage
from fedloom.merge.buffers import BUFFER_POLICIES
from fedloom.merge.experts import expertwise_mean
from fedloom.merge.mean import replies_mean, reply_trees, weighted_mean
from fedloom.merge.semantic import SemanticMerge
from fedloom.methods.fedavg import FedAvg
from fedloom.models.experts import ExpertPool, Widths, pool_layer
from fedloom.select.routing import Mix, MixLogits


class PoolMerge(Protocol):
    """How the parameters of a pool are merged, and what clients upload for it."""

    def extra(self, routing: Tensors) -> Payload:
        """Fields of the upload besides the model. routing: closed value of `RoutingUse`."""
        ...

    def __call__(self, replies: Sequence[Reply], old: Tensors, uniform: bool) -> Tensors:
        """New parameters; uniform: every client counts the same, else by its number of examples."""
        ...


@dataclass(frozen=True)
class MergeByClient:
    """Every tensor is a mean over clients."""

    def extra(self, routing: Tensors) -> Payload:
        """Nothing."""
        return {}

    def __call__(self, replies: Sequence[Reply], old: Tensors, uniform: bool) -> Tensors:
        """New parameters."""
        return replies_mean(replies, "params", old, uniform=uniform)


@dataclass(frozen=True)
class MergeByUsage:
    """Bodies and heads of expert k are weighted by n_i * fraction of client i's samples with k active.

    An expert that nobody used keeps the server's values; backbone and gate are means over clients.
    """

    def extra(self, routing: Tensors) -> Payload:
        """The fractions."""
        return {"usage": {"experts": usage(routing)}}

    def __call__(self, replies: Sequence[Reply], old: Tensors, uniform: bool) -> Tensors:
        """New parameters."""
        experts = {name: tensor for name, tensor in old.items() if name.startswith(("bodies.", "heads."))}
        rest = {name: tensor for name, tensor in old.items() if name not in experts}
        trees, weights, who = reply_trees(replies, "params", uniform)
        used = [weight * reply.up["usage"]["experts"].double() for weight, reply in zip(weights, replies, strict=True)]
        return {
            **weighted_mean([Part(tree, rest) for tree in trees], weights, rest, who=who),
            **expertwise_mean([Part(tree, experts) for tree in trees], used, experts, who=who),
        }


@dataclass(frozen=True)
class MergeBySemantics:
    """Bodies and heads of an expert are merged over the clients that use it alike (`fedloom.merge.semantic`).

    Needs the upload "routing" of a pool that tells its routing; backbone and gate are means over clients.
    """

    merge: SemanticMerge = field(default_factory=SemanticMerge)

    def extra(self, routing: Tensors) -> Payload:
        """Nothing: the statistics come from a pass after training."""
        return {}

    def __call__(self, replies: Sequence[Reply], old: Tensors, uniform: bool) -> Tensors:
        """New parameters."""
        trees, weights, who = reply_trees(replies, "params", uniform)
        layers = [pool_layer(old, 1)]  # how many experts the gate chooses is in the statistics
        statistics = [reply.up["routing"] for reply in replies]
        merged, _ = self.merge(trees, weights, old, layers, statistics, who=who)
        rest = {name: tensor for name, tensor in old.items() if name not in merged}
        return {**weighted_mean([Part(tree, rest) for tree in trees], weights, rest, who=who), **merged}


class Part(Mapping[str, Tensor]):
    """Some names of a tree; a tensor is read only when asked for."""

    def __init__(self, tree: Tensors, names: Collection[str]):
        self._tree, self._names = tree, [name for name in tree if name in names]

    def __getitem__(self, name: str) -> Tensor:
        """The tensor."""
        return self._tree[name]

    def __iter__(self) -> Iterator[str]:
        """The names."""
        return iter(self._names)

    def __len__(self) -> int:
        """How many names."""
        return len(self._names)


MERGES: dict[str, PoolMerge] = {"client": MergeByClient(), "usage": MergeByUsage(), "semantic": MergeBySemantics()}


@dataclass(frozen=True)
class PooledFedAvg(FedAvg):
    """FedAvg on an `ExpertPool`.

    experts, body, temperature: see `ExpertPool`. mix: joins the experts at test time. merge: of the parameters;
    `MergeByUsage` needs the carry "routing" (`RoutingUse`) in `local`. chosen: see `ExpertPool`.
    """

    experts: int = 4
    body: Widths = "mlp"
    temperature: float = 1.0
    mix: Mix = field(default_factory=MixLogits)
    merge: PoolMerge = MergeByClient()
    chosen: int | None = None

    personal: ClassVar[bool] = False
    reveals: ClassVar[Mapping[str, str]] = {
        **FedAvg.reveals,
        "usage": "how often the client's samples used each expert",
    }

    def module(self, spec: ModelSpec) -> nn.Module:
        """The pool on the configured backbone."""
        return ExpertPool(
            spec.backbone(),
            spec.num_classes,
            self.experts,
            self.body,
            temperature=self.temperature,
            mix=self.mix,
            chosen=self.chosen,
            seed=spec.seed,
        )

    def send(self, server: Payload, client: ClientId | None, ctx: Context) -> Payload:
        """All of the server's state; the global view, used to predict and to export, is the model alone."""
        return server if client is not None else {"params": server["params"], "buffers": server["buffers"]}

    def server_update(self, server: Payload, replies: Sequence[Reply], ctx: Context) -> Payload:
        """Merge the parameters as `merge` says, the buffers as FedAvg does."""
        params = self.merge(replies, server["params"], self.uniform)
        buffers = BUFFER_POLICIES[self.buffers](replies, server["buffers"], uniform=self.uniform)
        return {**server, "params": params, "buffers": buffers}

    def predict(self, down: Payload, state: Payload, x: Inputs, ctx: Context) -> Tensor:
        """Scores [batch, classes] from the gate alone; classes not seen yet are -inf."""
        ctx.bind(down["params"], down.get("buffers"))
        with ctx.evaluating():
            out = ctx.apply(x)
            return self.mix(out["expert_logits"], out["router_logits"], ctx.class_mask("seen"))
