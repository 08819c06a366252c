"""Small runs with a tracker, interrupted on the way, and the points that its record must hold afterwards."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from fedloom import api, lifecycle
from fedloom.core.errors import Interrupted
from fedloom.engine.experiment import Observer

ROUNDS = 2
SMALL = {
    "method": "fedavg",
    "model": "linear",
    "training": {"rounds": ROUNDS, "local_epochs": 1},
    "partition": {"clients": 3},
    "stream": {"tasks": 2},
}


class Stop(Observer):
    """The user's Ctrl-C after the first round of the second stage."""

    def round_done(self, row: Mapping[str, Any]) -> None:
        if (row["stage"], row["round"]) == (1, 0):
            raise Interrupted("stopped")


class Notes(Observer):
    """Keeps the notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures take a second."""
    monkeypatch.setattr(lifecycle, "_pictures", lambda *args: None)


@pytest.fixture
def resumed(tmp_path: Path, no_pictures: None) -> Callable[..., Path]:
    """A run with the given tracker that was interrupted once and continued; its folder."""

    def make(tracker: Any, **more: Any) -> Path:
        folder = tmp_path / "run"
        notes = Notes()
        with pytest.raises(Interrupted):
            api.run("quickstart", tracker=tracker, out=folder, observers=[notes, Stop()], **SMALL, **more)
        api.resume(folder, observers=[notes])
        assert not notes.notes, notes.notes
        return folder

    return make


@pytest.fixture
def points() -> Callable[[Path], dict[tuple[str, int], float]]:
    """(key, step) -> number of metrics.jsonl, without seconds, which an interruption changes."""

    def read(folder: Path) -> dict[tuple[str, int], float]:
        found: dict[tuple[str, int], float] = {}
        for line in (folder / "metrics.jsonl").read_text().splitlines():
            row = json.loads(line)
            step = row["stage"] * ROUNDS + (ROUNDS - 1 if row["scope"] == "stage" else row["round"])
            tasks = {f"accuracy/tasks/{k}": value for k, value in enumerate(row.pop("accuracy/tasks", []))}
            for key, value in {**row, **tasks}.items():
                if isinstance(value, int | float) and key not in ("stage", "round", "seconds"):
                    found[key, step] = float(value)
        return found

    return read
