"""A run's progress as lines of JSON in a file, for whoever watches it from another process."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedloom.core.errors import CheckpointError, ConfigError, FedloomError, Interrupted, RunError
from fedloom.engine.experiment import Observer

KINDS = (ConfigError, CheckpointError, RunError, Interrupted)


class Recorder(Observer):
    """Writes what an observer is told. A file `<path>.stop` beside it asks the run to end with a checkpoint."""

    def __init__(self, path: Path):
        self._file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 - open while the run lives
        self._stop = path.with_name(f"{path.name}.stop")

    def started(self, info: Mapping[str, Any]) -> None:
        """Stages, rounds, clients."""
        self._write("started", dict(info))

    def client_done(self, done: int, total: int) -> None:
        """A client has answered."""
        self._write("client_done", done, total)
        if self._stop.exists():
            raise Interrupted("stopped by the user")

    def round_done(self, row: Mapping[str, Any]) -> None:
        """A round is over."""
        self._write("round_done", dict(row))

    def stage_done(self, row: Mapping[str, Any]) -> None:
        """A stage is over."""
        self._write("stage_done", dict(row))

    def note(self, text: str) -> None:
        """Something that the user should know."""
        self._write("note", text)

    def ended(self, folder: Path | None, error: FedloomError | None = None) -> None:
        """The last line: the run folder, and what ended the run if it did not end well."""
        kind = next((k.__name__ for k in KINDS if isinstance(error, k)), "RunError")
        self._write("ended", {"folder": None if folder is None else str(folder), "kind": error and kind}, str(error))
        self._file.close()

    def _write(self, event: str, *arguments: Any) -> None:
        self._file.write(json.dumps([event, *arguments]) + "\n")


class Follower:
    """Reads such a file while it grows and tells observers."""

    def __init__(self, path: Path, observers: Sequence[Observer]):
        self._path, self._observers, self._read = path, observers, 0
        self.ended = False
        self.folder: Path | None = None
        self.error: FedloomError | None = None

    def look(self) -> bool:
        """Pass on what is new; whether there was anything. A line counts when it is whole."""
        try:
            with open(self._path, "rb") as file:
                file.seek(self._read)
                *lines, rest = file.read().split(b"\n")
                self._read = file.tell() - len(rest)
        except FileNotFoundError:
            return False
        for line in lines:
            event, *arguments = json.loads(line)
            if event == "ended":
                self._end(*arguments)
            else:
                self._tell(event, arguments)
        return bool(lines)

    def _tell(self, event: str, arguments: Sequence[Any]) -> None:
        for observer in self._observers:
            tell: Callable[..., None] = getattr(observer, event)
            tell(*arguments)

    def _end(self, how: Mapping[str, Any], text: str) -> None:
        self.ended = True
        self.folder = Path(how["folder"]) if how["folder"] else None
        if how["kind"]:
            self.error = next(kind for kind in KINDS if kind.__name__ == how["kind"])(text)
