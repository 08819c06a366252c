"""What a method may see and use: a read-only context and the one network of this process.

`Net` owns the real `nn.Module`. Parameters are copied into it once per client call (`Context.bind`) and trained
in place, so torch optimisers, hooks, activation checkpointing, tied weights and autocast work as in a plain
loop. `Net.take` hands the trained tensors out; the next bind gives the module fresh storage wherever somebody
still holds them, so nothing that was handed out is ever overwritten.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from fedloom.core.batches import Inputs
from fedloom.core.errors import ConfigError, PayloadError
from fedloom.core.payload import canonical
from fedloom.core.seeds import Key, seed_for
from fedloom.core.tree import Tensors

ClientId = int
Outputs = Mapping[str, Tensor]


@dataclass(frozen=True)
class Stage:
    """One step of the stream.

    classes: what is current at this stage, for the client of the context, or over all clients on the server.
    seen: every class that has arrived anywhere up to now; the rows that exist in a head. old: those of them that
    had arrived before this stage. All ascending. domains, seen_domains, old_domains: the same for the domains of the
    data, empty where they have none; in a stream of classes every domain is current at every stage.
    rounds: train rounds of this stage. count: stages of the stream.
    """

    index: int
    count: int
    rounds: int
    classes: tuple[int, ...]
    seen: tuple[int, ...]
    old: tuple[int, ...] = ()
    domains: tuple[int, ...] = ()
    seen_domains: tuple[int, ...] = ()
    old_domains: tuple[int, ...] = ()


@dataclass(frozen=True)
class Forward:
    """How a forward pass runs: device, memory format, and precision ("fp32", or "bf16" autocast)."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    memory_format: torch.memory_format = torch.contiguous_format
    precision: str = "fp32"
    grad_checkpointing: bool = False

    def __post_init__(self) -> None:
        if self.precision not in ("fp32", "bf16"):
            raise ConfigError(f"training.precision must be fp32 or bf16, got '{self.precision}'")


