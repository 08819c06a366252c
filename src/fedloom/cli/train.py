"""`run` and `resume`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from fedloom.cli.application import (
    Device,
    DryRun,
    Engine,
    Json,
    Method,
    Quiet,
    Recipe,
    Root,
    Seed,
    Set,
    Verbose,
    Workers,
    guarded,
    layers,
    print_json,
)
from fedloom.terminal import OutputLost, say

Out = Annotated[str | None, typer.Option("--out", "-o", metavar="DIR", help="Run folder; it must not exist yet.")]


@guarded
def run(
    recipe: Recipe = "quickstart",
    method: Method = None,
    sets: Set = None,
    seed: Seed = None,
    out: Out = None,
    engine: Engine = None,
    data_root: Root = None,
    device: Device = None,
    workers: Workers = None,
    dry_run: DryRun = False,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Train, evaluate and write a run folder."""
    from fedloom import api
    from fedloom.build import build
    from fedloom.config import resolve, resolve_source
    from fedloom.trackers import check_installed

    layer = layers(sets=sets, method=method, seed=seed, engine=engine, root=data_root, device=device, workers=workers)
    name, base = resolve_source(recipe)
    config = resolve(base, layer)
    check_installed(config.as_dict()["tracker"])
    built = build(config)
    if dry_run:
        from fedloom.cli.inspect import preview

        preview(built, as_json)
        return
    folder = api.checked_path("--out", out) if out is not None else api.new_folder(name)
    with _resumable(folder):
        show(watched(lambda observers: api.start(built, folder, observers), quiet or as_json, verbose), as_json)


@guarded
def resume(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a run that has not ended.")],
    workers: Annotated[int | None, typer.Option("--workers", min=1, metavar="N", help="Processes.")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Continue a run from its newest checkpoint; the result is the same as without the break."""
    from fedloom import api

    folder = api.checked_path("DIR", folder)
    if (folder / "DONE").exists():
        say(f"{folder} is done; nothing to resume", err=True)
    with _resumable(folder):
        finished = watched(
            lambda observers: api.resume(folder, workers=workers, observers=observers), quiet or as_json, verbose
        )
        show(finished, as_json)


@contextmanager
def _resumable(folder: Path) -> Iterator[None]:
    """Say how to go on when a command is interrupted outside training, once there is a run folder."""
    from fedloom.core.errors import Interrupted

    try:
        yield
    except KeyboardInterrupt:
        if (folder / "DONE").exists():
            raise Interrupted(f"interrupted; the run is done, see '{folder}'") from None
        if not (folder / "config.yaml").exists():
            raise
        raise Interrupted(f"interrupted; continue with `fedloom resume {folder}`") from None


def watched(work: Any, quiet: bool, verbose: bool) -> Any:
    """Do work that takes observers, with one that shows progress on stderr."""
    from fedloom.progress import Live, observer

    watching = observer(quiet, verbose)
    try:
        return work([watching])
    finally:
        if isinstance(watching, Live):
            watching.close()


def show(finished: Any, as_json: bool) -> None:
    """Table, picture and report; with `as_json` the summary, the folder and the report."""
    try:
        _print(finished, as_json)
    except OutputLost as error:
        say(f"note: {error}; the run is done, see '{finished.folder}'", err=True)


def _print(finished: Any, as_json: bool) -> None:
    from fedloom.lifecycle import PICTURE, REPORT
    from fedloom.trackers.following import how_to_see

    see = how_to_see(finished.folder)
    if as_json:
        folder = finished.folder.absolute()
        page = folder / REPORT
        told = {"folder": str(folder), "report": str(page) if page.exists() else None, "tracker": see}
        print_json({**finished.summary, **told})
        return
    from fedloom.report import summary_table, summary_text

    if sys.stdout.isatty():
        from rich.console import Console

        with suppress(OSError, ValueError):  # a terminal that has gone
            Console().print(summary_table(finished.summary))
    else:
        say(summary_text(finished.summary))
    for what, name in (("picture", PICTURE), ("report", REPORT)):
        if (finished.folder / name).exists():
            say(f"{what}: {finished.folder / name}")
    if see is not None:
        say(f"tracker: {see}")
    say(f"folder: {finished.folder}")
