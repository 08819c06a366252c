"""Named random streams: every draw in a run comes from a key, never from a global generator.

A key is a tuple such as `(seed, "batches", stage, round, client, purpose)`. Equal keys give equal draws on
every engine, in any order and in any process.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

Key = int | float | str | bool | None


def seed_for(*key: Key) -> int:
    """Hash a key to a seed in [0, 2**63). Parts are told apart by type: `1` and `"1"` differ."""
    text = "\x1f".join(f"{type(part).__name__}:{part!r}" for part in key)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def generator(*key: Key) -> torch.Generator:
    """Return a CPU generator for this key."""
    return torch.Generator().manual_seed(seed_for(*key))


_one_at_a_time = threading.RLock()  # the generator is the process's, and runs may share the process


@contextmanager
def seeded(*key: Key) -> Iterator[None]:
    """Give the global generator a seed of its own inside the block, and put it back as it was.

    Needed because `nn.Module` constructors and dropout draw from the global generator only. Threads take turns, or
    one would draw from the other's seed.
    """
    with _one_at_a_time:
        before = torch.default_generator.get_state()
        _seed(seed_for(*key))
        try:
            yield
        finally:
            torch.default_generator.set_state(before)


def _seed(seed: int) -> None:
    """Seed the generators that exist: `torch.manual_seed` formats the call stack where CUDA sleeps, each time."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)
