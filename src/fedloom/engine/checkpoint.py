"""Checkpoints: everything that a run needs to go on as if it had never stopped.

A checkpoint is a folder that appears whole or not at all. All random streams are functions of the position, so
the position stands for them.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fedloom.core import CheckpointError, Payload
from fedloom.engine.files import (
    disk_errors,
    file_sha256,
    load_payload,
    save_payload,
    sync_folder,
    write_json,
)
from fedloom.engine.force import States


@dataclass
class Progress:
    """Where a run stands, and what it has counted so far.

    stage, trip: the next trip to make. versions: state of each client that has one. matrix: rows of accuracies
    per task (None: not evaluated). test_counts: test examples per task. sample_visits: examples that clients trained
    on, each time counted, by work whose answer arrived: that of a rejected update counts, that of a client which failed
    does not. pass_visits: those that they looked at without training.
    """

    stage: int = 0
    trip: int = 0
    versions: dict[int, str] = field(default_factory=dict)
    matrix: list[list[float | None]] = field(default_factory=list)
    test_counts: list[int] = field(default_factory=list)
    rounds: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    sample_visits: int = 0
    pass_visits: int = 0
    rejected_updates: int = 0
    failed_clients: int = 0
    degraded_rounds: int = 0
    train_seconds: float = 0.0
    wall_seconds: float = 0.0
    last_stage_row: dict[str, Any] = field(default_factory=dict)
    metrics_size: int = 0
    served: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Progress:
        """From its JSON form."""
        return cls(**{**record, "versions": {int(c): v for c, v in record["versions"].items()}})


class Checkpoints:
    """The checkpoints of one run folder; at most `keep` are kept. states: where client states lie."""

    def __init__(self, run: Path, keep: int, config_hash: str, states: States):
        self.folder, self.keep, self.config_hash = run / "checkpoints", keep, config_hash
        self.states = states
        self._hashes: dict[int, tuple[str, str]] = {}

    def save(self, server: Payload, progress: Progress) -> None:
        """Write server state and progress; older checkpoints and unreferenced client states are then removed."""
        name = f"stage{progress.stage:04d}-trip{progress.trip:05d}"
        temporary, final = self.folder / f".{name}.tmp", self.folder / name
        with disk_errors(final):
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        try:
            save_payload(temporary / "server.safetensors", server)
            write_json(temporary / "meta.json", self._meta(progress, temporary / "server.safetensors"))
            with disk_errors(final):
                if final.exists():
                    shutil.rmtree(final)
                os.replace(temporary, final)
                sync_folder(self.folder)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        self._prune()

    def load(self, note: Any) -> tuple[Payload, Progress] | None:
        """The newest sound checkpoint; None when there is none at all.

        A damaged one is passed over with a note; `CheckpointError` when all are damaged or when the
        configuration has changed.
        """
        found = self._all()
        damaged: list[Path] = []
        reason = ""
        for path in reversed(found):
            try:
                loaded = self._read(path)
            except _Damaged as error:
                damaged.append(path)
                reason = reason or str(error)
                note(f"{error}; trying the one before")
                continue
            for useless in damaged:  # else they would count among those that are kept
                shutil.rmtree(useless, ignore_errors=True)
            self.states.prune([_versions(sound) for sound in self._all()])
            return loaded
        if found:
            raise CheckpointError(
                f"every checkpoint of the run is damaged; run the configuration again. First: {reason}"
            )
        return None

    def _read(self, path: Path) -> tuple[Payload, Progress]:
        try:
            meta = json.loads((path / "meta.json").read_text())
            if meta.pop("sha256") != _digest(meta):
                raise ValueError("meta.json has changed on disk")
            progress, sha = Progress.of(meta["progress"]), meta["server_sha256"]
            clients = {int(client): (str(version), str(sha)) for client, (version, sha) in meta["clients"].items()}
            config_hash = meta["config_hash"]
            sound = file_sha256(path / "server.safetensors") == sha
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise _Damaged(f"checkpoint {path} is damaged ({type(error).__name__}: {error})") from error
        if not sound:
            raise _Damaged(f"checkpoint {path} is damaged (its server state has changed on disk)")
        if config_hash != self.config_hash:
            raise CheckpointError(
                f"the configuration of {path.parent.parent} has changed since its checkpoint was written; "
                "restore config.yaml, or start a new run with the changed one"
            )
        self._check_clients(path, progress, clients)
        try:
            server = load_payload(path / "server.safetensors")
        except CheckpointError as error:
            raise _Damaged(str(error)) from error
        self._hashes = clients
        return server, progress

    def _check_clients(self, path: Path, progress: Progress, clients: Mapping[int, tuple[str, str]]) -> None:
        for client, version in progress.versions.items():
            known, sha256 = clients.get(client, ("", ""))
            if known != version or not self.states.sound(client, version, sha256):
                raise _Damaged(f"checkpoint {path} is damaged (the state of client {client} is missing or has changed)")

    def _meta(self, progress: Progress, server: Path) -> dict[str, Any]:
        from fedloom import __version__

        for client, version in progress.versions.items():
            if self._hashes.get(client, ("", ""))[0] != version:
                self._hashes[client] = version, self.states.sha256(client, version)
        meta = {
            "progress": dict(vars(progress)),
            "server_sha256": file_sha256(server),
            "clients": {client: self._hashes[client] for client in progress.versions},
            "config_hash": self.config_hash,
            "fedloom": __version__,
            "torch": str(torch.__version__),
        }
        return {**meta, "sha256": _digest(meta)}

    def _all(self) -> list[Path]:
        if not self.folder.is_dir():
            return []
        return sorted(path for path in self.folder.iterdir() if path.is_dir() and not path.name.startswith("."))

    def _prune(self) -> None:
        found = self._all()
        for path in found[: -self.keep]:
            shutil.rmtree(path, ignore_errors=True)
        kept = [_versions(path) for path in found[-self.keep :]]
        self.states.prune(kept)


def newest(run: Path) -> tuple[Payload, Progress]:
    """Server state and progress of a finished run's last checkpoint; `CheckpointError` when there is none to read."""
    found = sorted(path for path in (run / "checkpoints").glob("stage*") if path.is_dir())
    if not found:
        raise CheckpointError(f"'{run}' holds no checkpoint; run it with checkpoint.every of 1 or more")
    try:
        progress = Progress.of(json.loads((found[-1] / "meta.json").read_text())["progress"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"checkpoint {found[-1]} is damaged ({type(error).__name__}: {error})") from error
    return load_payload(found[-1] / "server.safetensors"), progress


def _digest(meta: Mapping[str, Any]) -> str:
    """SHA-256 of a record as JSON reads it back."""
    return hashlib.sha256(json.dumps(json.loads(json.dumps(meta)), sort_keys=True).encode()).hexdigest()


class _Damaged(CheckpointError):
    """A checkpoint that cannot be read; an older one may do."""


def _versions(path: Path) -> dict[int, str]:
    """Client states that a checkpoint names; none when it is damaged."""
    try:
        named = json.loads((path / "meta.json").read_text())["progress"]["versions"]
        return {int(client): str(version) for client, version in named.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
