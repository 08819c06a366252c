"""Errors that carry a sentence for the user and the exit code of the command line.

Exit codes: 2 for anything found before the first round, 1 for a run that failed once training had begun,
130 for an interruption. A message names the field, the value and the mend; it never needs a traceback.
"""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeVar

import torch

T = TypeVar("T")


class FedloomError(Exception):
    """Base of every error that FedLoom raises on purpose."""

    exit_code = 1


class ConfigError(FedloomError, ValueError):
    """An option, a name or a combination of options that cannot be run."""

    exit_code = 2


class DataError(FedloomError, ValueError):
    """Data that is missing, unreadable or unfit for the scenario asked for."""

    exit_code = 2


class CheckpointError(FedloomError):
    """A run folder or checkpoint that cannot be used as asked."""

    exit_code = 2


class PayloadError(FedloomError, ValueError):
    """A payload whose names, shapes, dtypes or values break what the method declared."""


class ClientError(FedloomError):
    """A client that failed; names client, stage, round and exchange."""


class RunError(FedloomError):
    """A run that cannot go on: too few replies, a full disk, a broken worker."""


class Interrupted(FedloomError):
    """The user asked to stop; the last committed round is on disk."""

    exit_code = 130


PACKAGES = (f"{Path(__file__).parents[1]}/", f"{Path(torch.__file__).parent}/")


def origin(error: BaseException, *, own: bool = True) -> str:
    """`file.py:LINE` where an error was raised: the innermost frame outside fedloom and torch, else the innermost.

    own: whether a frame inside the two packages will do where there is no other; without one the result is empty.
    """
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not frame.filename.startswith((*PACKAGES, "<"))]
    found = theirs or (list(frames) if own else [])
    return f"{Path(found[-1].filename).name}:{found[-1].lineno}" if found else ""


def closest(name: str, choices: Iterable[str]) -> str:
    """Return `" Did you mean 'x'?"` for the closest choice, or an empty string when none is near."""
    found = difflib.get_close_matches(str(name), [str(c) for c in choices], n=1, cutoff=0.5)
    return f" Did you mean '{found[0]}'?" if found else ""


def pick(option: str, name: str, known: Mapping[str, T]) -> T:
    """The part that an option names; `ConfigError` with the closest match for a name that none has."""
    if name not in known:
        raise ConfigError(unknown(option, name, known))
    return known[name]


def unknown(kind: str, name: str, choices: Iterable[str]) -> str:
    """One sentence for an unknown name: what it is, the closest match, what exists."""
    choices = sorted(str(c) for c in choices)
    return f"unknown {kind} '{name}'.{closest(name, choices)} Known: {', '.join(choices)}."
