"""`sweep`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedloom.cli.application import (
    Device,
    DryRun,
    Engine,
    Json,
    Quiet,
    Root,
    Set,
    Verbose,
    Workers,
    guarded,
    layers,
    print_json,
)
from fedloom.cli.compare import (
    Jobs,
    Methods,
    Metric,
    Out,
    Reference,
    Seeds,
    Study,
    fail_for,
    joined,
    parts,
    preview,
    show,
    teller,
)
from fedloom.cli.train import watched
from fedloom.terminal import OutputLost, say

if TYPE_CHECKING:
    from fedloom.comparison import Sweep
    from fedloom.comparison.sweeps import PlannedSweep


@guarded
def sweep(
    recipe: Study = "quickstart",
    methods: Methods = None,
    grid: Annotated[
        list[str] | None,
        typer.Option("--grid", "-g", metavar="KEY=V,V", help="Values of a dotted key; of several, all combinations."),
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
    """Compare methods in several settings: one table of methods against settings, and a comparison of each.

    A FILE names recipe, methods, seeds, set, and settings or grid (see docs/compare.md); what the command names too
    goes over it. The folder is runs/RECIPE/sweep unless --out names one. Called again, the same command runs only what
    is missing there.
    """
    from fedloom.comparison.jobs import checked
    from fedloom.comparison.studies import study
    from fedloom.comparison.sweeps import carry_out_sweep, plan_sweep

    checked(jobs)
    layer = parts(layers(sets=sets, engine=engine, root=data_root, device=device, workers=workers))
    tell = teller(quiet or as_json)
    asked = study(recipe, joined(methods), joined(seeds), reference, metric, layer, grid=_grid(grid))
    planned = plan_sweep(asked, out, tell)
    if dry_run:
        preview(planned.folder, ("setting", "label", "seed", "hash", "state"), _runs(planned), as_json)
        return
    found = carry_out_sweep(planned, partial(watched, quiet=quiet or as_json, verbose=verbose), tell, jobs)
    try:
        _print(found, as_json)
    except OutputLost as error:
        say(f"note: {error}; the sweep is done, see '{found.folder}'", err=True)
    failed = {f"{setting}, {label}, seed {seed}": why for (setting, label, seed), why in found.failed.items()}
    fail_for(failed, len({key for plan in planned.plans.values() for key in plan.runs}))


def _grid(pairs: list[str] | None) -> dict[str, list[Any]] | None:
    """Dotted key -> values, from `key=value,value` texts with YAML values; a comma in brackets parts nothing."""
    from fedloom.comparison.entries import split
    from fedloom.config.layers import parse
    from fedloom.config.words import shorten
    from fedloom.core.errors import ConfigError

    found: dict[str, list[Any]] = {}
    for pair in pairs or ():
        key, equals, text = pair.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--grid takes key=value,value such as partition.alpha=0.1,0.5; got '{shorten(pair)}'")
        where = f"a value of --grid {shorten(key.strip())}"
        found.setdefault(key.strip(), []).extend(parse(part, where) for part in split(text, ",") if text.strip())
    return found or None


def _runs(planned: PlannedSweep) -> list[tuple[str, str, int, str, str]]:
    """(setting, label, seed, key, state) of every run."""
    return [
        (setting, label, seed, key, plan.state(key))
        for setting, plan in planned.plans.items()
        for label, keys in plan.keys.items()
        for seed, key in keys.items()
    ]


def _print(found: Sweep, as_json: bool) -> None:
    from fedloom.report import sweep as report
    from fedloom.report.sweep_picture import PICTURE

    if as_json:
        print_json({**found.summary, "folder": str(found.folder.absolute())})
        return
    show(report.title(found.summary), report.grid(found.summary), report.notes(found.summary))
    names = (*report.FORMS, report.JSON, PICTURE)
    say(f"files: {', '.join(str(found.folder / name) for name in names if (found.folder / name).exists())}")
    say(f"comparisons: {', '.join(str(comparison.folder) for comparison in found.comparisons.values())}")
    say(f"folder: {found.folder}")
