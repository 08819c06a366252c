"""Range checks of options, in words."""

from __future__ import annotations

import math
from typing import Any

from fedloom.core import ConfigError, DataError

LARGEST = 1e6  # draws from Dir(alpha) overflow for far larger alpha, and are equal shares long before


def positive(name: str, value: Any) -> None:
    """Raise `ConfigError` unless the value is a finite number above 0 and at most a million."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise ConfigError(f"{name} must be a finite number above 0, got {value}")
    if value > LARGEST:
        raise ConfigError(f"{name} must be at most {LARGEST:g}, got {value:.6g}; equal shares need no more")


def at_least(name: str, value: Any, low: int) -> None:
    """Raise `ConfigError` unless the value is an integer of at least `low`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ConfigError(f"{name} must be an integer of at least {low}, got {value}")


def feasible(examples: int, clients: int, min_size: int) -> None:
    """Raise `DataError` when `min_size` examples for every client are more than there are."""
    if clients * min_size > examples:
        raise DataError(
            f"partition.min_size {min_size} for {clients} clients needs {clients * min_size} examples but the task "
            f"has {examples}; lower partition.min_size or partition.clients"
        )
