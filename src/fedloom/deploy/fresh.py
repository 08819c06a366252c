"""Folders that are written whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fedloom.core.errors import ConfigError


@contextmanager
def fresh_folder(out: Path, *, private: bool = False) -> Iterator[Path]:
    """Yield an empty folder whose files move to `out` when the block ends well, and are gone when it does not.

    out: may exist when it is empty. private: for its owner alone.
    Raises `ConfigError` for a folder that is not empty, a file, and what cannot be written.
    """
    out = out.absolute()
    _check_empty(out)
    new = [path for path in (out, *out.parents) if not path.exists()]
    moved: list[Path] = []
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{out.name[:100]}-", dir=out.parent))
        try:
            yield staging
            out.mkdir(exist_ok=True)
            if private:
                out.chmod(0o700)
            for path in sorted(staging.iterdir()):
                moved.append(out / path.name)
                os.replace(path, moved[-1])
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    except BaseException as error:
        _remove(moved, new)
        if isinstance(error, OSError):
            raise ConfigError(
                f"out is {out}, which cannot be written: {error.strerror}; name another folder"
            ) from error
        raise


def _check_empty(out: Path) -> None:
    try:
        if out.is_dir() and any(out.iterdir()):
            raise ConfigError(f"out is {out}, which is not empty; name a folder that does not exist yet")
        if out.exists() and not out.is_dir():
            raise ConfigError(f"out is {out}, which is a file; name a folder that does not exist yet")
    except OSError as error:
        raise ConfigError(f"out is {out}, which cannot be read: {error.strerror}; name another folder") from error


def _remove(moved: list[Path], new: list[Path]) -> None:
    """Take away what was put here; of the new folders only those into which nobody else has put something."""
    for path in moved:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    for path in new:
        with suppress(OSError):
            path.rmdir()
