"""`compare` and `ablate`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
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
from fedloom.cli.completion import entries, recipes
from fedloom.cli.completion import methods as known_methods
from fedloom.cli.train import watched
from fedloom.terminal import OutputLost, say

if TYPE_CHECKING:
    from fedloom.comparison import Comparison
    from fedloom.comparison.planned import Planned, Tell

SEEDS = "0,1,2"

Study = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE|FILE",
        help="Recipe, or a YAML file of one, or of methods and seeds.",
        autocompletion=recipes,
    ),
]
Methods = Annotated[
    list[str] | None,
    typer.Option(
        "--methods",
        "--method",
        "-m",
        metavar="A,B",
        help="Words name, name@preset or name@preset+option=value, ...",
        autocompletion=entries,
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

Jobs = Annotated[
    str, typer.Option("--jobs", "-j", metavar="N", help="Runs at a time, each in its own process: a number, or auto.")
]


@guarded
def compare(
    recipe: Study = "quickstart",
    methods: Methods = None,
    seeds: Seeds = None,
    reference: Reference = None,
    metric: Metric = None,
    sets: Set = None,
    out: Out = None,
    jobs: Jobs = "1",
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
    from fedloom.comparison.jobs import checked
    from fedloom.comparison.planned import plan
    from fedloom.comparison.studies import study

    checked(jobs)
    layer = parts(layers(sets=sets, engine=engine, root=data_root, device=device, workers=workers))
    tell = teller(quiet or as_json)
    asked = study(recipe, joined(methods), joined(seeds), reference, metric, layer).alone()
    named = {"out": out, "reference": asked.reference, "metric": asked.metric, "tell": tell}
    planned = plan(asked.recipe, asked.methods, asked.seeds, **named, **asked.given)
    _carry_out(planned, tell, jobs, dry_run, as_json, quiet, verbose)


@guarded
def ablate(
    method: Annotated[
        str,
        typer.Argument(
            metavar="METHOD", help="Word name, name@preset or name@preset+option=value.", autocompletion=known_methods
        ),
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
    jobs: Jobs = "1",
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
    from fedloom.comparison.jobs import checked
    from fedloom.comparison.planned import plan_ablation

    checked(jobs)
    layer = parts(layers(sets=sets, engine=engine, root=data_root, device=device, workers=workers))
    tell = teller(quiet or as_json)
    given = {"out": out, "reference": reference, "metric": metric, "tell": tell, **layer}
    planned = plan_ablation(method, recipe, joined(seeds) or SEEDS, switches=joined(switches), **given)
    _carry_out(planned, tell, jobs, dry_run, as_json, quiet, verbose)


def parts(layer: dict[str, Any]) -> dict[str, Any]:
    """The layer by sections; other keys are refused."""
    from fedloom.comparison.settings import by_section

    return by_section(layer)


def joined(texts: list[str] | None) -> str | None:
    """One list from an option that may be given several times."""
    return ",".join(texts) if texts else None


def teller(silent: bool) -> Tell:
    """What writes progress to stderr, or nothing."""

    def tell(text: str) -> None:
        if not silent:
            say(text, err=True)

    return tell


def _carry_out(
    planned: Planned, tell: Tell, jobs: str, dry_run: bool, as_json: bool, quiet: bool, verbose: bool
) -> None:
    from fedloom.comparison import carry_out

    if dry_run:
        runs = [
            (label, seed, key, planned.state(key)) for label, of in planned.keys.items() for seed, key in of.items()
        ]
        preview(planned.folder, ("label", "seed", "hash", "state"), runs, as_json)
        return
    found = carry_out(planned, partial(watched, quiet=quiet or as_json, verbose=verbose), tell, jobs)
    try:
        _print(found, as_json)
    except OutputLost as error:
        say(f"note: {error}; the comparison is done, see '{found.folder}'", err=True)
    fail_for({f"{label}, seed {seed}": why for (label, seed), why in found.failed.items()}, len(planned.runs))


def fail_for(failed: Mapping[str, str], total: int) -> None:
    """End the command with the runs that failed, where there are any: place -> why."""
    if failed:
        fail(
            f"{len(failed)} of {total} runs failed: {'; '.join(f'{place}: {why}' for place, why in failed.items())}", 1
        )


def _print(found: Comparison, as_json: bool) -> None:
    from fedloom.report import comparison as report
    from fedloom.report.pareto import PICTURE

    if as_json:
        print_json({**found.summary, "folder": str(found.folder.absolute())})
        return
    show(report.title(found.summary), report.grid(found.summary), report.notes(found.summary))
    names = (*report.FORMS, report.JSON, PICTURE)
    say(f"files: {', '.join(str(found.folder / name) for name in names if (found.folder / name).exists())}")
    say(f"folder: {found.folder}")


def show(title: str, cells: Sequence[Sequence[str]], notes: Sequence[str]) -> None:
    """A table with its title and notes, on a terminal in as many parts as fit its width."""
    from fedloom.report.layout import aligned, fitted

    say(title)
    if sys.stdout.isatty():
        from rich.console import Console

        with suppress(OSError, ValueError):  # a terminal that has gone
            console = Console()
            console.print(*fitted(cells, console.width))
    else:
        say("\n".join(["", *aligned(cells), ""]))
    for line in notes:
        say(line)
    say("")


def preview(folder: Path, names: Sequence[str], runs: Sequence[Sequence[Any]], as_json: bool) -> None:
    """Every run, and how many are in which state. names: of the parts of a run; seed, hash and state come last."""
    if as_json:
        found = [dict(zip(names, run, strict=True)) for run in runs]
        print_json({"folder": str(folder.absolute()), "runs": found})
        return
    wide = [max(len(str(run[k])) for run in runs) for k in range(len(names) - 3)]
    for *places, seed, key, state in runs:
        text = "  ".join(f"{place:<{width}}" for place, width in zip(places, wide, strict=True))
        say(f"{text}  seed {seed}  {key[:12]}…  {state}")
    states = list({key: state for *_, key, state in runs}.values())
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    say(f"{len(states)} runs in {folder}: {counts}")
