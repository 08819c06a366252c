"""Payloads and records on disk: safetensors and JSON, written whole or not at all."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor

from fedloom.core import CheckpointError, Payload, RunError
from fedloom.core.payload import canonical


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn what the disk refuses (full, read-only, no permission) into one sentence."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        mend = "free some space and resume the run" if full else "check the folder and its permissions"
        cause = (error.strerror or str(error)).lower()
        raise RunError(f"cannot write {path}: {cause}; {mend}") from error


def write_bytes(path: Path, data: bytes, *, sync: bool = True) -> None:
    """Write a file atomically: a temporary file, fsync, rename."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(temporary, "wb") as file:
                file.write(data)
                if sync:
                    file.flush()
                    os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise


def write_json(path: Path, value: Any, *, sync: bool = True) -> None:
    """Write JSON atomically."""
    write_bytes(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode(), sync=sync)


class _Quoting(yaml.SafeDumper):
    """YAML with every text value in quotes: a reader that knows `1e5` as a number must not find one in a text."""


def _quoted(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    plain = yaml.resolver.BaseResolver.DEFAULT_SCALAR_TAG
    return dumper.represent_scalar(plain, text, style=None if text.isidentifier() else '"')


_Quoting.add_representer(str, _quoted)


def yaml_text(value: Any, **style: Any) -> str:
    """A value as YAML that is read back as the same value."""
    return yaml.dump(value, Dumper=_Quoting, sort_keys=False, allow_unicode=True, **style)


def sync_folder(path: Path) -> None:
    """Make renames inside a folder durable, where the system can."""
    if os.name == "posix":
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def save_payload(path: Path, payload: Payload, meta: Mapping[str, str] | None = None, *, sync: bool = True) -> None:
    """Save a payload as safetensors; keys are `field/name`, empty fields are kept in the metadata."""
    from safetensors.torch import save_file

    flat: dict[str, Tensor] = {}
    for field, tree in payload.items():
        for name, tensor in tree.items():
            flat[f"{field}/{name}"] = tensor.detach().cpu().contiguous()
    record = {**(meta or {}), "fields": json.dumps(sorted(payload))}
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with usual_mode(temporary):
                save_file(_unshared(flat), str(temporary), metadata=record)
            if sync:
                with open(temporary, "rb+") as file:
                    os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        except Exception as error:  # safetensors reports a full disk with an error class of its own
            temporary.unlink(missing_ok=True)
            if "os error" in str(error).lower() or "no space" in str(error).lower():
                raise RunError(f"cannot write {path}: {error}; free some space and resume the run") from error
            raise


@contextmanager
def usual_mode(path: Path) -> Iterator[None]:
    """Give what is written to the path the mode of any new file; safetensors makes files for their owner alone."""
    path.touch()
    mode = path.stat().st_mode
    yield
    path.chmod(mode)


def load_payload(path: Path) -> dict[str, dict[str, Tensor]]:
    """Load what `save_payload` wrote, canonical; `CheckpointError` when the file is missing or damaged."""
    from safetensors import safe_open

    payload: dict[str, dict[str, Tensor]] = {}
    try:
        with safe_open(str(path), framework="pt") as file:
            payload = {field: {} for field in json.loads((file.metadata() or {}).get("fields", "[]"))}
            for key in file.keys():  # noqa: SIM118 - a safetensors handle is no mapping
                field, _, name = key.partition("/")
                payload.setdefault(field, {})[name] = canonical(file.get_tensor(key))
    except Exception as error:
        raise CheckpointError(f"{path} is missing or damaged ({error}); it cannot be read") from error
    return payload


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _unshared(flat: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors that share storage with an earlier one: safetensors refuses them."""
    taken: set[int] = set()
    for key, tensor in flat.items():
        pointer = tensor.untyped_storage().data_ptr()
        if tensor.numel() and pointer in taken:
            flat[key] = tensor.clone()
        taken.add(pointer)
    return flat