class Net:
    """One `nn.Module`, its trainable names, and the way tensors go in and out.

    factory: builds the module with its initial values, the same each time (`Net.fresh` calls it again).
    A module returns logits, or a mapping that holds "logits". Frozen parameters (`requires_grad=False`) and the
    buffers of modules that own one are loaded once and never travel.
    """

    def __init__(self, factory: Callable[[], nn.Module], forward: Forward | None = None):
        self.factory, self.forward = factory, forward or Forward()
        self.module = factory().to(self.forward.device)
        self.module = self.module.to(memory_format=self.forward.memory_format)
        if self.forward.grad_checkpointing:
            _enable_checkpointing(self.module)
        self._params = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
        self._buffers = state_buffers(self.module)
        self._given_away = False
        self._first: dict[str, dict[str, Tensor]] | None = None
        self._rebuilt: dict[Hashable, Net] = {}
        self._twins: dict[str, Net] = {}

    @property
    def trainable(self) -> tuple[str, ...]:
        """Names of the parameters that train and travel."""
        return tuple(self._params)

    @property
    def class_rows(self) -> Mapping[str, int]:
        """Names of parameters with one row per class, and the dimension of those rows."""
        return getattr(self.module, "class_rows", {})

    def fresh(self) -> dict[str, dict[str, Tensor]]:
        """Initial values as `{"params": ..., "buffers": ...}`, canonical and on the CPU.

        Of a network with frozen parts, which take long to read and are not among them, they are kept.
        """
        if self._first is not None:
            return {field: dict(tree) for field, tree in self._first.items()}
        module = self.factory()
        params = {n: canonical(p.cpu()) for n, p in module.named_parameters() if p.requires_grad}
        found = {"params": params, "buffers": {n: canonical(b.cpu()) for n, b in state_buffers(module).items()}}
        if any(not p.requires_grad for p in module.parameters()):
            self._first = {field: dict(tree) for field, tree in found.items()}
        return found

    @torch.no_grad()
    def bind(self, params: Tensors, buffers: Tensors | None = None) -> Mapping[str, nn.Parameter]:
        """Copy values into the module and return its live parameters.

        Raises `PayloadError` when a name or a shape does not fit.
        """
        self._copy("params", params, self._params)
        self._copy("buffers", buffers or {}, self._buffers)
        self._given_away = False
        return self._params

    def _copy(self, field: str, values: Tensors, into: Mapping[str, Tensor]) -> None:
        if values.keys() != into.keys():
            missing, extra = sorted(into.keys() - values.keys()), sorted(values.keys() - into.keys())
            raise PayloadError(f"'{field}' do not fit the network: missing {missing[:3]}, unknown {extra[:3]}")
        for name, tensor in into.items():
            value = values[name]
            if value.shape != tensor.shape:
                raise PayloadError(
                    f"'{field}/{name}' has shape {tuple(value.shape)}, the network needs {tuple(tensor.shape)}"
                )
            if self._given_away and _shared(tensor):
                tensor.data = torch.empty_like(tensor)
            tensor.copy_(value)
            tensor.grad = None

    def take(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Hand out the current parameters and buffers without a copy; they are never written again."""
        self._given_away = True
        params = {n: p.detach() for n, p in self._params.items()}
        return params, {n: b.detach() for n, b in self._buffers.items()}

    def __call__(self, x: Inputs) -> dict[str, Tensor]:
        """Run the forward pass; floating outputs come back in fp32 (or float64 for float64 modules)."""
        x = _to(x, self.forward)
        with self._autocast():
            out = self.module(x)
        outputs = {"logits": out} if isinstance(out, Tensor) else dict(out)
        if self.forward.precision == "fp32":
            return outputs
        return {k: v.float() if v.is_floating_point() else v for k, v in outputs.items()}

    def _autocast(self) -> Any:
        if self.forward.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.forward.device.type, dtype=torch.bfloat16)

    def train(self, mode: bool = True) -> None:
        """Switch training mode; parts of the network that are frozen as a whole stay in evaluation mode."""
        self.module.train(mode)
        if mode:
            # By identity: a phase of local training takes requires_grad away for a while.
            trainable = {id(p) for p in self._params.values()}
            for module in self.module.modules():
                inside = [id(p) for p in module.parameters()]
                if inside and trainable.isdisjoint(inside):
                    module.eval()

    def twin(self, name: str = "twin") -> Net:
        """Another network of the same shape, one per name, kept for the next call."""
        if name not in self._twins:
            self._twins[name] = Net(self.factory, self.forward)
        return self._twins[name]

    def rebuild(self, spec: Hashable) -> Net:
        """A network of other shapes, made by the module's own `rebuild(spec)`; kept for the next call."""
        if spec not in self._rebuilt:
            make = getattr(self.module, "rebuild", None)
            if make is None:
                raise ConfigError(f"{type(self.module).__name__} has no rebuild(spec): it cannot change its shapes")
            if len(self._rebuilt) >= 16:
                self._rebuilt.pop(next(iter(self._rebuilt)))
            self._rebuilt[spec] = Net(lambda: make(spec), self.forward)
        return self._rebuilt[spec]


@dataclass(frozen=True)
class Context:
    """Where and when a piece of a method runs. Read-only; `client` is None on the server.

    num_clients: all clients of the federation, whether or not they hold data at this stage. num_domains: domains of the
    data, 0 where they have none.
    """

    net: Net
    stage: Stage
    num_classes: int
    num_clients: int = 1
    num_domains: int = 0
    seed: int = 0
    round: int | None = None
    exchange: str = "train"
    client: ClientId | None = None
    _masks: dict[str, Tensor | None] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def global_round(self) -> int:
        """Rounds since the start of the run; learning-rate schedules are functions of it."""
        return self.stage.index * self.stage.rounds + (self.round or 0)

    @property
    def total_rounds(self) -> int:
        """Rounds of the whole run."""
        return self.stage.count * self.stage.rounds

    @property
    def class_rows(self) -> Mapping[str, int]:
        """Names of parameters with one row per class, and the dimension of those rows."""
        return self.net.class_rows

    def init_state(self) -> dict[str, dict[str, Tensor]]:
        """Initial `{"params": ..., "buffers": ...}` of the network: trainable tensors and statistics only."""
        return self.net.fresh()

    def bind(self, params: Tensors, buffers: Tensors | None = None) -> Mapping[str, nn.Parameter]:
        """Copy values into this process's network (once per client call); see `Net.bind`."""
        return self.net.bind(params, buffers)

    def apply(self, x: Inputs) -> dict[str, Tensor]:
        """Plain forward of the bound network: a mapping that holds "logits" [batch, classes]."""
        return self.net(x)

    def scores(self, x: Inputs) -> Tensor:
        """Logits in evaluation mode, without gradient; classes not seen yet are -inf."""
        with self.evaluating():
            return self.mask_unseen(self.apply(x)["logits"])

    def mask_unseen(self, logits: Tensor) -> Tensor:
        """Set the logits of classes not seen yet to -inf; they come last in `logits`' last dimension."""
        mask = self.class_mask("seen")
        return logits if mask is None else logits + mask

    def class_mask(self, scope: str) -> Tensor | None:
        """Additive mask [classes]: 0 inside the scope, -inf outside; None when every class is inside.

        scope: "seen" (all classes that have arrived), "old" (those that had before this stage), "current" (those of
        this client's task) or "all".
        """
        if scope not in self._masks:
            self._masks[scope] = self._make_mask(scope)
        return self._masks[scope]

    def _make_mask(self, scope: str) -> Tensor | None:
        if scope == "all":
            return None
        scopes = {"seen": self.stage.seen, "old": self.stage.old, "current": self.stage.classes}
        if scope not in scopes:
            raise ConfigError(f"label scope must be seen, old, current or all, got '{scope}'")
        inside = scopes[scope]
        if len(inside) == self.num_classes:
            return None
        mask = torch.full((self.num_classes,), -torch.inf)
        mask[list(inside)] = 0.0
        return mask.to(self.net.forward.device)

    @property
    def unseen(self) -> Tensor:
        """Class ids that have not arrived yet, int64."""
        seen = torch.zeros(self.num_classes, dtype=torch.bool)
        seen[list(self.stage.seen)] = True
        return (~seen).nonzero().flatten()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluation mode and no gradient inside the block."""
        was_training = self.net.module.training
        self.net.train(False)
        try:
            with torch.no_grad():
                yield
        finally:
            self.net.train(was_training)

    def teacher(
        self, params: Tensors, buffers: Tensors | None = None, name: str = "twin"
    ) -> Callable[[Inputs], Outputs]:
        """Another network of the same shape with these values, in evaluation mode and without gradient.

        name: tells apart teachers that are needed at once; a second one of a name overwrites the first.
        """
        net = self.net.twin(name)
        net.bind(params, buffers)
        net.train(False)
        return torch.no_grad()(net)

    def rebuild(self, spec: Hashable) -> Context:
        """The same context around a network of other shapes (a compact sub-network, say)."""
        return replace(self, net=self.net.rebuild(spec))

    def seed_for(self, purpose: str, *key: Key) -> int:
        """A seed for a draw of the method's own, named by purpose, stage, round and client."""
        return seed_for(self.seed, purpose, self.stage.index, self.round, self.client, *key)


def _uses(tensor: Tensor) -> int:
    """How many tensors share the storage, plus a constant."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


_COUNTS = hasattr(torch._C, "_storage_Use_Count")
_ALONE = _uses(torch.empty(1)) if _COUNTS else 0


def _shared(tensor: Tensor) -> bool:
    """Whether anybody else holds the tensor's memory; True where torch cannot tell."""
    return not _COUNTS or _uses(tensor) > _ALONE


def state_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Persistent buffers that belong to the state: those whose owner holds no frozen parameter."""
    found: dict[str, Tensor] = {}
    persistent = module.state_dict(keep_vars=True).keys()
    for prefix, owner in module.named_modules():
        if any(not p.requires_grad for p in owner.parameters(recurse=False)):
            continue
        for name, buffer in owner.named_buffers(prefix=prefix, recurse=False):
            if name in persistent:
                found[name] = buffer
    return found


def _to(x: Inputs, forward: Forward) -> Inputs:
    if isinstance(x, Tensor):
        x = x.to(forward.device)
        return x.to(memory_format=forward.memory_format) if x.dim() == 4 else x
    return {name: tensor.to(forward.device) for name, tensor in x.items()}


def _enable_checkpointing(module: nn.Module) -> None:
    switch = getattr(module, "set_grad_checkpointing", None)
    if switch is None:
        raise ConfigError(
            f"training.grad_checkpointing: {type(module).__name__} has no set_grad_checkpointing; set it to false"
        )
    switch(True)
