"""Numbers of several methods over seeds: means with intervals, paired tests against one of them, the budget."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from fedloom.evaluate.statistics import compare_paired, mean_interval

Summary = Mapping[str, Any]
Values = dict[int, float]  # seed -> value

RESULTS = (
    "final_accuracy",
    "average_incremental_accuracy",
    "current_task_accuracy",
    "forgetting",
    "backward_transfer",
    "accuracy_within_task",
    "per_client_accuracy_mean",
    "per_client_accuracy_worst10",
    "domain_mean",
    "domain_std",
    "domain_worst",
    "personal_domain_mean",
    "personal_domain_std",
    "personal_domain_worst",
)
COSTS = (
    "bytes_up",
    "bytes_down",
    "sample_visits",
    "pass_visits",
    "parameters",
    "active_parameters",
    "flops_per_example",
    "wall_seconds",
    "train_seconds",
)
TROUBLES = ("failed_clients", "rejected_updates", "degraded_rounds")
MEASURES = (*RESULTS, *COSTS, *TROUBLES)
DOMAIN = "domain_accuracy["  # what the key of a domain's accuracy begins with: domain_accuracy[NAME]
OF_STAGES = ("current_task_accuracy", "forgetting", "backward_transfer")  # what one stage alone does not have
OF_DOMAINS = tuple(key for key in RESULTS if "domain" in key)
OF_FEDERATIONS = (
    "bytes_up",
    "bytes_down",
    "per_client_accuracy_mean",
    "per_client_accuracy_worst10",
    "personal_domain_mean",
    "personal_domain_std",
    "personal_domain_worst",
)


def measures(summary: Summary) -> dict[str, float]:
    """The numbers of a run's summary that are compared; what it lacks is left out.

    They are `MEASURES` and, before the mean over domains, the global view's accuracy on each, `domain_accuracy[NAME]`.
    Of a run whose one client pools the data of all, traffic and accuracies per client mean nothing and are left out
    too. Peak memory is not compared: it is that of the process, which earlier runs have raised.
    """
    current = current_task_accuracy(summary.get("accuracy_matrix"))
    known = {**summary, "current_task_accuracy": current, **_per_domain(summary)}
    keys = [key for key in _keys([summary]) if not (pooled(summary) and key in OF_FEDERATIONS)]
    return {key: known[key] for key in keys if _is_number(known.get(key))}


def pooled(summary: Summary) -> bool:
    """Whether the run's method sees the data of all clients as those of one."""
    return summary.get("data_view") not in (None, "stream")


def current_task_accuracy(matrix: Any) -> float | None:
    """Mean over tasks of the accuracy after the stage in which the task arrived; None for a single stage.

    matrix: R[t][j] as in the summary, None where task j has not arrived by stage t. In a synchronous stream this is
    the mean of the diagonal.
    """
    if not isinstance(matrix, list) or len(matrix) < 2:
        return None
    arrived = [next((value for value in column if value is not None), None) for column in zip(*matrix, strict=True)]
    known = [value for value in arrived if value is not None]
    return math.fsum(known) / len(known) if known else None


def compared(summaries: Mapping[str, Mapping[int, Summary]], reference: str) -> dict[str, dict[str, Any]]:
    """Per label `metrics` {key: {mean, std, low, high, n, values}}, `tests` {key: {difference, p_t, p_wilcoxon, n}} and
    `pooled`, whether its data are pooled.

    summaries: label -> seed -> summary; seeds may be missing. Intervals are of 95 %, Student-t over seeds. Tests are
    two-sided, paired over the seeds that a label and the reference share, difference = label - reference; the
    reference has none. Results are tested, costs are not.
    """
    values = {label: _by_measure(runs) for label, runs in summaries.items()}
    against = values.get(reference, {})
    return {
        label: {
            "metrics": {key: _interval(found) for key, found in mine.items()},
            "tests": {} if label == reference else _tests(mine, against),
            "pooled": any(map(pooled, summaries[label].values())),
        }
        for label, mine in values.items()
    }


def budget(summaries: Mapping[str, Mapping[int, Summary]], reference: str) -> dict[str, Any]:
    """Sample visits: `equal` (None when fewer than two labels share a seed), `visits` label -> seed -> number, and
    `share` label -> visits as a fraction of the reference's over the seeds that both have.
    """
    visits = {label: _by_measure(runs).get("sample_visits", {}) for label, runs in summaries.items()}
    per_seed: dict[int, list[float]] = {}
    for found in visits.values():
        for seed, value in found.items():
            per_seed.setdefault(seed, []).append(value)
    shared = [values for values in per_seed.values() if len(values) > 1]
    base = visits.get(reference, {})
    return {
        "equal": all(len(set(values)) == 1 for values in shared) if shared else None,
        "visits": {label: _texts(found) for label, found in visits.items()},
        "share": {label: _share(found, base) for label, found in visits.items()},
    }


def _by_measure(runs: Mapping[int, Summary]) -> dict[str, Values]:
    each = {seed: measures(summary) for seed, summary in sorted(runs.items())}
    keys = _keys(runs.values())
    named = ((key, {seed: found[key] for seed, found in each.items() if key in found}) for key in keys)
    return {key: values for key, values in named if values}


def _keys(summaries: Iterable[Summary]) -> list[str]:
    """`MEASURES` with those of the summaries' domains before the mean over domains."""
    place = MEASURES.index("domain_mean")
    return [*MEASURES[:place], *{key: None for found in summaries for key in _per_domain(found)}, *MEASURES[place:]]


def _per_domain(summary: Summary) -> dict[str, Any]:
    found = summary.get("domain_accuracy")
    return {f"{DOMAIN}{name}]": value for name, value in found.items()} if isinstance(found, Mapping) else {}


def _interval(values: Values) -> dict[str, Any]:
    found = mean_interval(list(values.values()))
    kept = {key: asdict(found)[key] for key in ("mean", "std", "low", "high", "n")}
    return {**kept, "values": _texts(values)}


def _tests(mine: Mapping[str, Values], against: Mapping[str, Values]) -> dict[str, Any]:
    tests = {}
    for key in (key for key in mine if key in RESULTS or key.startswith(DOMAIN)):
        a, b = mine[key], against.get(key, {})
        if shared := sorted(a.keys() & b.keys()):
            found = compare_paired([a[seed] for seed in shared], [b[seed] for seed in shared])
            tests[key] = {k: getattr(found, k) for k in ("difference", "p_t", "p_wilcoxon", "n")}
    return tests


def _share(mine: Values, base: Values) -> float | None:
    shared = mine.keys() & base.keys()
    total = math.fsum(base[seed] for seed in shared)
    return math.fsum(mine[seed] for seed in shared) / total if total else None


def _texts(values: Values) -> dict[str, float]:
    """Seeds as text, for JSON has no other keys."""
    return {str(seed): value for seed, value in values.items()}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
