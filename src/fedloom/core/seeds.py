"""Named random streams: every draw in a run comes from a key, never from a global generator.

A key is a tuple such as `(seed, "batches", stage, round, client, purpose)`. Equal keys give equal draws on
every engine, in any order and in any process.
"""

from __future__ import annotations

import hashlib
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


@contextmanager
def seeded_init(*key: Key) -> Iterator[None]:
    """Initialise modules under a seed of their own; the global generator is left as it was.

    Needed because `nn.Module` constructors draw from the global generator only.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_for(*key))
        yield
