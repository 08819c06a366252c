"""Client state across rounds: versioned files, one per client and version.

An instruction names the version it starts from, so any update can be repeated with the same result. A version
stays on disk until the checkpoint that replaces it is committed.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping
from pathlib import Path

from fedloom.core import ClientId, Payload
from fedloom.engine.files import file_sha256, load_payload, save_payload

Versions = Mapping[ClientId, str]


def version_of(stage: int, trip: int, exchange: str) -> str:
    """Name of the state that an exchange leaves behind; `trip` counts the trips of the stage."""
    return f"{stage:04d}.{trip:05d}.{exchange}"


class ClientStore:
    """States under `folder/<client>/<version>.safetensors`. A client without a version has its initial state."""

    def __init__(self, folder: Path):
        self.folder = folder

    def load(self, client: ClientId, version: str | None) -> Payload | None:
        """The state of that version, or None when the client has none yet."""
        return None if version is None else load_payload(self.path(client, version))

    def save(self, client: ClientId, version: str, state: Payload) -> None:
        """Write one version; it becomes durable with the next checkpoint."""
        save_payload(self.path(client, version), state)

    def sha256(self, client: ClientId, version: str) -> str:
        """Hash of the file that holds a state."""
        return file_sha256(self.path(client, version))

    def sound(self, client: ClientId, version: str, sha256: str) -> bool:
        """Whether the file of a state is there and unchanged."""
        try:
            return self.sha256(client, version) == sha256
        except OSError:
            return False

    def prune(self, kept: Collection[Versions]) -> None:
        """Remove every version that none of the kept indexes names."""
        if not self.folder.is_dir():
            return
        names = {self.path(client, version) for index in kept for client, version in index.items()}
        for folder in self.folder.iterdir():
            for file in folder.iterdir():  # what a killed process left half written goes as well
                if file not in names:
                    file.unlink(missing_ok=True)

    def clear(self) -> None:
        """Remove everything, for a run that starts over."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def path(self, client: ClientId, version: str) -> Path:
        """Where a version lies."""
        return self.folder / str(client) / f"{version}.safetensors"
