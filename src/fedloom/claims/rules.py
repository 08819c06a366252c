"""Rules that judge a claim: each looks at numbers over seeds and says, comparison by comparison, what holds.

A comparison holds where the order is that of the claim and the 95 % Student-t intervals are apart. A claim is held
where all of its comparisons hold, over at least `FEW` seeds.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

from fedloom.claims.values import short
from fedloom.core.errors import ConfigError, pick
from fedloom.evaluate.comparison import FEW
from fedloom.evaluate.statistics import Interval, mean_interval

HELD, NOT_HELD = "held", "not held"
NOT_TESTED, NOT_TESTABLE, TOO_FEW = "not tested", "not testable here", "too few seeds"

Values = Mapping[int, float]  # seed -> value


@dataclass(frozen=True)
class Found:
    """Numbers of a trial.

    values: setting -> label -> metric -> seed -> value. curves: setting -> label -> seed -> accuracy after each round,
    where it was measured.
    """

    values: Mapping[str, Mapping[str, Mapping[str, Values]]]
    curves: Mapping[str, Mapping[str, Mapping[int, Sequence[float]]]] = field(default_factory=dict)

    def of(self, setting: str, label: str, metric: str) -> Values:
        """Values over seeds. Raises `ConfigError` where there are none."""
        found = self.values.get(setting, {}).get(label, {}).get(metric)
        if not found:
            raise ConfigError(f"no run of '{label}' has the metric {metric}{_in(setting)}; run it with one that it has")
        return found

    def curve(self, setting: str, label: str) -> Mapping[int, Sequence[float]]:
        """Accuracy after each round, over seeds. Raises `ConfigError` where it was not measured in every round."""
        found = self.curves.get(setting, {}).get(label)
        if not found:
            raise ConfigError(f"no run of '{label}' has accuracies per round{_in(setting)}; set evaluate.every to 1")
        return found

    def labels(self, setting: str) -> list[str]:
        """Labels that were run in a setting."""
        return list(self.values[setting])


class Step(NamedTuple):
    """One comparison of a claim, in words, whether it holds, and over how many seeds."""

    text: str
    holds: bool
    seeds: int


class Verdict(NamedTuple):
    """word: one of `HELD`, `NOT_HELD`, `NOT_TESTED`, `NOT_TESTABLE`, `TOO_FEW`. reasons: why, a clause each."""

    word: str
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.word}: {'; '.join(self.reasons)}"


Rule = Callable[..., list[Step]]


def _in(setting: str) -> str:
    return f" ({setting})" if setting else ""


def _told(metric: str, found: Interval) -> str:
    return short(metric, found.mean, found.half_width)


def _order(metric: str, higher: bool, setting: str, a: tuple[str, Values], b: tuple[str, Values]) -> Step:
    """Whether a is above b (or below it) with intervals apart; a, b: label and values."""
    x, y = (mean_interval(list(values.values())) for _, values in (a, b))
    told = f"{a[0]} ({_told(metric, x)}) is {{}} {b[0]} ({_told(metric, y)}){_in(setting)}"
    way, seeds = "above" if higher else "below", min(x.n, y.n)
    if not (operator.gt if higher else operator.lt)(x.mean, y.mean):
        return Step(told.format(f"not {way}"), False, seeds)
    low, high = (x, y) if higher else (y, x)
    apart = low.low is not None and high.high is not None and low.low > high.high
    return Step(told.format(way) + ("" if apart else ", but the intervals overlap"), apart, seeds)


def _against(higher: bool, found: Found, *, metric: str, first: str, others: Iterable[str] = ()) -> list[Step]:
    """First against each of the others, by default all that were run; in every setting."""
    return [
        _order(metric, higher, s, (first, found.of(s, first, metric)), (label, found.of(s, label, metric)))
        for s in found.values
        for label in (others or found.labels(s))
        if label != first
    ]


def _ladder(higher: bool, found: Found, *, metric: str, labels: Sequence[str] = ()) -> list[Step]:
    """Each label against the one before it, by default all in the order of the trial; in every setting."""
    return [
        _order(metric, higher, s, (after, found.of(s, after, metric)), (before, found.of(s, before, metric)))
        for s in found.values
        for before, after in pairwise(labels or found.labels(s))
    ]


def peak(found: Found, *, metric: str, labels: Sequence[str]) -> list[Step]:
    """The best of the labels between the first and the last is above both ends; labels: in the order of the option."""
    steps = []
    for s in found.values:
        known = {label: found.of(s, label, metric) for label in labels}
        best = max(labels[1:-1], key=lambda label: mean_interval(list(known[label].values())).mean)
        steps += [_order(metric, True, s, (best, known[best]), (end, known[end])) for end in (labels[0], labels[-1])]
    return steps


def keeps(found: Found, *, metric: str, first: str, others: Sequence[str], start: str, end: str) -> list[Step]:
    """First keeps a larger share of its value than the others do from the setting `start` to `end`, seed by seed."""

    def share(label: str) -> tuple[str, Values]:
        return f"what {label} keeps", _ratio(metric, *(found.of(s, label, metric) for s in (end, start)))

    return [_order("share", True, f"{start} to {end}", share(first), share(label)) for label in others]


def costs_at_most(found: Found, *, metric: str, first: str, than: str, limit: float) -> list[Step]:
    """First is below `than` by no more than `limit` (a fraction for accuracies): so is the interval's upper end."""
    steps = []
    for s in found.values:
        theirs, own = (found.of(s, label, metric) for label in (than, first))
        loss = mean_interval([theirs[seed] - own[seed] for seed in _shared(theirs, own)])
        holds = loss.high is not None and loss.high <= limit
        told = f"{first} loses {_told(metric, loss)} against {than}{_in(s)}, at most {short(metric, limit)} is claimed"
        steps.append(Step(told, holds, loss.n))
    return steps


