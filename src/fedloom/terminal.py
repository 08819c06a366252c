"""Writing to standard output and error, which may be closed, full, or a pipe whose reader has left."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Any


class OutputLost(Exception):
    """Standard output takes nothing more; the text says why."""


def say(text: str = "", *, err: bool = False) -> None:
    """Write a line. What standard error refuses is dropped, for it must never end a run.

    Raises `OutputLost` where standard output is full; a reader of a pipe who has left has seen enough.
    """
    stream = sys.stderr if err else sys.stdout
    if stream is None:
        return
    try:
        write(stream, f"{text}\n")
    except (OSError, ValueError) as error:
        silence(stream)
        if not err and not isinstance(error, BrokenPipeError):
            reason = getattr(error, "strerror", None) or error
            raise OutputLost(f"standard output cannot be written ({reason})") from error


def write(stream: Any, text: str) -> None:
    """Write and flush; characters that the stream's encoding lacks are spelt out."""
    try:
        stream.write(text)
    except UnicodeEncodeError:
        encoding = getattr(stream, "encoding", None) or "ascii"
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
    stream.flush()


def silence(stream: Any) -> None:
    """Send what is still buffered, and all that comes, to nowhere: else the interpreter fails when it ends."""
    with suppress(OSError, ValueError, AttributeError):
        number = stream.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, number)
        os.close(nowhere)


def open_missing() -> None:
    """Give standard streams that are closed a place, so that no file of a run is opened under their numbers."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is not None:
            continue
        with suppress(OSError):
            if not _is_open(number):
                nowhere = os.open(os.devnull, os.O_RDWR)
                if nowhere != number:
                    os.dup2(nowhere, number)
                    os.close(nowhere)
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - as long as the process lives


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True
