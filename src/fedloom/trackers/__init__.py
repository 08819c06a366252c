"""Trackers keep a run where its user looks at many: TensorBoard, Weights & Biases, MLflow.

A module of this package is the tracker of its name: it holds a function of that name too, which begins or continues
the tracker's record of a run. The package it needs is imported with it, so nothing is imported for a run without one.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from fedloom.core.errors import ConfigError


class Card(NamedTuple):
    """What a tracker is told of a run before its first values.

    options: of the tracker, as in the configuration. folder: the run's. title: a short name for lists. config: the
    resolved configuration. config_hash: what names it. record: name of the record that an earlier part of the run
    began, None for a new one.
    """

    options: Mapping[str, Any]
    folder: Path
    title: str
    config: Mapping[str, Any]
    config_hash: str
    record: str | None = None


class Tracker(Protocol):
    """The record of one run.

    record: its name, for the part of the run after an interruption. see: the command or the address that shows it.
    lasting: whether what `log` was given survives the death of this process; otherwise only `close` keeps it, and a
    process that died without leaves nothing.
    """

    record: str
    see: str
    lasting: bool

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Keep values of a step."""

    def finish(self, values: Mapping[str, float], step: int, pictures: Sequence[Path], files: Sequence[Path]) -> None:
        """Keep what a finished run is summed up in. step: of its last row. pictures: PNG files. files: others, the
        report among them.
        """

    def close(self, how: str) -> None:
        """End the record. how: "finished", "stopped" (by the user) or "failed"."""


def check_installed(options: Mapping[str, Any] | None) -> None:
    """Raise `ConfigError` where the package of the tracker is not installed; None is no tracker."""
    if options is None or _is_installed(options["name"]):
        return
    raise ConfigError(
        f"tracker is {options['name']}, but that package is not installed; pip install 'fedloom[trackers]', or set "
        "tracker to null"
    )


def begin(card: Card) -> Tracker:
    """Begin the record of a run with the tracker of `card.options`, or continue `card.record`."""
    name = card.options["name"]
    made: Tracker = getattr(importlib.import_module(f"fedloom.trackers.{name}"), name)(card)
    return made


@contextmanager
def tracked(card: Card | None, **more: Any) -> Iterator[list[Any]]:
    """The observer that keeps a tracker's record up to date, in a list; without a card the list is empty.

    more: see `fedloom.trackers.following.Following`. The record is closed at the end, however the run ended.
    """
    if card is None:
        yield []
        return
    from fedloom.core.errors import Interrupted
    from fedloom.trackers.following import Following

    follower, how = Following(card, **more), "failed"
    try:
        follower.open()
        yield [follower]
        how = "finished"
    except (Interrupted, KeyboardInterrupt):
        how = "stopped"
        raise
    finally:
        follower.close(how)


def _is_installed(package: str) -> bool:
    """Whether a package can be imported; a folder without `__init__.py` (`wandb/`, `mlruns/`) counts for nothing."""
    found = importlib.util.find_spec(package)
    return found is not None and found.origin is not None
