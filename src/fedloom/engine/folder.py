"""The run folder: who may write to it, and the records that grow while a run goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from fedloom.core import CheckpointError, ConfigError
from fedloom.engine.files import disk_errors, write_bytes, write_json, yaml_text


class RunFolder:
    """One run's folder, locked while it is open. Use as a context manager or call `close`.

    Holds config.yaml (resolved, runnable again), env.json, log.txt, metrics.jsonl, checkpoints/, clients/,
    and when a run has ended DONE or FAILED.
    """

    def __init__(self, path: Path):
        self.path = path
        self._lock = _lock(path)

    @classmethod
    def create(cls, path: str | Path, config: Mapping[str, Any], env: Mapping[str, Any]) -> RunFolder:
        """Make a new run folder; `ConfigError` when it exists and is not empty or cannot be written.

        What a run leaves that was killed before its config.yaml was written counts for nothing.
        """
        path = Path(path).expanduser().absolute()
        if path.exists() and not path.is_dir():
            raise ConfigError(f"out is {path}, which is a file; name a folder that does not exist yet")
        if path.is_dir() and not all(_left_by_a_start(entry) for entry in path.iterdir()):
            mend = "name another folder, or continue it with `fedloom resume`"
            raise ConfigError(f"out is {path}, which is not empty; {mend}")
        try:
            path.mkdir(parents=True, exist_ok=True)
            if not os.access(path, os.W_OK):
                raise PermissionError(13, os.strerror(13))
        except OSError as error:
            raise ConfigError(f"out is {path}, which cannot be written: {error.strerror}") from error
        folder = cls(path)
        for left in path.glob(".*.tmp"):
            left.unlink()
        write_json(path / "env.json", env)
        write_bytes(path / "config.yaml", yaml_text(dict(config)).encode())
        return folder

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """Open an existing run folder to continue it; `CheckpointError` when it is not one."""
        path = Path(path).expanduser().absolute()
        if not (path / "config.yaml").is_file():
            raise CheckpointError(f"{path} is not a run folder: it has no config.yaml")
        if not os.access(path, os.W_OK):
            raise CheckpointError(f"{path} cannot be written; check its permissions")
        return cls(path)

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the lock."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    @property
    def metrics(self) -> Path:
        """metrics.jsonl: one row per stage, round and scope."""
        return self.path / "metrics.jsonl"

    def append(self, row: Mapping[str, Any]) -> None:
        """Add a row to metrics.jsonl."""
        with disk_errors(self.metrics), open(self.metrics, "a", encoding="utf-8") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")

    def metrics_size(self) -> int:
        """Bytes of metrics.jsonl, recorded in checkpoints."""
        return self.metrics.stat().st_size if self.metrics.exists() else 0

    def rewind(self, size: int) -> None:
        """Cut metrics.jsonl back to what a checkpoint knows; later rows will be made again."""
        if self.metrics.exists():
            with disk_errors(self.metrics), open(self.metrics, "r+b") as file:
                file.truncate(min(size, self.metrics_size()))

    def log(self, text: str) -> None:
        """Add a line to log.txt."""
        from datetime import datetime

        path = self.path / "log.txt"
        with disk_errors(path), open(path, "a", encoding="utf-8") as file:
            file.write(f"{datetime.now().isoformat(timespec='seconds')} {text.rstrip()}\n")

    def mark(self, name: str | None, text: str = "") -> None:
        """Leave DONE or FAILED with a sentence, or neither (None: the run goes on)."""
        for old in ("DONE", "FAILED"):
            if old != name:
                (self.path / old).unlink(missing_ok=True)
        if name is not None:
            write_bytes(self.path / name, f"{text}\n".encode())


def _left_by_a_start(entry: Path) -> bool:
    """Whether a run that was killed before its config.yaml was written may have left this."""
    return entry.name in (".lock", "env.json") or (entry.name.startswith(".") and entry.suffix == ".tmp")


def _lock(path: Path) -> IO[str] | None:
    """Hold an advisory lock on the folder for as long as the file is open; the system frees it on any death."""
    try:
        import fcntl
    except ImportError:
        return None
    file = open(path / ".lock", "w")  # noqa: SIM115 - open for as long as the run lives
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise ConfigError(f"{path} is in use by another run; wait for it to end or name another folder") from error
    return file