def at_most_times(found: Found, *, metric: str, first: str, than: str, times: float) -> list[Step]:
    """First has at most `times` the value of `than`, seed by seed: so has the interval's upper end."""
    steps = []
    for s in found.values:
        ratio = mean_interval(list(_ratio(metric, *(found.of(s, label, metric) for label in (first, than))).values()))
        holds = ratio.high is not None and ratio.high <= times
        told = f"{first} has {_told('ratio', ratio)} times the {metric} of {than}{_in(s)}, at most {times} is claimed"
        steps.append(Step(told, holds, ratio.n))
    return steps


def sooner(found: Found, *, first: str, other: str) -> list[Step]:
    """First needs fewer rounds than `other` to reach what `other` has after its last round, seed by seed."""
    steps = []
    for s in found.values:
        curves, rivals = found.curve(s, first), found.curve(s, other)
        shared, ratios = _shared(rivals, curves), []
        for seed in shared:
            own, rounds = (_rounds_to(rivals[seed][-1], curve[seed]) for curve in (rivals, curves))
            if rounds is None or own is None:
                told = f"{first} never reaches the accuracy of {other} with seed {seed}{_in(s)}"
                steps.append(Step(told, False, len(shared)))
            else:
                ratios.append(own / rounds)
        if len(ratios) == len(shared):
            ratio = mean_interval(ratios)
            told = f"{first} reaches the accuracy of {other} {_told('ratio', ratio)} times sooner{_in(s)}"
            holds = ratio.low is not None and ratio.low > 1
            steps.append(Step(told if holds else f"{told}, and the interval holds 1 or less", holds, ratio.n))
    return steps


def _rounds_to(target: float, curve: Sequence[float]) -> int | None:
    """Rounds until the accuracy is reached for the first time."""
    return next((k + 1 for k, value in enumerate(curve) if value >= target), None)


def _shared(a: Mapping[int, Any], b: Mapping[int, Any]) -> list[int]:
    """Seeds of both. Raises `ConfigError` where there are none."""
    if found := sorted(a.keys() & b.keys()):
        return found
    raise ConfigError("two labels of the claim have no seed in common; run both with the same seeds")


def _ratio(metric: str, a: Values, b: Values) -> Values:
    shared = _shared(a, b)
    if zero := [seed for seed in shared if not b[seed]]:
        raise ConfigError(f"{metric} is 0 with seed {zero[0]}, so that nothing is a share of it; run longer")
    return {seed: a[seed] / b[seed] for seed in shared}


RULES: Mapping[str, Rule] = {
    "above": partial(_against, True),
    "below": partial(_against, False),
    "rises": partial(_ladder, True),
    "falls": partial(_ladder, False),
    "peak": peak,
    "keeps": keeps,
    "costs_at_most": costs_at_most,
    "at_most_times": at_most_times,
    "sooner": sooner,
}


def check_arguments(check: Mapping[str, Any]) -> None:
    """Raises `ConfigError` for a check that names no rule, or arguments that the rule does not take."""
    rule = pick("rule", str(check.get("rule")), RULES)
    try:
        inspect.signature(rule).bind(None, **_arguments(check))
    except TypeError as error:
        raise ConfigError(f"rule {check['rule']}: {error}") from None


def _arguments(check: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in check.items() if key != "rule"}


def steps(checks: Iterable[Mapping[str, Any]], found: Found) -> list[Step]:
    """Every comparison of a claim."""
    return [step for check in checks for step in RULES[check["rule"]](found, **_arguments(check))]


def judged(checks: Iterable[Mapping[str, Any]], found: Found, seeds: int) -> Verdict:
    """The verdict of a claim whose rivals and runs are all there. seeds: how many were run.

    Raises `ConfigError` where nothing was compared.
    """
    if seeds < FEW:
        return Verdict(TOO_FEW, (f"{seeds} where a verdict needs {FEW}",))
    made = steps(checks, found)
    if not made:
        raise ConfigError("the claim compares nothing; give it checks, and two labels or more")
    if (least := min(made, key=lambda step: step.seeds)).seeds < FEW:
        return Verdict(TOO_FEW, (f"{least.text}, over {least.seeds} where a verdict needs {FEW}",))
    failed = tuple(step.text for step in made if not step.holds)
    return Verdict(NOT_HELD, failed) if failed else Verdict(HELD, tuple(step.text for step in made))
