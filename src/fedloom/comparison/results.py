"""The runs of comparisons that are there so far, and the files about them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedloom.api import Run
from fedloom.comparison.folders import own_memory
from fedloom.comparison.planned import UNFINISHED, Planned
from fedloom.core.errors import ConfigError, FedloomError, RunError
from fedloom.evaluate.comparison import DOMAIN, RESULTS, budget, compared, lower_is_better
from fedloom.report import comparison as report
from fedloom.report import pareto
from fedloom.report.drawn import attempted


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


class Results:
    """The runs of one comparison, and its files.

    done: key -> run. failed: key -> why there is none. written: the content of compare.json as it was last written.
    """

    def __init__(self, planned: Planned):
        self.planned = planned
        self.done: dict[str, Run] = {}
        self.failed: dict[str, FedloomError] = {}
        self.written: dict[str, Any] = {}
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

    @property
    def runs(self) -> dict[str, dict[int, Run]]:
        """Label -> seed -> finished run."""
        keyed = self.planned.keys.items()
        return {label: {s: self.done[k] for s, k in keys.items() if k in self.done} for label, keys in keyed}

    def content(self) -> dict[str, Any]:
        """What compare.json holds."""
        planned = self.planned
        summaries = {
            label: {seed: run.summary | own_memory(run.folder) for seed, run in found.items()}
            for label, found in self.runs.items()
        }
        numbers = compared(summaries, planned.reference)
        first = next((run.summary for run in self.done.values()), {})
        content = {
            "title": planned.title,
            "recipe": planned.recipe,
            "settings": dict(planned.settings),
            "dataset": first.get("dataset"),
            "scenario": first.get("scenario"),
            "reference": planned.reference,
            "metric": planned.metric,
            "lower_is_better": lower_is_better(planned.metric),
            "seeds": list(planned.seeds),
            "complete": len(self.done) == len(planned.runs),
            "runs_folder": report.RUNS if planned.store.parent == planned.folder else f"../{report.RUNS}",
            "methods": {label: {**self._entry(label), **numbers[label]} for label in planned.methods},
            "budget": budget(summaries, planned.reference),
        }
        return {**content, "pareto": pareto.fronts(content)}

    def _entry(self, label: str) -> dict[str, Any]:
        keys = self.planned.keys[label]
        reasons = {key: str(error) for key, error in self.failed.items()}
        missing = {str(seed): reasons.get(key) for seed, key in keys.items() if key not in self.done}
        begun = [seed for seed, key in keys.items() if key not in self.done and self.planned.state(key) in UNFINISHED]
        runs = {str(seed): key for seed, key in keys.items()}
        found = {"method": dict(self.planned.methods[label]), "runs": runs, "missing": missing, "begun": begun}
        return {**found, "personal": any(run.personal for run in self.planned.checked[label].values())}

    def write(self) -> None:
        """Write compare.json and the tables, each whole or not at all; with what others have done."""
        from fedloom.engine.files import write_bytes, write_json

        self.look()
        folder, self.written = self.planned.folder, self.content()
        write_json(folder / report.JSON, self.written)
        for name, form in report.FORMS.items():
            write_bytes(folder / name, form(self.written).encode())

    def draw(self) -> str:
        """Draw the picture; why that failed."""
        return attempted(pareto.save, self.written, self.planned.folder / pareto.PICTURE)

    def comparison(self) -> Comparison:
        """What is there at the end. Raises the error of the only kind there was when no run ended well, and
        `ConfigError` when all did and none has the metric.
        """
        if not self.done:
            raise no_run_ended([self])
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


def no_run_ended(results: Sequence[Results]) -> FedloomError:
    """The error when all runs failed, with the sentence of the first and the kind of all."""
    failures = [(found, key, error) for found in results for key, error in found.failed.items()]
    found, key, first = failures[0]
    label, seed = found.planned.runs[key]
    kind = ConfigError if all(error.exit_code == ConfigError.exit_code for *_, error in failures) else RunError
    error = kind(f"no run ended well; {label}, seed {seed}: {first}")
    error.__cause__ = first
    return error
