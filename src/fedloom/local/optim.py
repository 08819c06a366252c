"""Optimisers and learning-rate schedules of local training.

Plain SGD is written here because `torch.optim` costs seconds to import in every process; the tests hold it to
`torch.optim.SGD` step for step. AdamW is torch's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.core.context import Context
from fedloom.core.errors import ConfigError, unknown

Step = Callable[[list[Tensor], float], None]


@dataclass(frozen=True)
class SGD:
    """SGD with momentum, Nesterov momentum and weight decay added to the gradient, as `torch.optim.SGD`."""

    lr: float = 0.05
    momentum: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        _check_rates(self.lr, self.weight_decay)
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"optimizer.momentum must be in [0, 1), got {self.momentum}")
        if self.nesterov and self.momentum == 0:
            raise ConfigError("optimizer.nesterov needs a momentum above 0")

    def start(self, params: list[Tensor]) -> Step:
        """Return a step function `(gradients, learning-rate factor)` with state of its own."""
        momenta: list[Tensor] = []

        @torch.no_grad()
        def step(grads: list[Tensor], factor: float) -> None:
            moves = list(grads)
            if self.weight_decay:
                moves = list(torch._foreach_add(moves, params, alpha=self.weight_decay))
            if self.momentum:
                if momenta:
                    torch._foreach_mul_(momenta, self.momentum)
                    torch._foreach_add_(momenta, moves)
                else:
                    momenta.extend(move.clone() for move in moves)
                moves = list(torch._foreach_add(moves, momenta, alpha=self.momentum)) if self.nesterov else momenta
            torch._foreach_add_(params, moves, alpha=-self.lr * factor)

        return step


@dataclass(frozen=True)
class AdamW:
    """AdamW with decoupled weight decay; wraps `torch.optim.AdamW`, imported on first use."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01

    def __post_init__(self) -> None:
        _check_rates(self.lr, self.weight_decay)
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"optimizer.betas must be in [0, 1), got {self.betas}")
        if not self.eps > 0:
            raise ConfigError(f"optimizer.eps must be above 0, got {self.eps}")

    def start(self, params: list[Tensor]) -> Step:
        """Return a step function `(gradients, learning-rate factor)` with state of its own."""
        from torch.optim import AdamW as TorchAdamW

        if any(p.dtype == torch.float16 for p in params):
            raise ConfigError(
                "optimizer adamw cannot train float16 parameters (their squared gradients become zero); "
                "keep the network in float32 and set training.precision to bf16"
            )
        inner = TorchAdamW(
            params, lr=self.lr, betas=self.betas, eps=self.eps, weight_decay=self.weight_decay, foreach=False
        )

        def step(grads: list[Tensor], factor: float) -> None:
            inner.param_groups[0]["lr"] = self.lr * factor
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad
            inner.step()

        return step


Optimizer = SGD | AdamW

SHAPES: dict[str, Callable[[Schedule, float, float], float]] = {
    "constant": lambda s, t, total: 1.0,
    "step": lambda s, t, total: s.gamma ** (t // s.step_size),
    "exponential": lambda s, t, total: s.gamma**t,
    "cosine": lambda s, t, total: s.floor + (1 - s.floor) * (1 + math.cos(math.pi * t / total)) / 2,
    "linear": lambda s, t, total: s.floor + (1 - s.floor) * (1 - t / total),
}


@dataclass(frozen=True)
class Schedule:
    """A factor on the learning rate: a pure function of where training stands, never of who took part when.

    per: "round" (rounds since the start of the run), "stage" (rounds since the start of the stage) or "step"
    (local steps of this client's work). step_size: units between drops of "step". gamma: factor per drop of
    "step", per unit of "exponential". floor: last factor of "cosine" and "linear". warmup: units of linear
    warm-up, counted in the same unit.
    """

    name: str = "constant"
    per: str = "round"
    step_size: int = 1
    gamma: float = 0.5
    floor: float = 0.0
    warmup: int = 0

    def __post_init__(self) -> None:
        if self.name not in SHAPES:
            raise ConfigError(unknown("schedule", self.name, SHAPES))
        if self.per not in ("round", "stage", "step"):
            raise ConfigError(f"schedule.per must be round, stage or step, got '{self.per}'")
        if self.step_size < 1 or self.warmup < 0 or not self.gamma > 0 or not 0 <= self.floor <= 1:
            raise ConfigError(
                "schedule needs step_size >= 1, warmup >= 0, gamma > 0 and floor in [0, 1], "
                f"got {self.step_size}, {self.warmup}, {self.gamma}, {self.floor}"
            )

    def factor(self, ctx: Context, step: int, steps: int) -> float:
        """Factor for local step `step` of `steps` at the context's stage and round."""
        position = {
            "round": (ctx.global_round, ctx.total_rounds),
            "stage": (ctx.round or 0, ctx.stage.rounds),
            "step": (step, steps),
        }
        t, total = position[self.per]
        warm = min(1.0, (t + 1) / (self.warmup + 1)) if self.warmup else 1.0
        return warm * SHAPES[self.name](self, t, max(total, 1))


def _check_rates(lr: float, weight_decay: float) -> None:
    if not (math.isfinite(lr) and lr > 0):
        raise ConfigError(f"optimizer.lr must be a finite number above 0, got {lr}")
    if not (math.isfinite(weight_decay) and weight_decay >= 0):
        raise ConfigError(f"optimizer.weight_decay must be a finite number of at least 0, got {weight_decay}")
