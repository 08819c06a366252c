"""Methods against each other over seeds, each run once: `compare`, and `ablate` for the parts of one method.

Every run is a run folder `<out>/runs/<key>/` (see `fedloom.comparison.folders.run_key`). What is done is opened, what
was interrupted goes on, what is missing is run; so the same call again computes only what is not there. Next to `runs/`
lie `compare.json` (its content: `fedloom.report.comparison`), `compare.md` and `compare.csv`, written anew after every
finished run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedloom.api import Run
from fedloom.comparison.folders import mend
from fedloom.comparison.planned import UNFINISHED, Planned, Tell, plan, plan_ablation
from fedloom.core.errors import ConfigError, FedloomError, Interrupted, RunError, origin
from fedloom.evaluate.comparison import DOMAIN, RESULTS, budget, compared
from fedloom.report import comparison as report

if TYPE_CHECKING:
    from fedloom.engine.experiment import Observer

Work = Callable[[Sequence["Observer"]], Run]
Watch = Callable[[Work], Run]


@dataclass(frozen=True)
class Comparison:
    """What a comparison left.

    folder: where everything is. summary: the content of compare.json. runs: label -> seed -> run, finished ones only.
    failed: (label, seed) -> why the run is missing.
    """

    folder: Path
    summary: Mapping[str, Any]
    runs: Mapping[str, Mapping[int, Run]]
    failed: Mapping[tuple[str, int], str]

    def __repr__(self) -> str:
        failed = f", {len(self.failed)} runs failed" if self.failed else ""
        return f"Comparison({', '.join(self.runs)} over seeds {self.summary['seeds']}{failed}, '{self.folder}')"

    def table(self) -> list[dict[str, Any]]:
        """The table as numbers, one mapping per method; see `fedloom.report.comparison.rows`."""
        return report.rows(self.summary)

    @property
    def markdown(self) -> str:
        """The table with its notes, as in compare.md."""
        return report.markdown(self.summary)

    def _repr_markdown_(self) -> str:
        return self.markdown


def compare(
    recipe_or_config: Any = None,
    methods: Any = (),
    seeds: Any = (0, 1, 2),
    *,
    out: str | Path | None = None,
    reference: str | None = None,
    metric: str | None = None,
    data: Any = None,
    model: Any = None,
    engine: str | Mapping[str, Any] | None = None,
    observers: Sequence[Observer] = (),
    verbose: bool | None = None,
    **overrides: Any,
) -> Comparison:
    """Run methods on the same stream, seeds and budget, and compare them.

    methods: entries, or label -> entry; an entry is a word (`fedprox`, `fedprox@paper+mu=0.1`) or a mapping of the
    section `method`. seeds: whole numbers. A text of either, as on the command line, will do. out: folder, by default
    `runs/<recipe>/compare`; calling again with the same one runs only what is missing there. reference: label that
    the others are tested against, by default the first. metric: key of the result whose test the table shows, one of
    `fedloom.evaluate.comparison.RESULTS` or domain_accuracy[NAME], by default the final accuracy. overrides: as in
    `fedloom.run`; options of `method` among them are for every method that does not set them itself, and must be known
    to all. The rest is as in `fedloom.run`; observers get a note before every run. A run that fails does not stop the
    others and is found in `Comparison.failed`. Raises `ConfigError` before the first run for what cannot be run, and
    after the last for a metric that none has; `RunError` when no run ended well.
    """
    given = {"data": data, "model": model, "engine": engine, **overrides}
    watch, tell = _audience(observers, verbose)
    planned = plan(recipe_or_config, methods, seeds, out=out, reference=reference, metric=metric, tell=tell, **given)
    return carry_out(planned, watch, tell)


def ablate(
    method: str | Mapping[str, Any],
    recipe_or_config: Any = None,
    seeds: Any = (0, 1, 2),
    *,
    switches: Any = None,
    out: str | Path | None = None,
    reference: str | None = None,
    metric: str | None = None,
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
    given = {"data": data, "model": model, "engine": engine, **overrides}
    watch, tell = _audience(observers, verbose)
    named = {"switches": switches, "out": out, "reference": reference, "metric": metric, "tell": tell}
    planned = plan_ablation(method, recipe_or_config, seeds, **named, **given)
    return carry_out(planned, watch, tell)


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


def carry_out(planned: Planned, watch: Watch, tell: Tell) -> Comparison:
    """Make the runs that are missing, one after the other, and write the comparison after each.

    watch: calls what it is given with the observers of one run. tell: told which run is next.
    """
    _prepare(planned.folder)
    results = Results(planned)
    if results.done:
        tell(f"already there: {len(results.done)} of {len(planned.runs)} runs")
    results.write()
    left = [key for key in planned.runs if key not in results.done and key not in results.failed]
    try:
        for key in [*left, *left]:  # the second time those that another process held
            if key not in results.done and key not in results.failed:
                _make(results, key, watch, tell, last=key in results.held)
        if results.failed:
            results.write()  # another process may have ended one since
    except (Interrupted, KeyboardInterrupt) as error:
        results.write()
        raise Interrupted(
            f"interrupted in {results.place(key)}; what is done stays in '{planned.folder}', and the same command goes "
            "on there"
        ) from error
    return results.comparison()


def _make(results: Results, key: str, watch: Watch, tell: Tell, last: bool) -> None:
    """Make one run. last: one that another process holds is told as such instead of being put off."""
    planned, place = results.planned, results.place(key)
    held, error = planned.held(key), None
    if not held:
        tell(place)
        try:
            results.done[key] = watch(partial(planned.carry, key))
        except (Exception, SystemExit) as raised:  # a damaged folder, code of the user
            if isinstance(raised, Interrupted):
                raise
            if _is_stop(raised):
                raise KeyboardInterrupt from raised
            error = _in_words(raised, planned.path(key))
            held = planned.held(key) or isinstance(raised.__cause__, BlockingIOError)  # begun there at this moment
    if key not in results.done and planned.state(key) != "done":
        if held and not last:
            results.held.add(key)
            tell(f"put off, for another process works on it: {place.partition(': ')[2]}")
            return
        if held or error is None:
            error = ConfigError(
                f"'{planned.path(key)}' is in use by another run; when that has ended, call the same comparison again"
            )
        results.failed[key] = error
        tell(f"{place} failed: {error}")
    results.write()


def _is_stop(error: BaseException | None) -> bool:
    """Whether Ctrl-C came in the middle of something that failed with an error of its own, such as an import."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _in_words(error: BaseException, path: Path) -> FedloomError:
    """An error of one run; one that nobody foresaw leaves the other runs alone too."""
    if isinstance(error, FedloomError):
        return error
    if isinstance(error, IsADirectoryError | NotADirectoryError | FileExistsError | PermissionError):
        return RunError(f"'{error.filename or path}' cannot be used ({error.strerror}); {mend(path)}")
    return RunError(f"the run failed with {type(error).__name__}: {error} ({origin(error)})")


