"""Rows of metrics.jsonl and the summary as what every tracker takes: named numbers at a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

PLACE = ("stage", "round", "exchange", "scope")  # keys of a row that say where it belongs


def scalars(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a row under its keys; of a list and of a mapping each under `key/place` and `key/name`.

    Other values are left out. Keys of an exchange other than "train" begin with its name, for a round may have both.
    """
    exchange = row.get("exchange")
    prefix = "" if exchange in (None, "train") else f"{exchange}/"
    return {f"{prefix}{key}": value for key, value in _numbers(row) if key not in PLACE}


def _numbers(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in values.items():
        if isinstance(value, int | float):
            yield key, float(value)
        elif isinstance(value, Mapping):
            yield from ((f"{key}/{name}", float(part)) for name, part in value.items() if isinstance(part, int | float))
        elif isinstance(value, list):
            yield from ((f"{key}/{k}", float(part)) for k, part in enumerate(value) if isinstance(part, int | float))


def step(row: Mapping[str, Any], rounds: int, last: int) -> int:
    """The round that a row belongs to, counted over the run from 0. rounds: per stage. last: step of the row before.

    A stage belongs to its last round; an exchange outside the rounds to the round before it in its stage, and to the
    first where it has none before it.
    """
    first = row["stage"] * rounds
    own = first + rounds - 1 if row["scope"] == "stage" else first + (row["round"] or 0)
    return max(own, last)
