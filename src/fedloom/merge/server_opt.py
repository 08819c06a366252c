"""Server optimisers: delta = merged - old is a direction, which the server follows with momentum or adaptively.

Parts are frozen; their state is a tree that the method keeps as a payload field. Integers and booleans take the
merged value as it is. Arithmetic is in float64; results and state keep the dtype of the parameters.
Source: Reddi et al. 2021, "Adaptive Federated Optimization", algorithm 2 (no bias correction; v starts at tau^2),
and Hsu et al. 2019, "Measuring the Effects of Non-Identical Data Distribution", section 4.3 (FedAvgM).
Differs: where the denominator sqrt(v) + tau is 0 (tau = 0 and every delta so far 0) the step is 0, not 0 / 0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fedloom.core.errors import ConfigError, PayloadError
from fedloom.core.tree import Tensors

FIRST, SECOND = "first.", "second."
State = dict[str, Tensor]


class ServerStep(Protocol):
    """One step of the server, with state."""

    def init(self, params: Tensors) -> State:
        """State before the first round."""
        ...

    def __call__(self, old: Tensors, merged: Tensors, state: Tensors) -> tuple[State, State]:
        """(old parameters, merged parameters, state) -> (new parameters, new state)."""
        ...


@dataclass(frozen=True)
class FedAvgM:
    """m <- momentum m + delta; w <- w + lr m. With lr = 1 and momentum = 0 the merged values, to the bit.

    Source: Hsu et al. 2019, section 4.3.
    """

    lr: float = 1.0
    momentum: float = 0.9

    def __post_init__(self) -> None:
        _positive("lr", self.lr)
        _fraction("momentum", self.momentum)

    def init(self, params: Tensors) -> State:
        """First moments, zero."""
        return _first_moments(params)

    @torch.no_grad()
    def __call__(self, old: Tensors, merged: Tensors, state: Tensors) -> tuple[State, State]:
        """(old, merged, state) -> (new, state)."""
        new: State = {}
        kept: State = {}
        for name, value, target in _pairs(old, merged):
            if not _floating(value):
                new[name] = target
                continue
            moment = self.momentum * _state(state, FIRST, name) + (target.double() - value.double())
            plain = self.lr == 1 and self.momentum == 0
            new[name] = target if plain else (value.double() + self.lr * moment).to(value.dtype)
            kept[FIRST + name] = moment.to(value.dtype)
        return new, kept


@dataclass(frozen=True)
class _Adaptive(ABC):
    """m <- beta1 m + (1 - beta1) delta; v <- `second`(v, delta); w <- w + lr m / (sqrt(v) + tau)."""

    lr: float = 0.1
    beta1: float = 0.9
    tau: float = 1e-3

    def __post_init__(self) -> None:
        _positive("lr", self.lr)
        _fraction("beta1", self.beta1)
        if not 0 <= self.tau < float("inf"):
            raise ConfigError(f"tau must be at least 0, got {self.tau}")

    @abstractmethod
    def second(self, v: Tensor, delta: Tensor) -> Tensor:
        """New second moment from the old one."""

    def init(self, params: Tensors) -> State:
        """First moments zero, second moments tau^2."""
        second = {SECOND + n: torch.full_like(p, self.tau**2) for n, p in params.items() if _floating(p)}
        return _first_moments(params) | second

    @torch.no_grad()
    def __call__(self, old: Tensors, merged: Tensors, state: Tensors) -> tuple[State, State]:
        """(old, merged, state) -> (new, state)."""
        new: State = {}
        kept: State = {}
        for name, value, target in _pairs(old, merged):
            if not _floating(value):
                new[name] = target
                continue
            delta = target.double() - value.double()
            moment = self.beta1 * _state(state, FIRST, name) + (1 - self.beta1) * delta
            second = self.second(_state(state, SECOND, name), delta)
            scale = second.sqrt() + self.tau
            step = torch.where(scale > 0, moment / scale.where(scale > 0, torch.ones_like(scale)), 0.0)
            new[name] = (value.double() + self.lr * step).to(value.dtype)
            kept[FIRST + name], kept[SECOND + name] = moment.to(value.dtype), second.to(value.dtype)
        return new, kept


@dataclass(frozen=True)
class FedAdagrad(_Adaptive):
    """v <- v + delta^2; the paper sets beta1 = 0. Source: Reddi et al. 2021, algorithm 2, line "FedAdagrad"."""

    beta1: float = 0.0

    def second(self, v: Tensor, delta: Tensor) -> Tensor:
        """Sum of squares."""
        return v + delta.square()


@dataclass(frozen=True)
class FedAdam(_Adaptive):
    """v <- beta2 v + (1 - beta2) delta^2. Source: Reddi et al. 2021, algorithm 2, line "FedAdam"."""

    beta2: float = 0.99

    def __post_init__(self) -> None:
        super().__post_init__()
        _fraction("beta2", self.beta2)

    def second(self, v: Tensor, delta: Tensor) -> Tensor:
        """Running mean of squares."""
        return self.beta2 * v + (1 - self.beta2) * delta.square()


@dataclass(frozen=True)
class FedYogi(_Adaptive):
    """v <- v - (1 - beta2) delta^2 sign(v - delta^2). Source: Reddi et al. 2021, algorithm 2, line "FedYogi"."""

    beta2: float = 0.99

    def __post_init__(self) -> None:
        super().__post_init__()
        _fraction("beta2", self.beta2)

    def second(self, v: Tensor, delta: Tensor) -> Tensor:
        """A step towards the square, of a size that does not depend on v."""
        square = delta.square()
        return v - (1 - self.beta2) * square * torch.sign(v - square)


def _first_moments(params: Tensors) -> State:
    return {FIRST + name: torch.zeros_like(p) for name, p in params.items() if _floating(p)}


def _pairs(old: Tensors, merged: Tensors) -> list[tuple[str, Tensor, Tensor]]:
    if old.keys() != merged.keys():
        raise PayloadError(f"the merged tree lacks or adds {sorted(old.keys() ^ merged.keys())[:3]}")
    return [(name, old[name], merged[name]) for name in old]


def _state(state: Tensors, kind: str, name: str) -> Tensor:
    if kind + name not in state:
        raise PayloadError(f"the server optimiser has no state '{kind}{name}'; start from init(params)")
    return state[kind + name].double()


def _floating(tensor: Tensor) -> bool:
    return tensor.is_floating_point()


def _positive(name: str, value: float) -> None:
    if not 0 < value < float("inf"):
        raise ConfigError(f"{name} must be greater than 0, got {value}")


def _fraction(name: str, value: float) -> None:
    if not 0 <= value < 1:
        raise ConfigError(f"{name} must be in [0, 1), got {value}")
