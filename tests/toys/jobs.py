"""Jobs for other processes."""

import os
import time
from pathlib import Path

from fedloom.core.errors import ConfigError


class TwoPart(ConfigError):
    """An error with a constructor of its own, which pickle calls with one argument too few."""

    def __init__(self, field, value):
        super().__init__(f"{field} is {value}")


def refuse(error, *arguments):
    """What an answer is made by that cannot be read."""
    raise error(*arguments)


class Unreadable:
    """Can be sent, and raises an error when it is read."""

    def __init__(self, error):
        self.error = error

    def __reduce__(self):
        return refuse, (self.error, "broken")


def give_a_two_part_error(tell):
    """A note, then an answer that cannot be read."""
    tell("begun")
    return TwoPart("rate", 3)


def add(a, b, tell):
    """a + b, which it tells."""
    tell(f"{a} + {b}")
    return a + b


def fail(tell):
    """An error that nobody foresaw."""
    raise ValueError("bad luck")


def vanish(tell):
    """The end of the process, without a word."""
    os._exit(3)


def wait(folder, tell):
    """Work until it is asked to stop; leaves the files `begun` and `stopped`."""
    try:
        Path(folder, "begun").touch()
        time.sleep(60)
    except KeyboardInterrupt:
        Path(folder, "stopped").touch()
        raise
