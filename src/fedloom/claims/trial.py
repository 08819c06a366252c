"""Trying a claim: the runs that its entry names at a scale, made once and shared by all claims of a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedloom.claims.entries import Claim, Trial
from fedloom.claims.rules import NOT_TESTABLE, NOT_TESTED, TOO_FEW, Found, Verdict, judged, steps
from fedloom.comparison import entries
from fedloom.comparison.planned import plan
from fedloom.comparison.studies import slugs
from fedloom.config import Config, resolve
from fedloom.config.layers import merge, nested
from fedloom.evaluate.comparison import FEW
from fedloom.report.comparison import RUNS

if TYPE_CHECKING:
    from fedloom.comparison import Comparison
    from fedloom.comparison.planned import Planned, Tell

ROOT = Path("runs") / "reproduce"


@dataclass(frozen=True)
class Outcome:
    """A claim that was tried. found: its numbers. folders: where the runs are. failed: what went wrong, run by run."""

    claim: Claim
    scale: str
    verdict: Verdict
    found: Found = field(default_factory=lambda: Found({}))
    folders: tuple[Path, ...] = ()
    failed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Prepared:
    """A claim whose runs are checked to the last word; nothing has been run.

    plans: setting -> comparison; empty where the claim needs what is not here.
    """

    claim: Claim
    scale: str
    plans: Mapping[str, Planned]

    @property
    def trial(self) -> Trial:
        """What is run."""
        return self.claim.scales[self.scale]

    def carry_out(self, watch: Any, tell: Tell, jobs: int | str = 1) -> Outcome:
        """Make the runs that are missing, and judge. watch, tell, jobs: as in `fedloom.comparison.carry_out`."""
        from fedloom.comparison import carry_out

        made = {}
        for setting, planned in self.plans.items():
            tell(f"{self.claim.id}{f', {setting}' if setting else ''}: {planned.recipe}")
            made[setting] = carry_out(planned, watch, tell, jobs)
        found = Found(
            {setting: _values(comparison.summary) for setting, comparison in made.items()},
            {setting: _curves(comparison) for setting, comparison in made.items()},
        )
        failed = tuple(
            f"{label}, seed {seed}: {reason}" for one in made.values() for (label, seed), reason in one.failed.items()
        )
        folders = tuple(dict.fromkeys(planned.folder for planned in self.plans.values()))
        return Outcome(self.claim, self.scale, self.verdict(found, len(failed)), found, folders, failed)

    def verdict(self, found: Found, failed: int) -> Verdict:
        """What the numbers say. failed: runs that are not there."""
        claim, trial = self.claim, self.trial
        needs = (f"it needs {trial.needs}",) if trial.needs else ()
        if claim.missing:
            built = () if failed or needs else tuple(step.text for step in steps(claim.checks, found))
            return Verdict(NOT_TESTED, (_rivals(claim), *needs, *built))
        if needs:
            return Verdict(NOT_TESTABLE, needs)
        if failed:
            total = sum(len(planned.runs) for planned in self.plans.values())
            return Verdict(NOT_TESTED, (f"{failed} of {total} runs failed",))
        if len(trial.seeds) < FEW:
            return Verdict(TOO_FEW, (f"the scale {self.scale} only shows that the trial runs",))
        return judged(claim.checks, found, min(len(planned.seeds) for planned in self.plans.values()))


def _rivals(claim: Claim) -> str:
    many = len(claim.missing) > 1
    return f"rival{'s' if many else ''} {' and '.join(claim.missing)} missing"


def prepare(
    claim: Claim,
    scale: str,
    *,
    seeds: Any = None,
    out: str | Path | None = None,
    tell: Tell | None = None,
    layer: Mapping[str, Any] | None = None,
) -> Prepared:
    """Check every run of a claim at a scale.

    seeds: instead of those of the entry. out: folder of the runs of every recipe, by default `runs/reproduce/<recipe>`;
    the comparison of every setting is written to a folder of its own below it.
    layer: sections of the configuration that go over those of the entry. Raises `ConfigError` or `DataError`.
    """
    given = dict(layer or {})
    if stray := {key: value for key, value in given.items() if key not in Config.model_fields}:
        resolve(stray)  # which refuses them; they could have the name of an argument of `plan`
    trial = claim.scales[scale]
    if trial.needs:
        return Prepared(claim, scale, {})
    plans = {}
    places = slugs(f"{claim.id}-{scale}-{name}" for name in trial.settings).values()
    for (name, setting), place in zip(trial.settings.items(), places, strict=True):
        recipe = setting.recipe or trial.recipe
        folder = ROOT / str(recipe) if out is None else Path(out)
        below = merge(nested(dict(trial.set)), nested(dict(setting.set)))
        tree = {"data": None, "model": None, "engine": None, **merge(below, given)}
        wanted = trial.seeds if seeds is None else seeds
        where = {"out": folder / place, "store": folder / RUNS}
        plans[name] = plan(recipe, sections(trial), wanted, **where, reference=None, tell=tell, **tree)
    return Prepared(claim, scale, plans)


def sections(trial: Trial) -> dict[str, dict[str, Any]]:
    """Label -> section `method`; a switch's options go over those of the first method."""
    found = {label: entries.section(word) for label, word in trial.methods.items()}
    if trial.switches:
        full = next(iter(found.values()))
        switches = entries.switches(full["name"], trial.switches)
        found |= {name: {**full, **options} for name, options in switches.items()}
    return found


def _values(content: Mapping[str, Any]) -> dict[str, dict[str, dict[int, float]]]:
    """Label -> metric -> seed -> value, from the content of a compare.json."""
    return {
        label: {
            key: {int(seed): value for seed, value in measured["values"].items()}
            for key, measured in entry["metrics"].items()
        }
        for label, entry in content["methods"].items()
    }


def _curves(comparison: Comparison) -> dict[str, dict[int, list[float]]]:
    """Label -> seed -> accuracy after each round, of runs that measured it in every round."""
    found = {}
    for label, runs in comparison.runs.items():
        curves = {
            seed: [row["accuracy"] for row in run.metrics if row.get("accuracy") is not None]
            for seed, run in runs.items()
        }
        kept = {seed: curve for seed, curve in curves.items() if len(curve) == runs[seed].summary["rounds"]}
        if kept:
            found[label] = kept
    return found
