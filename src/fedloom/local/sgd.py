"""The only training loop in the library: terms, decisions, transforms and carries are its parts."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedloom.core.batches import Batch, Batches
from fedloom.core.context import Context
from fedloom.core.errors import ConfigError
from fedloom.core.moe import expert_parts
from fedloom.core.payload import Payload
from fedloom.core.tree import Tensors, on_device
from fedloom.local.idle_experts import IdleExperts
from fedloom.local.optim import SGD, Optimizer, Schedule
from fedloom.local.parts import Carry, Decision, GradTransform, Term
from fedloom.local.terms.cross_entropy import CrossEntropy


class Trained(NamedTuple):
    """Result of local training; tensors are the client's own and are never written again.

    carry: name -> closed value of each carry. metrics: "loss" (mean over examples of all steps). steps: number taken.
    """

    params: dict[str, Tensor]
    buffers: dict[str, Tensor]
    carry: dict[str, Tensors]
    metrics: dict[str, float]
    steps: int


@dataclass(frozen=True)
class Phase:
    """A part of local training in which only some parameters move.

    trainable: shell-style patterns of parameter names. optimizer, epochs: None takes the loop's.
    """

    trainable: tuple[str, ...] = ("*",)
    optimizer: Optimizer | None = None
    epochs: int | None = None


@dataclass(frozen=True)
class Group:
    """Parameters that move in the same steps as the others, by an optimiser and a schedule of their own.

    names: shell-style patterns of parameter names.
    """

    names: tuple[str, ...]
    optimizer: Optimizer
    schedule: Schedule = field(default_factory=Schedule)


@dataclass(frozen=True)
class LocalSGD:
    """Minimise a sum of terms by minibatch steps, in place on the bound network.

    clip_norm: largest global gradient norm, None for no clipping. phases: run one after the other; epochs count
    on through them, so no two phases see the same order. groups: the first that names a parameter moves it, `optimizer`
    (or the phase's) and `schedule` move the rest; the clipped norm is of all. Optimiser state is fresh in every call
    (A23 of the FedFMX specification) and in every phase. Rows of classes not seen yet do not move, whatever the
    optimiser, and neither do experts that no token has reached yet: weight decay included. An output "aux_loss" of the
    network, a scalar (the load balance of a mixture of experts, say), is added to the terms.
    """

    optimizer: Optimizer = field(default_factory=SGD)
    schedule: Schedule = field(default_factory=Schedule)
    epochs: int = 1
    batch_size: int = 32
    clip_norm: float | None = None
    terms: tuple[Term, ...] = (CrossEntropy(),)
    decisions: tuple[Decision, ...] = ()
    transforms: tuple[GradTransform, ...] = ()
    carries: Mapping[str, Carry] = field(default_factory=dict)
    phases: tuple[Phase, ...] = ()
    groups: tuple[Group, ...] = ()

    def __post_init__(self) -> None:
        if not self.terms:
            raise ConfigError("LocalSGD.terms is empty: pass at least one loss term")
        if self.epochs < 0 or self.batch_size < 1:
            raise ConfigError(
                f"LocalSGD needs epochs >= 0 and batch_size >= 1, got {self.epochs} and {self.batch_size}"
            )
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ConfigError(f"training.clip_norm must be above 0 or null, got {self.clip_norm}")

    def __call__(self, down: Payload, data: Batches, ctx: Context, *, ref: Mapping[str, Any] | None = None) -> Trained:
        """Train from `down["params"]` and `down["buffers"]`; `ref` adds to what the parts can read, trees among it on
        the run's device."""
        live = ctx.bind(down["params"], down.get("buffers"))
        for group in self.groups:
            if not _matching(live, group.names):
                raise ConfigError(f"no parameter matches the names {group.names} of a group of local training")
        full_ref = self._ref(down, ctx, ref or {})
        carry = {name: part.init(full_ref, ctx) for name, part in self.carries.items()}
        idle = IdleExperts(expert_parts(ctx.net.module), live, down["params"])
        ctx.net.train(True)
        loss_sum, examples, steps, epoch = torch.zeros((), dtype=torch.float64), 0, 0, 0
        for phase in self.phases or (Phase(),):
            epochs = self.epochs if phase.epochs is None else phase.epochs
            with _only(live, phase.trainable) as moving:
                step = _Stepper(
                    self, moving, phase.optimizer or self.optimizer, ctx, epochs * data.steps(self.batch_size), idle
                )
                for _ in range(epochs):
                    for batch in data.epoch(epoch, self.batch_size):
                        loss, carry = self._step(batch, step, live, full_ref, carry, ctx)
                        loss_sum, examples, steps = loss_sum + loss * len(batch.y), examples + len(batch.y), steps + 1
                    carry = {name: part.close_epoch(carry[name]) for name, part in self.carries.items()}
                    epoch += 1
        carry = {name: part.close(carry[name]) for name, part in self.carries.items()}
        params, buffers = ctx.net.take()
        metrics = {"loss": float(loss_sum) / examples} if examples else {}
        return Trained(params, buffers, carry, metrics, steps)

    def _step(
        self,
        batch: Batch,
        step: _Stepper,
        live: Tensors,
        ref: Mapping[str, Any],
        carry: dict[str, Tensors],
        ctx: Context,
    ) -> tuple[Tensor, dict[str, Tensors]]:
        batch = batch._replace(y=batch.y.to(ctx.net.forward.device))
        out = ctx.apply(batch.x)
        with torch.no_grad():
            for decide in self.decisions:
                out |= decide(_detached(out), batch, ref, carry)
        first, *more = [term(live, out, batch, ref, carry) for term in self.terms]
        loss = sum(more, first)
        if "aux_loss" in out:
            loss = loss + out["aux_loss"]
        loss.backward()  # type: ignore[no-untyped-call]
        if self.carries:
            with torch.no_grad():
                seen = _detached(out)
                carry = {name: part.update(carry[name], seen, batch, ref) for name, part in self.carries.items()}
        step(ref)
        return loss.detach(), carry

    def _ref(self, down: Payload, ctx: Context, extra: Mapping[str, Any]) -> dict[str, Any]:
        parts = (*self.terms, *self.decisions, *self.transforms, *self.carries.values())
        needed = {key for part in parts for key in getattr(part, "needs", ())}
        masks = {scope: ctx.class_mask(scope) for scope in ("seen", "old", "current", "all")}
        trees = {"anchor": down["params"]} if "anchor" in needed else {}
        trees |= {name: value for name, value in extra.items() if _is_tree(value)}
        ref = {**masks, **extra, **{name: on_device(tree, ctx.net.forward.device) for name, tree in trees.items()}}
        if missing := sorted(needed - ref.keys()):
            raise ConfigError(f"a part of local training needs ref {missing}, which the method does not pass")
        return ref


class _Stepper:
    """Gradients -> transforms -> clipping -> optimiser, with unseen class rows and idle experts held still."""

    def __init__(
        self,
        loop: LocalSGD,
        moving: dict[str, nn.Parameter],
        optimizer: Optimizer,
        ctx: Context,
        steps: int,
        idle: IdleExperts,
    ):
        self.loop, self.moving, self.ctx, self.steps, self.taken = loop, moving, ctx, steps, 0
        self.parts = [
            (names, group.optimizer.start([moving[name].detach() for name in names]), group.schedule)
            for group, names in _parted(moving, (*loop.groups, Group(("*",), optimizer, loop.schedule)))
        ]
        self.frozen = _frozen_rows(moving, ctx)
        decays = any(group.optimizer.weight_decay for group in loop.groups) or optimizer.weight_decay
        self.drifts, self.idle = bool(decays or loop.transforms), idle

    def __call__(self, ref: Mapping[str, Any]) -> None:
        grads = {n: p.grad if p.grad is not None else torch.zeros_like(p) for n, p in self.moving.items()}
        # A term may reach rows that the network does not have yet (scope "all", an L2 penalty).
        for held in self.frozen:
            grads[held.name].index_fill_(held.dim, held.rows, 0)
        if self.drifts:
            self.idle.note(grads)
        for transform in self.loop.transforms:
            grads = dict(transform(grads, self.moving, ref))
        if self.loop.clip_norm is not None:
            clip(list(grads.values()), self.loop.clip_norm)
        for names, step, schedule in self.parts:
            step([grads[name] for name in names], schedule.factor(self.ctx, self.taken, self.steps))
        for held in self.frozen if self.drifts else ():
            held.tensor.index_copy_(held.dim, held.rows, held.values)
        if self.drifts:
            self.idle.restore(self.moving)
        for param in self.moving.values():
            param.grad = None
        self.taken += 1


def _parted(moving: Mapping[str, Tensor], groups: Sequence[Group]) -> list[tuple[Group, list[str]]]:
    """The groups that move something, and what."""
    left, parts = list(moving), []
    for group in groups:
        names = _matching(left, group.names)
        left = [name for name in left if name not in names]
        parts += [(group, names)] if names else []
    return parts


def _matching(names: Iterable[str], patterns: tuple[str, ...]) -> list[str]:
    return [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]


def clip(grads: Sequence[Tensor], max_norm: float) -> None:
    """Scale gradients in place so that their joint 2-norm is at most `max_norm`, as `clip_grad_norm_` does."""
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in grads]))
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for grad in grads:
        grad.mul_(factor)


class _Held(NamedTuple):
    """Rows of one parameter that must not move, and their values."""

    name: str
    tensor: Tensor
    dim: int
    rows: Tensor
    values: Tensor


def _frozen_rows(moving: Mapping[str, Tensor], ctx: Context) -> list[_Held]:
    rows = ctx.unseen.to(ctx.net.forward.device)
    if not len(rows):
        return []
    named = [(name, moving[name].detach(), dim) for name, dim in ctx.class_rows.items() if name in moving]
    return [_Held(name, tensor, dim, rows, tensor.index_select(dim, rows)) for name, tensor, dim in named]


@contextmanager
def _only(live: Mapping[str, nn.Parameter], patterns: tuple[str, ...]) -> Iterator[dict[str, nn.Parameter]]:
    moving = {name: live[name] for name in _matching(live, patterns)}
    if not moving:
        raise ConfigError(f"no parameter matches the phase's trainable patterns {patterns}")
    held = [p for n, p in live.items() if n not in moving]
    for param in held:
        param.requires_grad_(False)
    try:
        yield moving
    finally:
        for param in held:
            param.requires_grad_(True)


def _is_tree(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(tensor, Tensor) for tensor in value.values())


def _detached(out: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in out.items()}
