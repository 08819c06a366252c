"""`doctor`: what this machine has, what is missing, and how to mend it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fedloom.cli.application import Json, Root, fail, guarded, print_json
from fedloom.terminal import say

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet

SPARE = 2 * 1024**3  # bytes of free disk below which runs are likely to fail


ROOM = 3 * 1024**3  # bytes of memory from which small recipes have room for two workers


class Finding(NamedTuple):
    """level: "ok", "note" (something optional is missing) or "problem". mend: what to do, empty when ok."""

    level: str
    what: str
    mend: str = ""


@guarded
def doctor(data_root: Root = None, as_json: Json = False) -> None:
    """Check Python, packages, devices, memory, data, cache and disk; every finding comes with its mend.

    The exit code is 0 where runs can start, notes or not.
    """
    checks = (_python(), _packages(), _flower(), _devices(), _memory(), _data(data_root), _cache(), _disk())
    found = [item for items in checks for item in items]
    problems = [item for item in found if item.level == "problem"]
    if as_json:
        print_json({"usable": not problems, "findings": [item._asdict() for item in found]})
    else:
        for item in found:
            say(f"{item.level:<8}{item.what}" + (f" -> {item.mend}" if item.mend else ""))
        if not problems:
            say("usable: `fedloom run` starts the quickstart")
    if problems:
        fail(f"{len(problems)} problem{'s' * (len(problems) > 1)} found; {problems[0].what}: {problems[0].mend}", 1)


def _python() -> Iterator[Finding]:
    import platform

    from fedloom import __version__
    from fedloom.environment import cores, processor, python_ok

    yield Finding("ok", f"fedloom {__version__}, {cores()} cores of {processor()}")
    text = f"Python {platform.python_version()}"
    yield Finding("ok", text) if python_ok() else Finding("problem", text, "install Python 3.11 or newer")


def _packages() -> Iterator[Finding]:
    from packaging.specifiers import SpecifierSet

    from fedloom.environment import CORE, DRAWING, EXTRAS, from_checkout, installed

    wanted = _wanted()
    for name in (*CORE, *DRAWING):
        found, range_ = installed(name), wanted.get(name, SpecifierSet())
        mend = f"pip install '{name}{range_}'"
        if not found:
            yield Finding("problem", f"{name} is missing", mend)
        elif not range_.contains(found, prereleases=True):
            yield Finding("problem", f"{name} {found} is installed, and FedLoom needs {name}{range_}", mend)
        else:
            yield Finding("ok", f"{name} {found}")
    for extra, names in EXTRAS.items():
        source = f"-e '.[{extra}]" if from_checkout() else f"'fedloom[{extra}]"
        found = {name: installed(name) for name in names}
        missing = [name for name, number in found.items() if not number]
        old = [
            f"{name} {number} (needs {wanted[name]})"
            for name, number in found.items()
            if number and name in wanted and not wanted[name].contains(number, prereleases=True)
        ]
        if missing or old:
            said = ", ".join([*(f"{name} missing" for name in missing), *old])
            yield Finding("note", f"extra '{extra}': {said}", f"pip install {source}'")
        else:
            yield Finding("ok", f"extra '{extra}': {', '.join(f'{name} {number}' for name, number in found.items())}")


def _wanted() -> dict[str, SpecifierSet]:
    """Package -> the versions that FedLoom says it works with."""
    from importlib.metadata import requires

    from packaging.requirements import Requirement

    found = [Requirement(text) for text in requires("fedloom") or ()]
    return {part.name: part.specifier for part in found if part.specifier and part.name != "flwr"}  # see `_flower`


def _flower() -> Iterator[Finding]:
    from fedloom.core.errors import ConfigError
    from fedloom.engine.flower.compat import require
    from fedloom.environment import installed

    if not installed("flwr"):
        return
    try:
        require()
    except ConfigError as error:
        reason, _, mend = str(error).partition("; ")
        yield Finding("problem", reason, mend)


def _devices() -> Iterator[Finding]:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for k in range(count):
        yield Finding("ok", f"cuda:{k}: {torch.cuda.get_device_name(k)}")
    if not count:
        build = "this torch is built without CUDA" if torch.version.cuda is None else "CUDA finds no device"
        yield Finding("note", f"no GPU ({build}); runs use the processor", "for a GPU install the CUDA build of torch")


def _memory() -> Iterator[Finding]:
    try:
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows
        return
    text = f"{size / 1024**3:.1f} GiB of memory"
    yield Finding("ok", text) if size >= ROOM else Finding("note", text, "keep --workers and training.batch_size small")


def _data(root: str | None) -> Iterator[Finding]:
    from fedloom.config.words import shown
    from fedloom.data.catalogue import BUNDLED, ENTRIES

    given = root or os.environ.get("FEDLOOM_DATA")
    yield from (Finding("ok", f"{name}: bundled") for name in BUNDLED)
    if not given:
        yield Finding("note", "no data root; other data sets come from the hub", "set FEDLOOM_DATA or --data-root")
        return
    if not _is_folder(given):
        told = f"data root {shown(given)} is not a folder"
        yield Finding("problem", told, "correct FEDLOOM_DATA or --data-root")
        return
    for hub in ENTRIES:
        if hub in BUNDLED:
            continue
        folder = Path(given) / hub
        if any(folder.rglob("*.parquet")):
            yield Finding("ok", f"{hub}: found in '{folder}'")
        else:
            mend = f"hf download {hub} --repo-type dataset --local-dir {folder}"
            yield Finding("note", f"{hub}: not in the data root", mend)


def _is_folder(path: str) -> bool:
    try:
        return Path(path).is_dir()
    except (OSError, ValueError):  # too long a name, a null byte
        return False


def _cache() -> Iterator[Finding]:
    import tempfile

    from fedloom.data.cache import default_folder

    folder = default_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        yield Finding("problem", f"cache '{folder}' cannot be written ({error.strerror})", "set FEDLOOM_CACHE")
        return
    yield Finding("ok", f"cache '{folder}' can be written")


def _disk() -> Iterator[Finding]:
    free = shutil.disk_usage(Path.cwd()).free
    text = f"{free / 1024**3:.1f} GiB free in '{Path.cwd()}'"
    full = Finding("problem", text, "free some space, or write elsewhere with --out")
    yield Finding("ok", text) if free > SPARE else full
