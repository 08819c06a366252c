"""Numbers of several methods over seeds: means with intervals, paired tests against one of them, ranks, the budget."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from fedloom.evaluate.statistics import compare_paired, holm, mean_interval, mean_ranks

Summary = Mapping[str, Any]
Values = dict[int, float]  # seed -> value

RESULTS = (
    "final_accuracy",
    "average_incremental_accuracy",
    "current_task_accuracy",
    "forgetting",
    "backward_transfer",
    "accuracy_within_task",
    "measures.accuracy_norm",
    "measures.perplexity",
    "measures.alignment",
    "measures.matched_cosine",
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
    "train_flops",
    "wall_seconds",
    "train_seconds",
    "own_peak_rss_bytes",
)
TROUBLES = ("failed_clients", "rejected_updates", "degraded_rounds")
MEASURES = (*RESULTS, *COSTS, *TROUBLES)
DOMAIN = "domain_accuracy["  # what the key of a domain's accuracy begins with: domain_accuracy[NAME]
LOWER = ("forgetting", "domain_std", "personal_domain_std", "measures.perplexity")  # results that are better when lower
BACKWARD = 2  # operations of a backward pass in those of a forward pass
FEW, ALPHA = 3, 0.05  # seeds that a test needs to count, and the level at which it does
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

    They are `MEASURES` (`measures.NAME`: what the network measures itself) and, before the mean over domains, the
    global view's accuracy on each, `domain_accuracy[NAME]`.
    Of a run whose one client pools the data of all, traffic and accuracies per client mean nothing and are left out
    too. Peak memory counts only as `own_peak_rss_bytes`, of a run that had a process to itself: `peak_rss_bytes` is
    that of a process, which earlier runs may have raised.
    """
    derived = {
        "current_task_accuracy": current_task_accuracy(summary.get("accuracy_matrix")),
        "train_flops": train_flops(summary),
    }
    known = {**summary, **derived, **_per_domain(summary), **_own(summary)}
    keys = [key for key in _keys([summary]) if not (pooled(summary) and key in OF_FEDERATIONS)]
    return {key: known[key] for key in keys if _is_number(known.get(key))}


def pooled(summary: Summary) -> bool:
    """Whether the run's method sees the data of all clients as those of one."""
    return summary.get("data_view") not in (None, "stream")


def train_flops(summary: Summary) -> float | None:
    """Floating-point operations of training, an estimate: sample visits x operations of a forward pass x 3.

    A backward pass counts as `BACKWARD` forward passes, also where a part of the network is frozen; passes without
    training are left out, and a network that changes its size counts as the one that is deployed.
    """
    visits, forward = summary.get("sample_visits"), summary.get("flops_per_example")
    return visits * forward * (1 + BACKWARD) if _is_number(visits) and _is_number(forward) else None


def lower_is_better(key: str) -> bool:
    """Whether lower values of a result are better."""
    return key in LOWER


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
    """Per label `metrics` {key: {mean, std, low, high, n, values}}, `tests` {key: {difference, p_t, p_holm, p_wilcoxon,
    better, n}}, `ranks` {key: mean rank} and `pooled`, whether its data are pooled.

    summaries: label -> seed -> summary; seeds may be missing. Intervals are of 95 %, Student-t over seeds. Tests are
    two-sided, paired over the seeds that a label and the reference share, difference = label - reference; the
    reference has none. p_holm is p_t corrected for all labels that are tested by the same result (see `holm`). better:
    the difference is to the good side, p_holm below `ALPHA`, and there are `FEW` seeds or more. A rank is 1 for the
    best; its mean is over the seeds on which every label that has the result has it; labels whose data are pooled are
    references and have none. Costs are neither tested nor ranked.
    """
    values = {label: _by_measure(runs) for label, runs in summaries.items()}
    against = values.get(reference, {})
    tests = {label: {} if label == reference else _tests(mine, against) for label, mine in values.items()}
    _correct(tests)
    together = {label: any(map(pooled, runs.values())) for label, runs in summaries.items()}
    ranks = _ranks({label: mine for label, mine in values.items() if not together[label]})
    return {
        label: {
            "metrics": {key: _interval(found) for key, found in mine.items()},
            "tests": tests[label],
            "ranks": ranks.get(label, {}),
            "pooled": together[label],
        }
        for label, mine in values.items()
    }


def _correct(tests: Mapping[str, Mapping[str, dict[str, Any]]]) -> None:
    """Add `p_holm` and `better` to tests, label -> key -> test: one correction per key, over the labels."""
    for key in {key: None for found in tests.values() for key in found}:
        family = [found[key] for found in tests.values() if key in found]
        known = [test for test in family if test["p_t"] is not None]
        for test in family:
            test |= {"p_holm": None, "better": False}
        for test, p in zip(known, holm([test["p_t"] for test in known]), strict=True):
            good = test["difference"] < 0 if lower_is_better(key) else test["difference"] > 0
            test |= {"p_holm": p, "better": good and p < ALPHA and test["n"] >= FEW}


def _ranks(values: Mapping[str, Mapping[str, Values]]) -> dict[str, dict[str, float]]:
    """Label -> key -> mean rank over the seeds that are there for every label with that result."""
    found: dict[str, dict[str, float]] = {label: {} for label in values}
    for key in dict.fromkeys(key for mine in values.values() for key in mine if _is_result(key)):
        having = {label: mine[key] for label, mine in values.items() if key in mine}
        seeds = sorted(set.intersection(*(set(runs) for runs in having.values())))
        if len(having) > 1 and seeds:
            rows = [[runs[seed] for seed in seeds] for runs in having.values()]
            for label, rank in zip(having, mean_ranks(rows, lower=lower_is_better(key)), strict=True):
                found[label][key] = rank
    return found


def _is_result(key: str) -> bool:
    return key in RESULTS or key.startswith(DOMAIN)


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


def _own(summary: Summary) -> dict[str, Any]:
    found = summary.get("measures")
    return {f"measures.{name}": value for name, value in found.items()} if isinstance(found, Mapping) else {}


def _interval(values: Values) -> dict[str, Any]:
    found = mean_interval(list(values.values()))
    kept = {key: asdict(found)[key] for key in ("mean", "std", "low", "high", "n")}
    return {**kept, "values": _texts(values)}


def _tests(mine: Mapping[str, Values], against: Mapping[str, Values]) -> dict[str, Any]:
    tests = {}
    for key in filter(_is_result, mine):
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
