"""`run` and `resume`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from fedloom.cli.application import (
    Json,
    Method,
    Quiet,
    Recipe,
    Root,
    Seed,
    Set,
    Verbose,
    guarded,
    layers,
    print_json,
)

Out = Annotated[Path | None, typer.Option("--out", "-o", metavar="DIR", help="Run folder; it must not exist yet.")]
Workers = Annotated[str | None, typer.Option("--workers", metavar="N", help="Processes: a number, or auto.")]


@guarded
def run(
    recipe: Recipe = "quickstart",
    method: Method = None,
    sets: Set = None,
    seed: Seed = None,
    out: Out = None,
    engine: Annotated[str | None, typer.Option("--engine", help="serial.")] = None,
    data_root: Root = None,
    device: Annotated[str | None, typer.Option("--device", help="auto, cpu, cuda, cuda:N or mps.")] = None,
    workers: Workers = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would run, and start nothing.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Train, evaluate and write a run folder."""
    from fedloom import api
    from fedloom.build import build

    layer = layers(sets=sets, method=method, seed=seed, engine=engine, root=data_root, device=device, workers=workers)
    name, config, _, _ = api.configure(recipe, **layer)
    built = build(config)
    if dry_run:
        from fedloom.cli.inspect import preview

        preview(built, as_json)
        return
    folder = out if out is not None else api.new_folder(name)
    _report(_watched(lambda observers: api.start(built, folder, observers), quiet or as_json, verbose), as_json)


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

    if (folder / "DONE").exists():
        typer.echo(f"{folder} is done; nothing to resume", err=True)
    watch = _watched(
        lambda observers: api.resume(folder, workers=workers, observers=observers), quiet or as_json, verbose
    )
    _report(watch, as_json)


def _watched(work: Any, quiet: bool, verbose: bool) -> Any:
    from fedloom.progress import Live, observer

    watching = observer(quiet, verbose)
    try:
        return work([watching])
    finally:
        if isinstance(watching, Live):
            watching.close()


def _report(finished: Any, as_json: bool) -> None:
    """Table, picture and report; with `as_json` the summary, the folder and the report."""
    from fedloom.api import PICTURE, REPORT

    if as_json:
        folder = finished.folder.absolute()
        page = folder / REPORT
        print_json({**finished.summary, "folder": str(folder), "report": str(page) if page.exists() else None})
        return
    from fedloom.report import summary_table, summary_text

    if sys.stdout.isatty():
        from rich.console import Console

        Console().print(summary_table(finished.summary))
    else:
        typer.echo(summary_text(finished.summary))
    for what, name in (("picture", PICTURE), ("report", REPORT)):
        if (finished.folder / name).exists():
            typer.echo(f"{what}: {finished.folder / name}")
    typer.echo(f"folder: {finished.folder}")
