"""A federation of Gaussian blobs: two features per class, clients of unequal size, classes that arrive in tasks."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fedloom.core import Batches, Forward, Method, Stage
from fedloom.core.seeds import generator, seeded
from fedloom.engine.experiment import Experiment
from fedloom.local import SGD, LocalSGD
from fedloom.models.channels import Channels, Draft
from fedloom.models.spec import NetworkSpec
from fedloom.select.sampling import uniform_cohort
from toys.clip import ClipSpec


@dataclass(frozen=True)
class BlobPlan:
    """A `DataPlan`: class c is a Gaussian around a corner; clients hold unequally many examples.

    Of two domains the second is moved and stretched.

    empty: clients without data, known to the plan. hollow: clients that take part although they hold nothing.
    idle: stages at which nobody holds anything.
    """

    num_clients: int = 4
    num_classes: int = 6
    num_stages: int = 3
    rounds: int = 2
    seed: int = 0
    per_class: int = 40
    empty: tuple[int, ...] = ()
    hollow: tuple[int, ...] = ()
    idle: tuple[int, ...] = ()

    domains = ("here", "there")

    @property
    def tasks(self) -> Sequence[Sequence[int]]:
        size = self.num_classes // self.num_stages
        return [list(range(t * size, (t + 1) * size)) for t in range(self.num_stages)]

    def _pool(self, what: str) -> tuple[Tensor, Tensor]:
        return _blobs(self.num_classes, self.per_class, self.seed, what)

    def stage(self, index: int, client: int | None = None) -> Stage:
        classes = tuple(self.tasks[index])
        seen = tuple(c for task in self.tasks[: index + 1] for c in task)
        return Stage(index, self.num_stages, self.rounds, classes, seen, seen[: -len(classes)], *((0, 1),) * 3)

    def _indices(self, client: int, stage: int) -> Tensor:
        if client in (*self.empty, *self.hollow) or stage in self.idle:
            return torch.zeros(0, dtype=torch.long)
        _, y = self._pool("train")
        mine = torch.isin(y, torch.tensor(self.tasks[stage])).nonzero().flatten()
        owner = torch.randint(0, self.num_clients * 2, (len(mine),), generator=generator(self.seed, "who", stage))
        return mine[(owner == client) | (owner == client + self.num_clients) & (client % 2 == 0)]

    def participants(self, stage: int) -> Sequence[int]:
        return [] if stage in self.idle else [c for c in range(self.num_clients) if c not in self.empty]

    def size(self, client: int, stage: int) -> int:
        return len(self._indices(client, stage))

    def train(self, client: int, stage: int, round: int | None, exchange: str) -> Batches:
        x, y = self._pool("train")
        key = (self.seed, "batches", stage, round, client, exchange)
        return Batches(x, y, self._indices(client, stage), key=key, prepare=lambda x, rng: x, domains=_domains(y))

    def test(self, task: int, domain: int | None = None) -> Batches:
        x, y = self._pool("test")
        chosen = torch.isin(y, torch.tensor(self.tasks[task]))
        chosen &= _domains(y) == domain if domain is not None else True
        key = (self.seed, "test")
        return Batches(x, y, chosen.nonzero().flatten(), key=key, prepare=lambda x, rng: x, domains=_domains(y))

    def label_counts(self, client: int, stage: int) -> Tensor:
        _, y = self._pool("train")
        counts = torch.zeros(self.num_classes, dtype=torch.long)
        for s in range(stage + 1):
            counts += torch.bincount(y[self._indices(client, s)], minlength=self.num_classes)
        return counts

    def domain_counts(self, client: int, stage: int) -> Tensor:
        _, y = self._pool("train")
        counts = torch.zeros(len(self.domains), self.num_classes, dtype=torch.long)
        for s in range(stage + 1):
            rows = self._indices(client, s)
            counts.index_put_((_domains(y)[rows], y[rows]), torch.tensor(1), accumulate=True)
        return counts

    def fingerprint(self) -> str:
        return repr(self)


@functools.cache
def _blobs(num_classes: int, per_class: int, seed: int, what: str) -> tuple[Tensor, Tensor]:
    """The one data set that all clients' rows are of."""
    y = torch.arange(num_classes).repeat_interleave(per_class)
    angle = y * (2 * torch.pi / num_classes)
    noise = torch.randn(len(y), 2, generator=generator(seed, "blobs", what))
    x = torch.stack([angle.cos(), angle.sin()], 1) * 3 + 0.5 * noise
    return torch.where(_domains(y)[:, None] == 1, 1.5 * x + 0.5, x), y


def _domains(y: Tensor) -> Tensor:
    return torch.arange(len(y)) % 2


