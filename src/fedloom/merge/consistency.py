"""Consistency of updates over rounds, and weights that grow with the distance from the global model.

Source: Chen et al., "Fair Federated Learning under Domain Skew with Local Consistency and Domain Diversity" (FedHEAL,
CVPR 2024), as in its public code. With u = theta^t - theta_i a client's update, and h per entry the share of the
client's rounds in which u was not negative:

    c = h where u >= 0, else 1 - h;   mask = [c > threshold];   h <- (h t + [u >= 0]) / (t + 1) after t rounds
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.core.tree import Tensors


def consistency_mask(update: Tensor, history: Tensor, rounds: Tensor, threshold: float) -> Tensor:
    """Where the update's sign is that of more than `threshold` of the past rounds; boolean, shaped like `update`.

    history: h, of the same shape; a zero counts as positive. rounds: t, int64, broadcastable; where it is 0 there is no
    history, so everything is kept. threshold: below 0 keeps everything.
    """
    agreement = torch.where(update >= 0, history, 1 - history)
    return (rounds == 0) | (agreement > threshold)


def sign_history(update: Tensor, history: Tensor, rounds: Tensor) -> Tensor:
    """h after this update: the share of t + 1 rounds in which it was not negative; the dtype is that of `history`."""
    return (history * rounds + (update >= 0)) / (rounds + 1)


@dataclass(frozen=True)
class ConsistencyMasks(Mapping[str, Tensor]):
    """Name -> mask of one client's update, made anew each time it is asked for, so that none is held.

    old: the tree that the client was sent. tree: the one that it returned, possibly lazy, of the same shapes. history:
    name -> h as float32; a missing name has none. rounds: name -> t.
    """

    old: Tensors
    tree: Tensors
    history: Tensors
    rounds: Tensors
    threshold: float

    def __getitem__(self, name: str) -> Tensor:
        return self._mask(name, self._update(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self.tree)

    def __len__(self) -> int:
        return len(self.tree)

    @torch.no_grad()
    def observed(self) -> tuple[dict[str, Tensor], float]:
        """The history after this update, and sum over the tensors of ||mask * u||_2, in one walk over the tree."""
        history, distance = {}, 0.0
        for name in self.tree:
            update = self._update(name)
            kept = update * self._mask(name, update)
            distance += float(torch.linalg.vector_norm(kept.double()))
            history[name] = sign_history(update, self._past(name), self.rounds[name])
        return history, distance

    def _update(self, name: str) -> Tensor:
        return self.old[name] - self.tree[name]

    def _mask(self, name: str, update: Tensor) -> Tensor:
        return consistency_mask(update, self._past(name), self.rounds[name], self.threshold)

    def _past(self, name: str) -> Tensor:
        past = self.history.get(name)
        return torch.zeros(self.old[name].shape) if past is None else past


def diversity_step(distances: Tensor, steps: Tensor, beta: float, share: float = 1.0) -> Tensor:
    """Delta_i <- (1 - beta) Delta_i + beta share d_i / sum_m d_m, by which a client's weight grows; [clients].

    distances: d of the clients of a round. steps: their Delta from before, 0 at first. share: the size of the round's
    cohort as a fraction of all clients. Without any distance they have equal parts.
    """
    total = distances.sum()
    parts = distances / total if total > 0 else torch.full_like(distances, 1 / max(1, len(distances)))
    return (1 - beta) * steps + beta * share * parts
