"""Distribution-based label imbalance (DLI): every class is dealt out by a draw from a Dirichlet distribution."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from fedloom.core import ConfigError
from fedloom.core.errors import closest
from fedloom.data.parts import Listed, Parts
from fedloom.data.ranges import at_least, feasible, positive

ATTEMPTS = 100
TRIES = 10  # where the repair can end it
VARIANTS = ("balanced", "plain")
GROUPS = ("class", "domain")


@dataclass(frozen=True)
class Dirichlet:
    """Per class, shares of the clients ~ Dir(alpha * 1_N).

    by: "class", or "domain" for the same per domain, whatever the classes.
    variant "balanced": a client that already holds n/N examples of the task gets nothing of the next class, as in
    the code of LANDER (CVPR 2024) and FedCBDR (NeurIPS 2025); "plain": no such cap (NIID-Bench, arXiv 2102.02079).
    Cut points are floored. Differs: clients take turns in random order per class, since the last of them gets the
    remainder; in the published code that is always the last client.
    min_size 0: up to 100 draws for one in which every client holds something, then the draw with the fewest empty
    clients. Differs: the published loop has no end, and in practice never ends for many clients and small alpha.
    min_size k > 0: every client holds at least k; what 10 draws did not give, the largest clients give.
    """

    alpha: float = 0.5
    min_size: int = 0
    variant: str = "balanced"
    by: str = "class"
    overlaps = False

    def __post_init__(self) -> None:
        positive("partition.alpha", self.alpha)
        at_least("partition.min_size", self.min_size, 0)
        if self.variant not in VARIANTS:
            raise ConfigError(
                f"partition.variant must be balanced or plain, got '{self.variant}'.{closest(self.variant, VARIANTS)}"
            )
        if self.by not in GROUPS:
            raise ConfigError(f"partition.by must be class or domain, got '{self.by}'.{closest(self.by, GROUPS)}")

    def split(self, y: np.ndarray, clients: int, seed: int) -> tuple[Parts, list[str]]:
        """See `fedloom.data.partition.Partition.split`."""
        feasible(len(y), clients, self.min_size)
        rng = np.random.default_rng(seed)
        groups = [rng.permutation(np.flatnonzero(y == label)) for label in np.unique(y)]
        need = max(1, self.min_size)
        attempts = 1 if len(y) < need * clients else TRIES if self.min_size else ATTEMPTS
        best, missing = None, clients + 1
        for _ in range(attempts):
            owners = self._draw(groups, len(y), clients, rng)
            short = int((np.bincount(owners, minlength=clients) < need).sum())
            if short < missing:
                best, missing = owners, short
            if not missing:
                break
        assert best is not None
        return from_owners(repair(best, clients, self.min_size, rng), clients), []

    def _draw(self, groups: list[np.ndarray], total: int, clients: int, rng: np.random.Generator) -> np.ndarray:
        owners = np.zeros(total, np.int64)
        held = np.zeros(clients, np.int64)
        for group in groups:
            shares = rng.dirichlet(np.full(clients, self.alpha))
            # Flooring leaves the remainder of every class to the last in turn; with a fixed turn that would
            # always be the same client.
            turn = rng.permutation(clients)
            if self.variant == "balanced":
                shares = _capped(shares, held[turn] < total / clients, self.alpha, rng)
            cuts = np.floor(np.cumsum(shares)[:-1] * len(group)).astype(np.int64).clip(0, len(group))
            counts = np.diff(cuts, prepend=0, append=len(group))
            owners[group] = np.repeat(turn, counts)
            held[turn] += counts
        return owners


def _capped(shares: np.ndarray, open_mask: np.ndarray, alpha: float, rng: np.random.Generator) -> np.ndarray:
    """Shares of the clients that may still get examples, summing to 1.

    A draw may put all its mass on full clients (small alpha): it is then repeated among the open ones.
    """
    if not open_mask.any():
        return shares
    kept = shares * open_mask
    if not kept.sum() > 0:
        kept[open_mask] = rng.dirichlet(np.full(int(open_mask.sum()), alpha))
    return kept / kept.sum()


def repair(owners: np.ndarray, clients: int, min_size: int, rng: np.random.Generator) -> np.ndarray:
    """Move random examples from the largest clients until every client holds at least `min_size`.

    owners: client of every example, int64 [examples]; examples >= clients * min_size. Returns a new array.
    """
    sizes = np.bincount(owners, minlength=clients)
    short = np.flatnonzero(sizes < min_size)
    if not len(short):
        return owners
    owners = owners.copy()
    order = rng.permutation(len(owners))
    order = order[np.argsort(owners[order], kind="stable")]
    ends = np.cumsum(sizes)
    heap = [(-int(size), client) for client, size in enumerate(sizes) if size > min_size]
    heapq.heapify(heap)
    for client in short:
        for _ in range(min_size - int(sizes[client])):
            size, donor = heapq.heappop(heap)
            ends[donor] -= 1
            owners[order[ends[donor]]] = client
            if -size - 1 > min_size:
                heapq.heappush(heap, (size + 1, donor))
    return owners


def from_owners(owners: np.ndarray, clients: int) -> Listed:
    """Assignments from the client of every example; rows of a client ascend."""
    bounds = np.concatenate([[0], np.cumsum(np.bincount(owners, minlength=clients))]).astype(np.int64)
    return Listed(np.argsort(owners, kind="stable").astype(np.int64), bounds)