class Features(nn.Module):
    """Linear -> BatchNorm -> ReLU on two features."""

    def __init__(self, width: int = 8, norm: bool = True):
        super().__init__()
        self.num_features = width
        self.layers = nn.Sequential(nn.Linear(2, width), nn.BatchNorm1d(width) if norm else nn.Identity(), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def channel_groups(self) -> Channels:
        draft = Draft(self)
        draft.layer("layers.0", reads=None, writes="layers.0")
        draft.norm("layers.1", "layers.0")
        draft.tap("layers.0", "layers", "output")
        return draft.table()


class Block(nn.Module):
    """Two linear layers with BatchNorm whose output is added to what they read."""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.one, self.norm1 = nn.Linear(width, inner), nn.BatchNorm1d(inner)
        self.two, self.norm2 = nn.Linear(inner, width), nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm2(self.two(torch.relu(self.norm1(self.one(x))))) + x)


class Residual(Features):
    """The features of a block: two groups of channels, one of which two layers write."""

    def __init__(self, width: int = 8, inner: int = 24):
        super().__init__(width)
        self.block = Block(width, inner)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.layers(x))

    def channel_groups(self) -> Channels:
        draft = Draft(self)
        draft.layer("layers.0", reads=None, writes="layers.0")
        draft.norm("layers.1", "layers.0")
        draft.tap("layers.0", "layers", "output")
        draft.residual_block("block", [("one", "norm1"), ("two", "norm2")], None, "layers.0")
        return draft.table()


class Headed(nn.Module):
    """Features and a fixed-width linear head."""

    class_rows = {"head.weight": 0, "head.bias": 0}

    def __init__(self, body: nn.Module, num_classes: int):
        super().__init__()
        self.body, self.head = body, nn.Linear(body.num_features, num_classes)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        feats = self.body(x)
        return {"logits": self.head(feats), "feats": feats}


@dataclass(frozen=True)
class BlobSpec:
    """A `ModelSpec` for the blobs."""

    num_classes: int = 6
    seed: int = 0
    norm: bool = True
    residual: bool = False

    input_shape: ClassVar[tuple[int, ...]] = (2,)

    def backbone(self) -> nn.Module:
        with seeded(self.seed, "backbone"):
            return Residual() if self.residual else Features(norm=self.norm)

    def classifier(self) -> nn.Module:
        body = self.backbone()
        with seeded(self.seed, "head"):
            return Headed(body, self.num_classes)


def expert_spec(num_classes: int = 6, seed: int = 0, **options: int) -> NetworkSpec:
    """A `ModelSpec` for the blobs with two mixture-of-experts layers."""
    chosen = {"width": 8, "inner": 8, "experts": 4, "layers": 2, **options}
    return NetworkSpec("moe_mlp", num_classes, (2,), seed, options=tuple(chosen.items()))


@dataclass(frozen=True)
class HalfSpec:
    """The network of `expert_spec` in bfloat16, parameters included."""

    num_classes: int = 6
    seed: int = 0

    input_shape: ClassVar[tuple[int, ...]] = (2,)

    def backbone(self) -> nn.Module:
        return self._half(expert_spec(self.num_classes, self.seed).backbone())

    def classifier(self) -> nn.Module:
        return self._half(expert_spec(self.num_classes, self.seed).classifier())

    @staticmethod
    def _half(module: nn.Module) -> nn.Module:
        module.bfloat16().register_forward_pre_hook(_halved, prepend=True)
        return module


def _halved(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(x.bfloat16() for x in args)


def local(**changes: Any) -> LocalSGD:
    """Local training that suits the blobs."""
    optimizer = SGD(lr=0.1, momentum=0.5, weight_decay=0.01)
    return LocalSGD(**{"optimizer": optimizer, "epochs": 2, "batch_size": 8, **changes})


def method_of(name: str, *, training: Mapping[str, Any] = MappingProxyType({}), **options: Any) -> Method:
    """A method by `module:factory`, on the blobs' local training with the changes of `training` if it trains."""
    module, _, attribute = name.partition(":")
    factory = getattr(importlib.import_module(module), attribute)
    loop = {"local": local(**training)} if "local" in inspect.signature(factory).parameters else {}
    return factory(**loop, **options)


def experiment(name: str, *, seed: int = 0, cohort: float = 0.5, spec: Any = None, **changes: Any) -> Experiment:
    """An experiment on the blobs that any process can rebuild; `options` go to the method, the rest to the plan."""
    options = changes.pop("options", {})
    plan = BlobPlan(seed=seed, **changes)
    method = method_of(name, **options)
    network = ClipSpec if method.needs_clip else expert_spec if method.needs_experts else BlobSpec
    return Experiment(
        method=method,
        spec=spec or network(num_classes=plan.num_classes, seed=seed),
        forward=Forward(),
        plan=plan,
        sampler=uniform_cohort,
        seed=seed,
        cohort=cohort,
        rebuild=functools.partial(experiment, name, seed=seed, cohort=cohort, spec=spec, options=options, **changes),
    )
