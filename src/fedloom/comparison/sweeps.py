"""A sweep: the same methods and seeds in several settings, each a comparison of its own over one folder of runs.

`<out>/runs/<key>/` holds the runs of all settings, `<out>/<setting>/` the comparison of each, and `sweep.json` beside
them (its content: `fedloom.report.sweep`) and its tables the metric of every method in every setting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedloom.api import configure
from fedloom.comparison.jobs import hands
from fedloom.comparison.planned import Planned, Tell, out_folder, plan, refusal
from fedloom.comparison.results import Comparison, Results, no_run_ended
from fedloom.comparison.settings import settings
from fedloom.comparison.studies import Study, over, slugs
from fedloom.comparison.work import Board, Watch, make
from fedloom.core.errors import ConfigError, FedloomError
from fedloom.evaluate.statistics import mean_ranks
from fedloom.report import sweep as report
from fedloom.report import sweep_picture
from fedloom.report.columns import p_value
from fedloom.report.comparison import RUNS
from fedloom.report.drawn import attempted


@dataclass(frozen=True)
class Sweep:
    """What a sweep left.

    folder: where everything is. summary: the content of sweep.json. comparisons: setting -> its comparison, those of
    which some run has ended. failed: (setting, label, seed) -> why the run is missing.
    """

    folder: Path
    summary: Mapping[str, Any]
    comparisons: Mapping[str, Comparison]
    failed: Mapping[tuple[str, str, int], str]

    def __repr__(self) -> str:
        failed = f", {len(self.failed)} runs failed" if self.failed else ""
        settings = ", ".join(self.summary["settings"])
        return f"Sweep({', '.join(self.summary['methods'])} over {settings}{failed}, '{self.folder}')"

    def table(self) -> list[dict[str, Any]]:
        """The table as numbers, one mapping per setting and method; see `fedloom.report.sweep.rows`."""
        return report.rows(self.summary)

    @property
    def markdown(self) -> str:
        """The table with its notes, as in sweep.md."""
        return report.markdown(self.summary)

    def _repr_markdown_(self) -> str:
        return self.markdown


@dataclass(frozen=True)
class PlannedSweep:
    """A sweep whose configurations are checked.

    plans: setting -> its comparison. settings: setting -> dotted key -> value of what it sets. common: the same of what
    is set over the recipe in all of them.
    """

    folder: Path
    plans: Mapping[str, Planned]
    settings: Mapping[str, Mapping[str, Any]]
    common: Mapping[str, Any]


def plan_sweep(study: Study, out: Any, tell: Tell | None = None) -> PlannedSweep:
    """Check everything that a sweep is asked for; raises what `plan` does, with the setting that it is about."""
    if not study.settings:
        raise ConfigError(
            "a sweep needs settings: name them under settings or grid of a file, or give --grid key=value,value"
        )
    folder = out_folder(out, _default(study))
    names = slugs(study.settings)
    plans = {}
    for label, layer in study.settings.items():
        try:
            plans[label] = _planned(study, folder / names[label], folder / RUNS, label, layer, tell)
        except FedloomError as error:
            if not plans and refusal(lambda: _planned(study, folder, folder / RUNS, "", {}, None)) == str(error):
                raise
            error.args = (f"setting {label}: {error}",)
            raise
    sets = {label: settings(None, layer) for label, layer in study.settings.items()}
    in_all = set.intersection(*map(set, sets.values()))
    common = {key: value for key, value in settings(study.recipe, study.given).items() if key not in in_all}
    return PlannedSweep(folder, plans, sets, common)


def _planned(
    study: Study, folder: Path, store: Path, label: str, layer: Mapping[str, Any], tell: Tell | None
) -> Planned:
    named = {"out": folder, "reference": study.reference, "metric": study.metric, "setting": label, "store": store}
    return plan(study.recipe, study.methods, study.seeds, **named, tell=tell, **over(study.given, layer))


def _default(study: Study) -> Path:
    given = {key: value for key, value in study.given.items() if key.partition(".")[0] != "method"}
    return Path("runs") / configure(study.recipe, **given)[0] / "sweep"


def carry_out_sweep(planned: PlannedSweep, watch: Watch, tell: Tell, jobs: int | str = 1) -> Sweep:
    """Make the runs of a sweep that are missing, and write all files after each; see `fedloom.comparison.carry_out`.

    Raises when no run ended well.
    """

    def write(board: Board) -> None:
        from fedloom.engine.files import write_bytes, write_json

        found = content(planned, board.results)
        write_json(planned.folder / report.JSON, found)
        for name, form in report.FORMS.items():
            write_bytes(planned.folder / name, form(found).encode())

    plans = list(planned.plans.values())
    board = make(plans, hands(jobs, plans, watch, tell), tell, write)
    ended = {label: found for label, found in zip(planned.plans, board.results, strict=True) if found.done}
    summary = content(planned, board.results)
    if trouble := attempted(sweep_picture.save, summary, planned.folder / sweep_picture.PICTURE):
        tell(trouble)
    if not ended:
        raise no_run_ended(board.results)
    failed = {
        (label, *found.planned.runs[key]): str(error)
        for label, found in zip(planned.plans, board.results, strict=True)
        for key, error in found.failed.items()
    }
    comparisons = {label: found.comparison() for label, found in ended.items()}
    return Sweep(planned.folder, summary, comparisons, failed)


def content(planned: PlannedSweep, results: Sequence[Results]) -> dict[str, Any]:
    """What sweep.json holds."""
    first = results[0].planned
    pairs = list(zip(planned.plans, results, strict=True))
    lower = bool(results[0].written["lower_is_better"])
    together = {name for one in results for name, entry in one.written["methods"].items() if entry["pooled"]}
    ranked = [name for name in first.methods if name not in together]
    found = {label: _setting(planned, label, one, ranked, lower) for label, one in pairs}
    many = f"{len(first.methods)} methods" if len(first.methods) > 1 else next(iter(first.methods))
    return {
        "title": f"Sweep of {many} over {len(found)} setting{'s' * (len(found) > 1)}",
        "recipe": first.recipe,
        "set": dict(planned.common),
        "reference": first.reference,
        "metric": first.metric,
        "lower_is_better": lower,
        "seeds": list(first.seeds),
        "complete": all(one["complete"] for one in found.values()),
        "methods": list(first.methods),
        "pooled": [name for name in first.methods if name in together],
        "settings": found,
        "mean_rank": _mean_rank(ranked, list(found.values()), lower),
    }


def _setting(planned: PlannedSweep, label: str, results: Results, ranked: Sequence[str], lower: bool) -> dict[str, Any]:
    whole, metric = results.written, results.planned.metric
    having = {name: entry for name, entry in whole["methods"].items() if metric in entry["metrics"]}
    means = {name: having[name]["metrics"][metric]["mean"] for name in ranked if name in having}
    best = (min if lower else max)(means.values()) if len(means) > 1 else None
    return {
        "folder": results.planned.folder.name,
        "set": planned.settings[label],
        "dataset": whole["dataset"],
        "scenario": whole["scenario"],
        "complete": whole["complete"],
        "missing": len(results.planned.runs) - len(results.done),
        "results": {name: _result(entry, metric) for name, entry in having.items()},
        "best": [name for name, mean in means.items() if mean == best],
    }


def _result(entry: Mapping[str, Any], metric: str) -> dict[str, Any]:
    test = entry["tests"].get(metric, {})
    return {
        **{key: entry["metrics"][metric][key] for key in ("mean", "std", "low", "high", "n")},
        "difference": test.get("difference"),
        **{kind: p_value(entry, metric, kind) for kind in ("p_t", "p_holm")},
        "better": bool(test.get("better")),
        "rank": entry["ranks"].get(metric),
    }


def _mean_rank(methods: Sequence[str], found: Sequence[Mapping[str, Any]], lower: bool) -> dict[str, float]:
    """Method -> mean of its rank over the settings that have all of the methods."""
    whole = [one["results"] for one in found if set(methods) <= one["results"].keys()]
    if not whole or len(methods) < 2:
        return {}
    means = [[one[method]["mean"] for one in whole] for method in methods]
    return dict(zip(methods, mean_ranks(means, lower=lower), strict=True))
