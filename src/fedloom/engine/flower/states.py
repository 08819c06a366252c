"""Client states that lie on nodes, as the server knows them."""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection
from pathlib import Path

from fedloom.core import ClientId
from fedloom.engine.files import write_json
from fedloom.engine.flower.telling import WORD
from fedloom.engine.store import Versions


class RemoteStates:
    """Which version is what, and which may still be named. A `States`.

    run: a word of this run's own, kept in `file`, so that no node takes the states of another run for these.
    """

    def __init__(self, file: Path):
        self._file = file
        self._known: dict[tuple[ClientId, str], str] = {}
        self._kept: dict[ClientId, set[str]] = {}
        try:
            self.run = json.loads(file.read_text())["run"]
            if not WORD.fullmatch(self.run):
                raise ValueError(self.run)
        except (OSError, ValueError, KeyError, TypeError):
            self.clear()

    def learn(self, client: ClientId, version: str, sha256: str) -> None:
        """A node says that it has stored a state."""
        self._known[client, version] = sha256

    def sha256(self, client: ClientId, version: str) -> str:
        """Hash of a state, as its node told it."""
        return self._known.get((client, version), "")

    def sound(self, client: ClientId, version: str, sha256: str) -> bool:
        """Believed: the node compares the hash before it uses the state, and says so if it differs."""
        self._known[client, version] = sha256
        return True

    def prune(self, kept: Collection[Versions]) -> None:
        """Noted here; nodes are told with their next instruction."""
        self._kept = {}
        for index in kept:
            for client, version in index.items():
                self._kept.setdefault(client, set()).add(version)
        self._known = {key: sha for key, sha in self._known.items() if key[1] in self._kept.get(key[0], ())}

    def clear(self) -> None:
        """A run that starts over takes another word, under which no node holds anything."""
        self.run = secrets.token_hex(16)
        self._known, self._kept = {}, {}
        write_json(self._file, {"run": self.run})

    def keep(self, client: ClientId, version: str | None) -> list[str]:
        """Versions of a client that may still be named, the given one among them."""
        return sorted(self._kept.get(client, set()) | ({version} if version is not None else set()))
