"""`compare` and `ablate`."""

from __future__ import annotations

import sys
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedloom.cli.application import (
    Device,
    DryRun,
    Engine,
    Json,
    Quiet,
    Recipe,
    Root,
    Set,
    Verbose,
    Workers,
    fail,
    guarded,
    layers,
    print_json,
)
from fedloom.cli.train import watched
from fedloom.terminal import OutputLost, say

if TYPE_CHECKING:
    from fedloom.comparison import Comparison
    from fedloom.comparison.planned import Planned, Tell

SEEDS = "0,1,2"

Methods = Annotated[
    list[str] | None,
    typer.Option(
        "--methods", "--method", "-m", metavar="A,B", help="Words name, name@preset or name@preset+option=value, ..."
    ),
]
Seeds = Annotated[
    list[str] | None,
    typer.Option("--seeds", "--seed", metavar="N,N", help="Seeds of every method.", show_default=SEEDS),
]
Reference = Annotated[
    str | None, typer.Option("--reference", metavar="LABEL", help="Test the others against it; the first by default.")
]
Metric = Annotated[
    str | None,
    typer.Option("--metric", metavar="KEY", help="Result whose test the table shows.", show_default="final_accuracy"),
]
Out = Annotated[
    str | None,
    typer.Option("--out", "-o", metavar="DIR", help="Folder of the comparison; what is done there is not run again."),
]


@guarded
def compare(
    recipe: Recipe = "quickstart",
    methods: Methods = None,
    seeds: Seeds = None,
    reference: Reference = None,
    metric: Metric = None,
    sets: Set = None,
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
    """Run methods on the same stream and seeds, and compare them: means, intervals, paired tests, costs.

    The folder is runs/RECIPE/compare unless --out names one. Called again, the same command runs only what is missing
    there: after an interruption, after a failure, for one method or seed more.
    """
    from fedloom.comparison.planned import plan

    layer = layers(sets=sets, engine=engine, root=data_root, device=device, workers=workers)
    tell = _teller(quiet or as_json)
    words, numbers = _joined(methods) or "", _joined(seeds) or SEEDS
    given = {"out": out, "reference": reference, "metric": metric, "tell": tell, **_parts(layer)}
    planned = plan(recipe, words, numbers, **given)
    _carry_out(planned, tell, dry_run, as_json, quiet, verbose)


@guarded
def ablate(
    method: Annotated[
        str, typer.Argument(metavar="METHOD", help="Word name, name@preset or name@preset+option=value.")
    ],
    recipe: Recipe = "quickstart",
    switches: Annotated[
        list[str] | None, typer.Option("--switches", metavar="A,B", help="Some of them; `fedloom list methods METHOD`.")
    ] = None,
    seeds: Seeds = None,
    reference: Reference = None,
    metric: Metric = None,
    sets: Set = None,
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
    """Compare a method as it is (full) with the same method without each of its parts.

    The folder is runs/RECIPE/ablate-METHOD unless --out names one. Called again, the same command runs only what is
    missing there.
    """
    from fedloom.comparison.planned import plan_ablation

    layer = layers(sets=sets, engine=engine, root=data_root, device=device, workers=workers)
    tell = _teller(quiet or as_json)
    given = {"out": out, "reference": reference, "metric": metric, "tell": tell, **_parts(layer)}
    planned = plan_ablation(method, recipe, _joined(seeds) or SEEDS, switches=_joined(switches), **given)
    _carry_out(planned, tell, dry_run, as_json, quiet, verbose)


def _parts(layer: dict[str, Any]) -> dict[str, Any]:
    return {"data": None, "model": None, "engine": None, **layer}


def _joined(texts: list[str] | None) -> str | None:
    """One list from an option that may be given several times."""
    return ",".join(texts) if texts else None


def _teller(silent: bool) -> Tell:
    def tell(text: str) -> None:
        if not silent:
            say(text, err=True)

    return tell


def _carry_out(planned: Planned, tell: Tell, dry_run: bool, as_json: bool, quiet: bool, verbose: bool) -> None:
    from fedloom.comparison import carry_out

    if dry_run:
        _preview(planned, as_json)
        return
    found = carry_out(planned, partial(watched, quiet=quiet or as_json, verbose=verbose), tell)
    try:
        _print(found, as_json)
    except OutputLost as error:
        say(f"note: {error}; the comparison is done, see '{found.folder}'", err=True)
    if found.failed:
        reasons = "; ".join(f"{label}, seed {seed}: {reason}" for (label, seed), reason in found.failed.items())
        fail(f"{len(found.failed)} of {len(planned.runs)} runs failed: {reasons}", 1)


def _print(found: Comparison, as_json: bool) -> None:
    from fedloom.report import comparison as report

    if as_json:
        print_json({**found.summary, "folder": str(found.folder.absolute())})
        return
    if sys.stdout.isatty():
        from rich.console import Console

        say(report.title(found.summary))
        with suppress(OSError, ValueError):  # a terminal that has gone
            console = Console()
            console.print(*report.tables(found.summary, console.width))
        for line in report.notes(found.summary):
            say(line)
    else:
        say(report.text(found.summary))
    say("")
    for what, name in (("table", report.MARKDOWN), ("numbers", report.CSV), ("means and tests", report.JSON)):
        say(f"{what}: {found.folder / name}")
    say(f"folder: {found.folder}")


def _preview(planned: Planned, as_json: bool) -> None:
    """Every run with its label, seed, key and state."""
    found = [
        (label, seed, key, planned.state(key)) for label, keys in planned.keys.items() for seed, key in keys.items()
    ]
    if as_json:
        runs = [dict(zip(("label", "seed", "hash", "state"), run, strict=True)) for run in found]
        print_json({"folder": str(planned.folder.absolute()), "runs": runs})
        return
    wide = max(map(len, planned.keys))
    for label, seed, key, state in found:
        say(f"{label:<{wide}}  seed {seed}  {key[:12]}…  {state}")
    states = [planned.state(key) for key in planned.runs]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    say(f"{len(states)} runs in {planned.folder}: {counts}")
