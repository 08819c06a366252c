"""`doctor`: what this machine has, what is missing, and how to mend it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from fedloom.cli.application import Json, Root, fail, guarded, print_json
from fedloom.terminal import say

SPARE = 2 * 1024**3  # bytes of free disk below which runs are likely to fail


class Finding(NamedTuple):
    """level: "ok", "note" (something optional is missing) or "problem". mend: what to do, empty when ok."""

    level: str
    what: str
    mend: str = ""


@guarded
def doctor(data_root: Root = None, as_json: Json = False) -> None:
    """Check Python, packages, devices, data, cache and disk; every finding comes with its mend."""
    found = [*_python(), *_packages(), *_flower(), *_devices(), *_data(data_root), *_cache(), *_disk()]
    if as_json:
        print_json({"findings": [item._asdict() for item in found]})
    else:
        for item in found:
            say(f"{item.level:<8}{item.what}" + (f" -> {item.mend}" if item.mend else ""))
    problems = [item for item in found if item.level == "problem"]
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
    from fedloom.environment import CORE, DRAWING, EXTRAS, from_checkout, installed

    for name in (*CORE, *DRAWING):
        found = installed(name)
        missing = Finding("problem", f"{name} is missing", f"pip install {name}")
        yield Finding("ok", f"{name} {found}") if found else missing
    for extra, names in EXTRAS.items():
        source = f"-e '.[{extra}]" if from_checkout() else f"'fedloom[{extra}]"
        have = [f"{name} {installed(name)}" for name in names if installed(name)]
        missing = [name for name in names if not installed(name)]
        if missing:
            yield Finding("note", f"extra '{extra}': {', '.join(missing)} missing", f"pip install {source}'")
        else:
            yield Finding("ok", f"extra '{extra}': {', '.join(have)}")


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


def _data(root: str | None) -> Iterator[Finding]:
    from fedloom.data.catalogue import BUNDLED, ENTRIES

    given = root or os.environ.get("FEDLOOM_DATA")
    yield from (Finding("ok", f"{name}: bundled") for name in BUNDLED)
    if not given:
        yield Finding("note", "no data root; other data sets come from the hub", "set FEDLOOM_DATA or --data-root")
        return
    if not Path(given).is_dir():
        yield Finding("problem", f"data root '{given}' is not a folder", "correct FEDLOOM_DATA or --data-root")
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