def _prepare(folder: Path) -> None:
    """Make the folder; `ConfigError` when it cannot be written."""
    try:
        (folder / report.RUNS).mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(13, os.strerror(13))
    except OSError as error:
        raise ConfigError(
            f"out is '{folder}', which cannot be written: {error.strerror}; name another folder"
        ) from error


class Results:
    """The runs that are there so far, and the files about them.

    done: key -> run. failed: key -> why there is none. held: keys of runs that another process was at work on.
    """

    def __init__(self, planned: Planned):
        self.planned = planned
        self.done: dict[str, Run] = {}
        self.failed: dict[str, FedloomError] = {}
        self.held: set[str] = set()
        self.look()

    def look(self) -> None:
        """Open every run that is done, whichever process made it."""
        for key in self.planned.runs:
            if key not in self.done and self.planned.state(key) == "done":
                try:
                    self.done[key] = self.planned.open(key)
                    self.failed.pop(key, None)
                except FedloomError as error:
                    self.failed[key] = error

    def place(self, key: str) -> str:
        """The next run in words."""
        label, seed = self.planned.runs[key]
        number = len(self.done) + len(self.failed) + 1
        return f"run {number} of {len(self.planned.runs)}: {label}, seed {seed}"

    @property
    def runs(self) -> dict[str, dict[int, Run]]:
        """Label -> seed -> finished run."""
        keyed = self.planned.keys.items()
        return {label: {s: self.done[k] for s, k in keys.items() if k in self.done} for label, keys in keyed}

    def content(self) -> dict[str, Any]:
        """What compare.json holds."""
        planned, runs = self.planned, self.runs
        summaries = {label: {seed: run.summary for seed, run in found.items()} for label, found in runs.items()}
        numbers = compared(summaries, planned.reference)
        first = next((run.summary for run in self.done.values()), {})
        return {
            "title": planned.title,
            "recipe": planned.recipe,
            "settings": dict(planned.settings),
            "dataset": first.get("dataset"),
            "scenario": first.get("scenario"),
            "reference": planned.reference,
            "metric": planned.metric,
            "seeds": list(planned.seeds),
            "complete": len(self.done) == len(planned.runs),
            "methods": {label: {**self._entry(label), **numbers[label]} for label in planned.methods},
            "budget": budget(summaries, planned.reference),
        }

    def _entry(self, label: str) -> dict[str, Any]:
        keys = self.planned.keys[label]
        reasons = {key: str(error) for key, error in self.failed.items()}
        missing = {str(seed): reasons.get(key) for seed, key in keys.items() if key not in self.done}
        begun = [seed for seed, key in keys.items() if key not in self.done and self.planned.state(key) in UNFINISHED]
        runs = {str(seed): key for seed, key in keys.items()}
        found = {"method": dict(self.planned.methods[label]), "runs": runs, "missing": missing, "begun": begun}
        return {**found, "personal": any(run.personal for run in self.planned.checked[label].values())}

    def write(self) -> None:
        """Write compare.json, compare.md and compare.csv, each whole or not at all; with what others have done."""
        from fedloom.engine.files import write_bytes, write_json

        self.look()
        folder, content = self.planned.folder, self.content()
        write_json(folder / report.JSON, content)
        write_bytes(folder / report.MARKDOWN, report.markdown(content).encode())
        write_bytes(folder / report.CSV, report.csv_text(content).encode())

    def comparison(self) -> Comparison:
        """What is there at the end. Raises the error of the only kind there was when no run ended well, and
        `ConfigError` when all did and none has the metric.
        """
        if not self.done:
            key, first = next(iter(self.failed.items()))
            label, seed = self.planned.runs[key]
            kind = ConfigError if all(e.exit_code == ConfigError.exit_code for e in self.failed.values()) else RunError
            raise kind(f"no run ended well; {label}, seed {seed}: {first}") from first
        named = {key: place for key, place in self.planned.runs.items() if key in self.failed}
        failed = {place: str(self.failed[key]) for key, place in named.items()}
        content = self.content()
        if not failed:
            self._check_metric(content)
        return Comparison(self.planned.folder, content, self.runs, failed)

    def _check_metric(self, content: Mapping[str, Any]) -> None:
        known = list(dict.fromkeys(key for entry in content["methods"].values() for key in entry["metrics"]))
        if (metric := self.planned.metric) not in known:
            raise ConfigError(
                f"no run of the comparison has the metric {metric}; its runs are done, so call it again with one of "
                f"{', '.join(key for key in known if key in RESULTS or key.startswith(DOMAIN))}"
            )
