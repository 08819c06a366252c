"""Which clients take part in a round."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fedloom.core.errors import ConfigError
from fedloom.core.seeds import Key, seed_for


def cohort_size(available: int, size: int | float) -> int:
    """How many of `available` clients a cohort has: an integer is a count, a float in (0, 1] a fraction.

    A count above what is available takes all; a fraction is rounded up and gives at least one client. Raises
    `ConfigError` for anything else.
    """
    if isinstance(size, bool) or not isinstance(size, int | float):
        raise ConfigError(f"training.cohort must be a count or a fraction in (0, 1], got {size!r}")
    if isinstance(size, int):
        if size < 1:
            raise ConfigError(f"training.cohort must be at least 1 client, got {size}")
        return min(size, available)
    if not 0 < size <= 1:
        raise ConfigError(f"training.cohort as a fraction must be in (0, 1], got {size}; write a count as an integer")
    # Rounded first: 0.07 * 100 is 7.000000000000001 in floating point, and that is 7 clients.
    return min(available, max(1, math.ceil(round(size * available, 9))))


def uniform_cohort(participants: Sequence[int], size: int | float, *key: Key) -> list[int]:
    """Draw a cohort uniformly and without replacement; ascending client ids.

    participants: clients that hold data; may be a range, which is never expanded. size: see `cohort_size`. key:
    name of the random stream; equal keys give equal cohorts.
    """
    available = len(participants)
    count = cohort_size(available, size)
    if count == available:
        return sorted(int(client) for client in participants)
    rng = np.random.default_rng(seed_for(*key))
    places = rng.choice(available, count, replace=False, shuffle=False)
    return sorted(int(participants[int(place)]) for place in places)
