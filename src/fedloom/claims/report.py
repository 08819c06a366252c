"""What is told of a claim that was tried: the paper's numbers beside ours, the protocols, and the verdict."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fedloom.claims.trial import Outcome
from fedloom.claims.values import head, printed, short
from fedloom.evaluate.statistics import mean_interval
from fedloom.report.comparison import aligned
from fedloom.report.units import NONE


def rows(outcome: Outcome) -> list[dict[str, Any]]:
    """One mapping per setting, label and metric: the paper's number, and mean, interval and number of seeds of ours;
    None where there is none. Ours are fractions, the paper's are in its unit.
    """
    paper = {
        (numbers.setting, label, numbers.metric): value
        for numbers in outcome.claim.numbers
        for label, value in numbers.values.items()
    }
    values = outcome.found.values
    ours = [(s, label) for s, labels in values.items() for label in labels]
    places = dict.fromkeys([*ours, *((s, label) for s, label, _ in paper)])
    found = []
    for setting, label in places:
        for metric in outcome.claim.metrics:
            known = values.get(setting, {}).get(label, {}).get(metric)
            measured = asdict(mean_interval(list(known.values()))) if known else {}
            row = {"setting": setting, "method": label, "metric": metric, "paper": paper.get((setting, label, metric))}
            found.append({**row, **{key: measured.get(key) for key in ("mean", "low", "high", "n")}})
    return found


def grid(outcome: Outcome) -> list[list[str]]:
    """The table's cells, a row of heads first. Settings have a column where there are several, the paper has one per
    metric of which it gives a number.
    """
    metrics, made = outcome.claim.metrics, rows(outcome)
    several = len({row["setting"] for row in made}) > 1
    given = {numbers.metric for numbers in outcome.claim.numbers}
    heads = [*(["setting"] if several else []), "method"]
    for metric in metrics:
        heads += [f"{head(metric)}: {whose}" for whose in ("paper", "here") if whose == "here" or metric in given]
    table = [heads]
    for k in range(0, len(made), len(metrics)):
        group = made[k : k + len(metrics)]
        names = [*([group[0]["setting"]] if several else []), group[0]["method"]]
        table.append([*names, *(cell for row in group for cell in _cells(row, row["metric"] in given))])
    return table


def _cells(row: dict[str, Any], paper: bool) -> list[str]:
    metric, mean, high = row["metric"], row["mean"], row["high"]
    here = NONE if mean is None else short(metric, mean, None if high is None else high - mean)
    theirs = NONE if row["paper"] is None else printed(metric, row["paper"])
    return [theirs, here] if paper else [here]


def text(outcome: Outcome) -> str:
    """Everything, for a terminal or a file."""
    claim, trial = outcome.claim, outcome.claim.scales[outcome.scale]
    lines = [f"{claim.id}: {claim.claim}", f"{claim.paper}, {claim.source}", ""]
    if claim.metrics:
        table = grid(outcome)
        named = sum(head in ("setting", "method") for head in table[0])
        lines += [*aligned(table, named), ""]
    lines.append(f"scale {outcome.scale}: {trial.differs}")
    lines += _verdict(outcome)
    lines += [f"folder: {folder}" for folder in outcome.folders]
    return "\n".join(lines)


def _verdict(outcome: Outcome) -> list[str]:
    """One line for one reason, else a line for each."""
    word, reasons = outcome.verdict
    return (
        [f"verdict: {word}: {reasons[0]}"] if len(reasons) == 1 else [f"verdict: {word}", *(f"  {r}" for r in reasons)]
    )


def content(outcome: Outcome) -> dict[str, Any]:
    """The same for `--json`."""
    claim = outcome.claim
    return {
        "id": claim.id,
        "claim": claim.claim,
        "paper": claim.paper,
        "source": claim.source,
        "scale": outcome.scale,
        "differs": claim.scales[outcome.scale].differs,
        "verdict": outcome.verdict.word,
        "reason": "; ".join(outcome.verdict.reasons),
        "numbers": rows(outcome),
        "folders": [str(folder.absolute()) for folder in outcome.folders],
        "failed": list(outcome.failed),
    }
