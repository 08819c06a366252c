"""What a user sees while a run goes on: one line per round, or two live lines on a terminal.

Stages and rounds are counted from 0, as in the errors, the log and every file of a run folder.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from fedloom.engine.experiment import Observer
from fedloom.report.tables import MANY, extremes
from fedloom.terminal import say

Row = Mapping[str, Any]


def observer(quiet: bool, verbose: bool) -> Observer:
    """The observer for stderr as it is: terminal, pipe, or nothing at all with `quiet`."""
    if quiet:
        return Observer()
    return Live(verbose) if _is_terminal() else Lines(verbose)


def quiet_by_default() -> bool:
    """Whether nobody reads stderr: neither a terminal nor a notebook."""
    return not _is_terminal() and "ipykernel" not in sys.modules


def _is_terminal() -> bool:
    return sys.stderr is not None and not sys.stderr.closed and sys.stderr.isatty()


class Lines(Observer):
    """One line per round and per stage on stderr."""

    def __init__(self, verbose: bool = False):
        self.verbose, self.rounds, self.stages = verbose, 0, 0

    def started(self, info: Row) -> None:
        """Say what is about to happen."""
        self.rounds, self.stages = info["rounds"], info["stages"]
        where = f", resumed at {info['resumed_from']}" if info.get("resumed_from") else ""
        workers = f", {info['workers']} workers" if info["workers"] > 1 else ""
        size = f"{_many(info['clients'], 'client')}, {_many(self.stages, 'stage')} of {_many(self.rounds, 'round')}"
        self.say(f"{size}, counted from 0{workers}{where}")

    def round_done(self, row: Row) -> None:
        """A line about the round."""
        self.say(self.round_line(row))

    def stage_done(self, row: Row) -> None:
        """A line about the stage."""
        self.say(self.stage_line(row))

    def note(self, text: str) -> None:
        """Something that the user should know."""
        self.say(f"note: {text}")

    def say(self, text: str) -> None:
        """Write a line."""
        say(text, err=True)

    def round_line(self, row: Row) -> str:
        """Where, how many clients, the loss, the seconds, and what went wrong; everything with `verbose`."""
        position = f"round {row['round']} of {self.rounds}" if row["round"] is not None else row["exchange"]
        kind = f" ({row['exchange']})" if row["round"] is not None and row["exchange"] != "train" else ""
        parts = [f"stage {row['stage']} of {self.stages}, {position}{kind}: {_many(row['clients'], 'client')}"]
        train = {k: v for k, v in row.items() if k.startswith("train/") and (self.verbose or k == "train/loss")}
        parts += [f"{name.removeprefix('train/')} {value:.4g}" for name, value in train.items()]
        parts += [f"accuracy {row['accuracy']:.3f}"] if row.get("accuracy") is not None else []
        parts += [f"{row[key]} {key}" for key in ("failed", "rejected") if row[key]]
        parts += ["degraded"] if row["degraded"] else []
        if self.verbose:
            parts += [f"up {row['bytes_up']} B", f"down {row['bytes_down']} B"]
        return ", ".join([*parts, f"{row['seconds']:.2f} s"])

    def stage_line(self, row: Row) -> str:
        """Accuracy over what was seen so far, on what is current, and per domain where there are any."""
        text = f"stage {row['stage']} of {self.stages} done: accuracy {_number(row.get('accuracy'))}"
        if self.stages > 1:
            domains = f" of {_many(row['seen_domains'], 'domain')}" if "seen_domains" in row else ""
            current = _number(row.get("accuracy/current"))
            text += f" on {row['seen_classes']} classes{domains}, {current} on the current ones"
        found = row.get("accuracy/domains", {})
        each = [f"{name} {_number(value)}" for name, value in extremes(found) if value is not None]
        of = f"of {len(found)} domains the worst and the best: " if len(found) > MANY else ""
        return f"{text}; {of}{', '.join(each)}" if each else text


class Live(Lines):
    """A bar for rounds and one for the clients of the round; stages and notes scroll by above them."""

    def __init__(self, verbose: bool = False):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        super().__init__(verbose)
        columns = (TextColumn("{task.description:<8}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self.bars = Progress(*columns, TextColumn("{task.fields[text]}"), console=Console(stderr=True), transient=True)

    def started(self, info: Row) -> None:
        """Start the bars."""
        self.total = info["rounds"] * info["stages"]
        self.round_bar = self.bars.add_task("rounds", total=self.total, text="")
        self.client_bar = self.bars.add_task("clients", total=None, text="")
        with suppress(OSError, ValueError):
            self.bars.start()
        super().started(info)

    def client_done(self, done: int, total: int) -> None:
        """Move the bar of clients."""
        self.bars.update(self.client_bar, completed=done, total=total)

    def round_done(self, row: Row) -> None:
        """Move the bar of rounds."""
        line = self.round_line(row)
        if row["round"] is not None and row["exchange"] == "train":
            done = row["stage"] * self.rounds + row["round"] + 1
            self.bars.update(self.round_bar, completed=done, text=line.partition(": ")[2])
        if self.verbose:
            self.say(line)

    def say(self, text: str) -> None:
        """Write a line above the bars."""
        with suppress(OSError, ValueError):  # a terminal that has gone; the run goes on
            self.bars.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        """Take the bars away."""
        with suppress(OSError, ValueError):
            self.bars.stop()


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def _number(value: Any) -> str:
    return "none" if value is None else f"{value:.3f}"
