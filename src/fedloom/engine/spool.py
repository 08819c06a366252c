"""Payloads between a client's work and the server's merge: one reusable file per process.

A cohort's replies are written to files and read back through a memory map, tensor by tensor, so the server holds
one reply tensor at a time whatever the cohort's size, and processes share replies without serialising them.
Pages already read are handed back to the system.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fedloom.core.payload import ALIGNMENT, Payload, is_finite, items, raw_bytes
from fedloom.engine.files import disk_errors

CHUNK = 1 << 22  # bytes written at a time: what fits in cache, so that the finite check reads memory once


class Entry(NamedTuple):
    """Where one tensor lies in a spool file."""

    field: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class Ref(NamedTuple):
    """A payload in a spool file. not_finite: the first tensor that holds NaN or infinity, or None."""

    path: str
    fields: tuple[str, ...]
    entries: tuple[Entry, ...]
    not_finite: str | None


class Spool:
    """A file that payloads are written to, one after the other; `reset` starts it over."""

    def __init__(self, path: Path):
        self.path = path
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            # A new file, never the old one: a worker that outlives a killed run may still write to that.
            path.unlink(missing_ok=True)
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        self._end = 0
        self._written: dict[int, Entry] = {}

    def reset(self) -> None:
        """Forget what was written; the file keeps its pages."""
        self._end = 0
        self._written.clear()

    def close(self) -> None:
        """Close and remove the file."""
        os.close(self._fd)
        self.path.unlink(missing_ok=True)

    def write(self, payload: Payload, *, keep: bool = False) -> Ref:
        """Append a payload; with `keep`, a tensor object written before is referred to, not written again.

        `keep` is for tensors that outlive the spool's contents (the server's), since it goes by identity.
        """
        entries: list[Entry] = []
        bad: str | None = None
        for field, name, tensor in items(payload):
            entry = self._written.get(id(tensor)) if keep else None
            if entry is None:
                entry, finite = self._append(field, name, tensor)
                if keep:
                    self._written[id(tensor)] = entry
                if not finite and bad is None:
                    bad = f"{field}/{name}"
            entries.append(entry._replace(field=field, name=name))
        return Ref(str(self.path), tuple(sorted(payload)), tuple(entries), bad)

    def _append(self, field: str, name: str, tensor: Tensor) -> tuple[Entry, bool]:
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        entry = Entry(field, name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), self._end, 0)
        entry = entry._replace(nbytes=flat.numel() * flat.element_size())
        finite, offset = True, self._end
        with disk_errors(self.path):
            for part in flat.split(max(1, CHUNK // flat.element_size())):
                finite = finite and is_finite(part)
                offset += _write_all(self._fd, memoryview(raw_bytes(part).numpy()), offset)
        self._end = -(-offset // ALIGNMENT) * ALIGNMENT
        return entry, finite


class Reader:
    """Memory maps of spool files, shared by the payloads read from them."""

    def __init__(self) -> None:
        self._maps: dict[str, mmap.mmap] = {}
        self._last: tuple[mmap.mmap, int, int] | None = None

    def open(self, ref: Ref) -> dict[str, Mapping[str, Tensor]]:
        """The payload as lazy trees; every access reads the tensor from the map."""
        trees: dict[str, dict[str, Entry]] = {field: {} for field in ref.fields}
        for entry in ref.entries:
            trees[entry.field][entry.name] = entry
        return {field: LazyTree(self, ref.path, entries) for field, entries in trees.items()}

    def read(self, path: str, entry: Entry) -> Tensor:
        """One tensor as a view of the map: valid until its spool is written again."""
        dtype = getattr(torch, entry.dtype)
        if entry.nbytes == 0:
            return torch.empty(entry.shape, dtype=dtype)
        view = self._map(path, entry.offset + entry.nbytes)
        self._release()
        self._last = (view, entry.offset, entry.nbytes)
        flat = torch.frombuffer(view, dtype=torch.uint8, count=entry.nbytes, offset=entry.offset)
        return flat.view(dtype).reshape(entry.shape)

    def holds(self, tensor: Tensor) -> bool:
        """True when the tensor is a view of one of the maps."""
        pointer = tensor.untyped_storage().data_ptr()
        for view in self._maps.values():
            start = torch.frombuffer(view, dtype=torch.uint8).data_ptr()
            if start <= pointer < start + len(view):
                return True
        return False

    def forget(self) -> None:
        """Hand back the pages read last and drop the maps."""
        self._release()
        self._maps.clear()

    def _map(self, path: str, needed: int) -> mmap.mmap:
        found = self._maps.get(path)
        if found is None or len(found) < needed:
            with open(path, "r+b") as file:
                found = self._maps[path] = mmap.mmap(file.fileno(), 0)
        return found

    def _release(self) -> None:
        """Drop the pages of the tensor read before: they come back from the file if it is read again."""
        if self._last is not None and hasattr(mmap, "MADV_DONTNEED"):
            view, offset, size = self._last
            start = offset // mmap.PAGESIZE * mmap.PAGESIZE
            view.madvise(mmap.MADV_DONTNEED, start, size + offset - start)
        self._last = None


class LazyTree(Mapping[str, Tensor]):
    """A tree whose tensors are read when they are asked for."""

    def __init__(self, reader: Reader, path: str, entries: Mapping[str, Entry]):
        self._reader, self._path, self._entries = reader, path, entries

    def __getitem__(self, name: str) -> Tensor:
        return self._reader.read(self._path, self._entries[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def _write_all(fd: int, data: memoryview, offset: int) -> int:
    written = 0
    while written < len(data):
        written += os.pwrite(fd, data[written:], offset + written)
    return written
