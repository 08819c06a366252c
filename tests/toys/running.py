"""Runs of the toy federation in a folder, and what they left."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedloom.engine.experiment import Experiment, Observer, Options
from fedloom.engine.folder import RunFolder
from fedloom.engine.loop import run


class Notes(Observer):
    """Keeps what an observer is told."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.info: dict[str, Any] = {}
        self.clients: list[tuple[int, int]] = []

    def started(self, info: Any) -> None:
        self.info = dict(info)

    def client_done(self, done: int, total: int) -> None:
        self.clients.append((done, total))

    def note(self, text: str) -> None:
        self.notes.append(text)


class Patient(Notes):
    """Holds the first process at its clients until the second one has taken part, or something was noted."""

    def __init__(self, seconds: float = 60.0):
        super().__init__()
        self.shared, self.seconds = False, seconds

    def client_done(self, done: int, total: int) -> None:
        super().client_done(done, total)
        if threading.current_thread() is not threading.main_thread():
            self.shared = True
        until = time.monotonic() + self.seconds
        while done < total and not (self.shared or self.notes) and time.monotonic() < until:
            time.sleep(0.01)


def start(path: Path, experiment: Experiment, observers: Sequence[Observer] = (), **options: Any) -> dict[str, Any]:
    """A new run in `path`."""
    with RunFolder.create(path, {"toy": True}, {}) as folder:
        return run(experiment, Options(**options), folder, observers)


def resume(path: Path, experiment: Experiment, observers: Sequence[Observer] = (), **options: Any) -> dict[str, Any]:
    """Go on with the run in `path`."""
    with RunFolder.open(path) as folder:
        return run(experiment, Options(**options), folder, observers)


def rows(path: Path, scope: str = "round") -> list[dict[str, Any]]:
    """Rows of metrics.jsonl without their times."""
    found = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k != "seconds"} for row in found if row["scope"] == scope]
