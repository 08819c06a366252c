"""What a network measures beside accuracy: sums and counts that can be added, and the values read off them.

A network may have a method `measures(out, y)`: its outputs for a batch and the labels -> (sum, count) per name. Known
are "accuracy_norm" (hits of the choice by length-normalised likelihood, examples) and "nll" (summed negative
log-likelihood of the right option's tokens in nats, tokens), which is told as "perplexity", exp(sum / count).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from fedloom.core.errors import PayloadError

Sums = Mapping[str, tuple[float, float]]


def checked(found: Any) -> dict[str, tuple[float, float]]:
    """What a network's `measures` returned, as plain numbers.

    Raises `PayloadError` for anything but pairs (sum, count) by name with counts of at least 0.
    """
    try:
        sums = {str(name): (float(total), float(count)) for name, (total, count) in found.items()}
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise PayloadError(f"the network's measures must be (sum, count) per name, got {found!r:.200}") from error
    for name, (_, count) in sums.items():
        if not 0 <= count < math.inf:
            raise PayloadError(f"the network's measure '{name}' has the count {count}; it must be at least 0")
    return sums


def summed(parts: Iterable[Sums]) -> dict[str, tuple[float, float]]:
    """Sums and counts over parts of a test set; added exactly, so that the order of the parts is all one."""
    columns: dict[str, list[tuple[float, float]]] = {}
    for part in parts:
        for name, pair in part.items():
            columns.setdefault(name, []).append(pair)
    return {name: (_sum(s for s, _ in pairs), _sum(n for _, n in pairs)) for name, pairs in columns.items()}


def values(sums: Sums) -> dict[str, float | None]:
    """The mean per name, and "perplexity" in the place of "nll"; None for no count and for no finite value."""
    means = {name: total / count if count else math.nan for name, (total, count) in sums.items()}
    told = {"perplexity" if k == "nll" else k: _exp(v) if k == "nll" else v for k, v in means.items()}
    return {name: value if math.isfinite(value) else None for name, value in told.items()}


def _sum(numbers: Iterable[float]) -> float:
    """Exact; NaN where infinities of both signs meet or no float holds the sum."""
    try:
        return math.fsum(numbers)
    except (ValueError, OverflowError):
        return math.nan


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf
