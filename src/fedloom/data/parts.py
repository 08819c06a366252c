"""Which rows each client holds: index arrays that are stored, or computed when asked for."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np


class Parts(Protocol):
    """Index arrays of the clients for one task."""

    def __len__(self) -> int:
        """Number of clients."""
        ...

    def rows(self, client: int) -> np.ndarray:
        """Rows of the train split, int64, ascending."""
        ...

    def size(self, client: int) -> int:
        """Number of rows of a client."""
        ...

    def holders(self) -> Sequence[int]:
        """Clients with at least one row, ascending; may be a range."""
        ...

    def digest(self) -> str:
        """SHA-256 of every assignment."""
        ...


@dataclass(frozen=True, eq=False)
class Listed:
    """Stored assignments. order: rows of client 0, then of client 1, and so on; bounds: int64 [clients + 1]."""

    order: np.ndarray
    bounds: np.ndarray

    @classmethod
    def of(cls, rows: Sequence[np.ndarray]) -> Listed:
        """From one index array per client."""
        bounds = np.cumsum([0, *(len(part) for part in rows)], dtype=np.int64)
        order = np.concatenate([np.sort(part) for part in rows]) if len(rows) else np.empty(0)
        return cls(order.astype(np.int64), bounds)

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def rows(self, client: int) -> np.ndarray:
        """Rows of a client."""
        return self.order[self.bounds[client] : self.bounds[client + 1]]

    def size(self, client: int) -> int:
        """Number of rows of a client."""
        return int(self.bounds[client + 1] - self.bounds[client])

    def holders(self) -> Sequence[int]:
        """Clients with at least one row."""
        held = np.flatnonzero(np.diff(self.bounds))
        return range(len(self)) if len(held) == len(self) else tuple(held.tolist())

    def digest(self) -> str:
        """SHA-256 of rows and bounds."""
        return hashlib.sha256(self.order.tobytes() + b"\x1e" + self.bounds.tobytes()).hexdigest()


@dataclass(frozen=True, eq=False)
class Windows:
    """Client i reads `width` consecutive rows of one shuffled order, from i * width on, wrapping round.

    Time and memory of a client do not depend on how many clients there are; every row is read as soon as
    clients * width reaches the number of rows, and windows overlap from then on.
    """

    order: np.ndarray
    clients: int
    width: int

    def __len__(self) -> int:
        return self.clients

    def rows(self, client: int) -> np.ndarray:
        """Rows of a client."""
        start = client * self.width
        return np.sort(self.order[np.arange(start, start + self.width) % len(self.order)])

    def size(self, client: int) -> int:
        """Number of rows of a client."""
        return self.width

    def holders(self) -> Sequence[int]:
        """All clients."""
        return range(self.clients if self.width else 0)

    def digest(self) -> str:
        """SHA-256 of the order and the rule."""
        return hashlib.sha256(self.order.tobytes() + f"{self.clients},{self.width}".encode()).hexdigest()
