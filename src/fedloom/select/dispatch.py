"""Which prompts of the server's pool a client is sent.

Source: Guo, Chen and Cui, "Fed-Duet" (ICLR 2026): the n prompts of largest gate score g(f~_c), by the client's feature
summary of its last round; n drawn at random for a client that has sent none. Our addition, so that the gate does not
learn its own first choices for ever: with probability `explore` a client gets a draw in their place.

A rule takes the scores [K] of one client, None before its first summary; the pool's size K; how many to send; and a
generator of the client's own, so every engine draws the same. It gives distinct indices int64 [min(n, K)], ascending.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.core.errors import ConfigError

Dispatch = Callable[[Tensor | None, int, int, torch.Generator], Tensor]


@dataclass(frozen=True)
class ByGate:
    """The prompts of largest score, the lower index first among equals; drawn with probability `explore`.

    Drawn as well where there are no scores, or where they are not finite. Raises `ConfigError` unless explore is in
    [0, 1].
    """

    explore: float = 0.1

    def __post_init__(self) -> None:
        if not 0 <= self.explore <= 1:
            raise ConfigError(f"explore must be in [0, 1], got {self.explore}")

    def __call__(self, scores: Tensor | None, pool: int, count: int, rng: torch.Generator) -> Tensor:
        """See the module."""
        exploring = bool(torch.rand((), generator=rng) < self.explore)
        if scores is None or exploring or not bool(scores.isfinite().all()):
            return at_random(None, pool, count, rng)
        return scores.sort(descending=True, stable=True).indices[:count].sort().values


def at_random(scores: Tensor | None, pool: int, count: int, rng: torch.Generator) -> Tensor:
    """Drawn uniformly and without replacement, whatever the scores: the control of the gate."""
    return torch.randperm(pool, generator=rng)[:count].sort().values


def the_first(scores: Tensor | None, pool: int, count: int, rng: torch.Generator) -> Tensor:
    """The same for every client and round: the first of the pool, those of the largest clusters of words."""
    return torch.arange(min(count, pool))


DISPATCHES: dict[str, Callable[[float], Dispatch]] = {
    "gate": ByGate,
    "random": lambda explore: at_random,
    "fixed": lambda explore: the_first,
}


def check_dispatch(count: int, pool: int) -> None:
    """Raise `ConfigError` unless 1 <= count <= pool, the numbers of prompts sent and kept."""
    if not 1 <= count <= pool:
        raise ConfigError(
            f"dispatch is {count} and the pool holds {pool} prompts; set dispatch to at least 1 and at most {pool}, or "
            "raise pool_size"
        )
