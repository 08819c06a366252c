"""Methods against each other over seeds, each run once: `compare`, `sweep` for several settings, and `ablate` for the
parts of one method.

Every run is a run folder `<out>/runs/<key>/` (see `fedloom.comparison.folders.run_key`). What is done is opened, what
was interrupted goes on, what is missing is run; so the same call again computes only what is not there. Next to `runs/`
lie `compare.json` (its content: `fedloom.report.comparison`), its tables and its picture, written anew after every
finished run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedloom.comparison.jobs import hands
from fedloom.comparison.planned import Planned, Tell, plan, plan_ablation
from fedloom.comparison.results import Comparison
from fedloom.comparison.settings import by_section
from fedloom.comparison.studies import SEEDS, study
from fedloom.comparison.sweeps import Sweep, carry_out_sweep, plan_sweep
from fedloom.comparison.work import Watch, make
from fedloom.core.errors import Interrupted

if TYPE_CHECKING:
    from fedloom.engine.experiment import Observer

__all__ = ["Comparison", "Sweep", "ablate", "carry_out", "carry_out_sweep", "compare", "sweep"]


def compare(
    recipe_or_config: Any = None,
    methods: Any = (),
    seeds: Any = None,
    *,
    out: str | Path | None = None,
    reference: str | None = None,
    metric: str | None = None,
    jobs: int | str = 1,
    data: Any = None,
    model: Any = None,
    engine: str | Mapping[str, Any] | None = None,
    observers: Sequence[Observer] = (),
    verbose: bool | None = None,
    **overrides: Any,
) -> Comparison:
    """Run methods on the same stream, seeds and budget, and compare them.

    recipe_or_config: as in `fedloom.run`, or a file that names recipe, methods and seeds (see `docs/compare.md`).
    methods: entries, or label -> entry; an entry is a word (`fedprox`, `fedprox@paper+mu=0.1`) or a mapping of the
    section `method`. seeds: whole numbers, by default 0, 1, 2. A text of either, as on the command line, will do. out:
    folder, by default `runs/<recipe>/compare`; calling again with the same one runs only what is missing there.
    reference: label that the others are tested against, by default the first. metric: key of the result whose test the
    table shows, one of `fedloom.evaluate.comparison.RESULTS` or domain_accuracy[NAME], by default the final accuracy.
    jobs: runs at a time, each in a process of its own from 2 on; `auto` for what the machine can take. overrides: as in
    `fedloom.run`; options of `method` among them are for every method that does not set them itself, and must be known
    to all. The rest is as in `fedloom.run`; observers get a note before every run, and with several jobs notes only. A
    run that fails does not stop the others and is found in `Comparison.failed`. Raises `ConfigError` before the first
    run for what cannot be run, and after the last for a metric that none has; `RunError` when no run ended well.
    """
    given = {**by_section(overrides), "data": data, "model": model, "engine": engine}
    watch, tell = _audience(observers, verbose)
    asked = study(recipe_or_config, methods, seeds, reference, metric, given).alone()
    named = {"reference": asked.reference, "metric": asked.metric}
    planned = plan(asked.recipe, asked.methods, asked.seeds, out=out, tell=tell, **named, **asked.given)
    return carry_out(planned, watch, tell, jobs)


def sweep(
    recipe_or_config: Any = None,
    methods: Any = (),
    seeds: Any = None,
    *,
    settings: Any = None,
    grid: Any = None,
    out: str | Path | None = None,
    reference: str | None = None,
    metric: str | None = None,
    jobs: int | str = 1,
    data: Any = None,
    model: Any = None,
    engine: str | Mapping[str, Any] | None = None,
    observers: Sequence[Observer] = (),
    verbose: bool | None = None,
    **overrides: Any,
) -> Sweep:
    """Compare methods in several settings; a run that two settings share is made once.

    settings: label -> sections that go over those of the call, as in `{"alpha 0.1": {"partition.alpha": 0.1}}`. grid:
    dotted key -> values, every combination of which is a setting; one of both, or a file that names them. out: by
    default `runs/<recipe>/sweep`; the comparison of a setting is in a folder there. The rest is as in `compare`, whose
    errors name the setting here; failed runs are in `Sweep.failed`.
    """
    given = {**by_section(overrides), "data": data, "model": model, "engine": engine}
    watch, tell = _audience(observers, verbose)
    asked = study(recipe_or_config, methods, seeds, reference, metric, given, settings=settings, grid=grid)
    return carry_out_sweep(plan_sweep(asked, out, tell), watch, tell, jobs)


def ablate(
    method: str | Mapping[str, Any],
    recipe_or_config: Any = None,
    seeds: Any = SEEDS,
    *,
    switches: Any = None,
    out: str | Path | None = None,
    reference: str | None = None,
    metric: str | None = None,
    jobs: int | str = 1,
    data: Any = None,
    model: Any = None,
    engine: str | Mapping[str, Any] | None = None,
    observers: Sequence[Observer] = (),
    verbose: bool | None = None,
    **overrides: Any,
) -> Comparison:
    """Compare a method as it is ("full") with the method without each of its parts.

    method: an entry as in `compare`. switches: names of those that the method declares (ABLATIONS of its module), by
    default all; a switch's options go over those of the entry. out: by default `runs/<recipe>/ablate-<word>`. The
    rest is as in `compare`.
    """
    given = {**by_section(overrides), "data": data, "model": model, "engine": engine}
    watch, tell = _audience(observers, verbose)
    named = {"switches": switches, "out": out, "reference": reference, "metric": metric, "tell": tell}
    planned = plan_ablation(method, recipe_or_config, seeds, **named, **given)
    return carry_out(planned, watch, tell, jobs)


def _audience(observers: Sequence[Observer], verbose: bool | None) -> tuple[Watch, Tell]:
    """`watch` and `tell` of `carry_out`; an observer whose `note` raises is told no more, as inside a run."""
    from fedloom.progress import Lines, quiet_by_default
    from fedloom.terminal import say

    loud = verbose or (verbose is None and not quiet_by_default())
    watching = list(observers)

    def tell(text: str) -> None:
        if loud:
            say(text, err=True)
        for observer in tuple(watching):
            try:
                observer.note(text)
            except Interrupted:
                raise
            except Exception as error:
                watching.remove(observer)
                say(f"an observer failed and is told no more: {type(error).__name__}: {error}", err=True)

    return lambda work: work([*watching, Lines()] if loud else watching), tell


def carry_out(planned: Planned, watch: Watch, tell: Tell, jobs: int | str = 1) -> Comparison:
    """Make the runs of a comparison that are missing, and write its files after each.

    watch: calls what it is given with the observers of one run. tell: told which run is next. jobs: see `compare`.
    """
    return make([planned], hands(jobs, [planned], watch, tell), tell).results[0].comparison()
