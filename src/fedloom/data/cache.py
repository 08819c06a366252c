"""Decoded data on disk, keyed by content and opened memory-mapped.

Layout of the folder: `sources/<fingerprint>/` holds the arrays (`.npy`) and `meta.json`; `keys/<key>.json` leads
from what was asked for (hash of the source files and of the decode options) to a fingerprint; `files/` remembers
the hash of files by path, size and times, so that a second start does not read them again. Nothing is pickled.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

log = logging.getLogger("fedloom.data")

Arrays = Mapping[str, np.ndarray]

CLOCK = 0.05  # seconds; a file changed twice within one tick of the file system's clock keeps its time


def default_folder() -> Path:
    """`FEDLOOM_CACHE`, or `~/.cache/fedloom`."""
    given = os.environ.get("FEDLOOM_CACHE")
    return Path(given) if given else Path.home() / ".cache" / "fedloom"


def digest(value: Any) -> str:
    """SHA-256 of a JSON-able value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def hash_file(path: Path, sha: Any | None = None) -> Any:
    """Feed a file to a SHA-256 object, a new one unless given, and return it."""
    sha = hashlib.sha256() if sha is None else sha
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            sha.update(block)
    return sha


@dataclass(frozen=True)
class Cache:
    """A cache folder. Reading never fails, it finds nothing; a folder that cannot be written is logged once a call."""

    folder: Path

    def recall(self, key: str) -> dict[str, Any] | None:
        """The value remembered for a key, or None."""
        return _read_json(self.folder / "keys" / f"{key}.json")

    def remember(self, key: str, value: Mapping[str, Any]) -> None:
        """Keep a JSON-able value under a key."""
        self._write_json(self.folder / "keys" / f"{key}.json", value)

    def content_hash(self, files: Sequence[Path], base: Path) -> str:
        """SHA-256 over the names relative to `base` and the bytes of all files, in the order given.

        Files are read again only when a path, size or time has changed since.
        """
        stats = [(str(p.resolve()), s.st_size, s.st_mtime_ns, s.st_ctime_ns) for p in files for s in [p.stat()]]
        memo = self.folder / "files" / f"{digest([str(base.resolve()), stats])}.json"
        found = _read_json(memo)
        if found and isinstance(found.get("sha256"), str):
            return found["sha256"]
        sha = hashlib.sha256()
        for path in files:
            sha.update(
                f"\x1e{path.relative_to(base).as_posix()}\x1f{path.stat().st_size}\x1f".encode(errors="surrogateescape")
            )
            hash_file(path, sha)
        newest = max((max(m, c) for _, _, m, c in stats), default=0) / 1e9
        if time.time() - newest > CLOCK:
            self._write_json(memo, {"sha256": sha.hexdigest()})
        return sha.hexdigest()

    def read(self, fingerprint: str) -> tuple[dict[str, np.ndarray], dict[str, Any]] | None:
        """The arrays, memory-mapped copy-on-write, and the meta data; None when absent or damaged.

        Copy-on-write pages are shared between processes, and a stray write can never reach the file.
        """
        entry = self.folder / "sources" / fingerprint
        meta = _read_json(entry / "meta.json")
        if meta is None:
            return None
        try:
            arrays = {name: _open(entry / f"{name}.npy", stamp) for name, stamp in meta["files"].items()}
            return arrays, meta["meta"]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            log.warning("cache entry %s is damaged (%s); it is built again", entry, error)
            return None

    def write(self, fingerprint: str, arrays: Arrays, meta: Mapping[str, Any]) -> bool:
        """Store arrays and meta data atomically; True when the entry can be read afterwards."""
        entry = self.folder / "sources" / fingerprint
        draft = entry.with_name(f".{fingerprint[:16]}-{uuid.uuid4().hex}")
        try:
            draft.mkdir(parents=True)
            stamps = {name: _save(draft / f"{name}.npy", array) for name, array in arrays.items()}
            self._write_json(draft / "meta.json", {"files": stamps, "meta": dict(meta)}, must=True)
            _replace(draft, entry)
        except OSError as error:
            log.warning("cache folder %s cannot be written (%s); the data stay in memory", self.folder, error)
            return False
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        return True

    def _write_json(self, path: Path, value: Mapping[str, Any], must: bool = False) -> None:
        draft = path.with_name(f".{path.name}-{uuid.uuid4().hex}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            draft.write_text(json.dumps(value))
            os.replace(draft, path)
        except OSError as error:
            if must:
                raise
            log.info("cache folder %s cannot be written (%s)", self.folder, error)


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _save(path: Path, array: np.ndarray) -> dict[str, Any]:
    np.save(path, array, allow_pickle=False)
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    stat = path.stat()
    return {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "sha256": hash_file(path).hexdigest()}


def _open(path: Path, stamp: Mapping[str, Any]) -> np.ndarray:
    stat = path.stat()
    if stat.st_size != stamp["size"]:
        raise ValueError(f"{path.name} has {stat.st_size} bytes, expected {stamp['size']}")
    # A copied cache has new times, so the bytes decide; an untouched one is not read at all.
    if stat.st_mtime_ns != stamp["mtime_ns"] and hash_file(path).hexdigest() != stamp["sha256"]:
        raise ValueError(f"{path.name} has other bytes than were written")
    # An empty array cannot be mapped.
    empty = np.load(path, mmap_mode=None) if stat.st_size < 1024 else None
    return np.load(path, mmap_mode="c", allow_pickle=False) if empty is None or empty.size else empty


def _replace(draft: Path, entry: Path) -> None:
    """Move a finished draft to its place; another process may have put the same content there first."""
    try:
        os.rename(draft, entry)
    except OSError:
        if not entry.is_dir():
            raise
        # The old entry was absent or damaged a moment ago; move it away and try once more.
        aside = entry.with_name(f".{entry.name[:16]}-{uuid.uuid4().hex}")
        os.rename(entry, aside)
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(draft, entry)
