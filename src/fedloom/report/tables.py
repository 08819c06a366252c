"""The numbers of a run as tables for a terminal and for Markdown."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from fedloom.report.units import NONE, byte_size, count, decimal, duration, percent, points, short_count, signed_points

if TYPE_CHECKING:
    from rich.table import Table

Summary = Mapping[str, Any]
Format = Callable[[Any], str]

# key of the summary, what people call it, how it is written; grouped as in a paper: results, then costs.
RESULTS: tuple[tuple[str, str, Format], ...] = (
    ("final_accuracy", "Final accuracy", percent),
    ("average_incremental_accuracy", "Average incremental accuracy", percent),
    ("accuracy_within_task", "Final accuracy, task known", percent),
    ("measures.accuracy_norm", "Final accuracy, length-normalised", percent),
    ("measures.perplexity", "Perplexity", decimal),
    ("measures.alignment", "Alignment of pictures and texts", decimal),
    ("measures.matched_cosine", "Cosine of pictures and their texts", decimal),
    ("forgetting", "Forgetting", points),
    ("backward_transfer", "Backward transfer", signed_points),
    ("per_client_accuracy_mean", "Clients, mean", percent),
    ("per_client_accuracy_worst10", "Clients, worst 10 %", percent),
    ("domain_mean", "Domains, mean", percent),
    ("domain_std", "Domains, deviation (ddof 0)", points),
    ("domain_worst", "Domains, worst", percent),
)
OWN_VIEWS: tuple[tuple[str, str, Format], ...] = (
    ("personal_domain_mean", "Domains, own views, mean", percent),
    ("personal_domain_std", "Domains, own views, deviation (ddof 0)", points),
    ("personal_domain_worst", "Domains, own views, worst", percent),
)
COSTS: tuple[tuple[str, str, Format], ...] = (
    ("wall_seconds", "Wall time", duration),
    ("train_seconds", "Training time, all clients", duration),
    ("bytes_up", "Sent by clients", byte_size),
    ("bytes_down", "Sent to clients", byte_size),
    ("sample_visits", "Sample visits", count),
    ("parameters", "Parameters", short_count),
    ("active_parameters", "Parameters used per example", short_count),
    ("flops_per_example", "FLOPs per example", short_count),
    ("peak_rss_bytes", "Peak memory", byte_size),
)
PASSES = ("pass_visits", "Visits without training", count)
TROUBLE: tuple[tuple[str, str, Format], ...] = (
    ("failed_clients", "Failed clients", count),
    ("rejected_updates", "Rejected updates", count),
    ("degraded_rounds", "Degraded rounds", count),
    ("unseen_examples", "Test examples of unseen classes", count),
)

MANY = 12  # domains, from which on the terminal lists the extremes


def lines_of(summary: Summary, keys: tuple[tuple[str, str, Format], ...]) -> list[tuple[str, str]]:
    """(label, value) of the keys that have a value."""
    known = flat(summary)
    return [(label, write(known[key])) for key, label, write in keys if known.get(key) is not None]


def flat(row: Summary) -> dict[str, Any]:
    """A summary, or the row of a stage, with each of the network's own measures under the key "measures.NAME"."""
    found = row.get("measures")
    return {**row, **({f"measures.{name}": v for name, v in found.items()} if isinstance(found, Mapping) else {})}


def results(*summaries: Summary) -> tuple[tuple[str, str, Format], ...]:
    """`RESULTS`, and `OWN_VIEWS` where clients of some run predict otherwise than its global view."""
    return (*RESULTS, *OWN_VIEWS) if any(map(has_own_views, summaries)) else RESULTS


def has_own_views(summary: Summary) -> bool:
    """Whether the clients' own views have other accuracies per domain than the global one."""
    return differ(*(summary.get(key) or {} for key in ("personal_domain_accuracy", "domain_accuracy")))


def differ(own: Mapping[str, Any], common: Mapping[str, Any]) -> bool:
    """Whether two mappings differ, by more than rounding, in a number that both have."""
    pairs = [(own[key], common[key]) for key in own.keys() & common.keys()]
    return any(a is not None and b is not None and not math.isclose(a, b, abs_tol=1e-9) for a, b in pairs)


def domain_lines(summary: Summary) -> list[tuple[str, str]]:
    """(label, value) per domain, of the global view, then of the clients' own where these differ from it.

    Of more than `MANY` domains the three worst and the three best.
    """
    views = [("", summary.get("domain_accuracy"))]
    views += [(", own views", summary["personal_domain_accuracy"])] if has_own_views(summary) else []
    return [
        (f"Domain {name}{whose}", percent(value)) for whose, found in views for name, value in extremes(found or {})
    ]


def extremes(found: Mapping[str, float | None]) -> list[tuple[str, float | None]]:
    """The items in their order; of more than `MANY` the three lowest and the three highest, the lowest first."""
    if len(found) <= MANY:
        return list(found.items())
    known = sorted((item for item in found.items() if item[1] is not None), key=lambda item: item[1] or 0.0)
    return list(known if len(known) <= 6 else known[:3] + known[-3:])


def summary_lines(summary: Summary) -> list[tuple[str, str]]:
    """(label, value) of everything worth a line after a run; what does not apply is left out.

    Passes are listed only where a method makes any, troubles only where something went wrong.
    """
    counted = [(label, write(summary[key])) for key, label, write in (PASSES, *TROUBLE) if summary.get(key)]
    return lines_of(summary, results(summary)) + domain_lines(summary) + lines_of(summary, COSTS) + counted


def warning(summary: Summary) -> str:
    """What makes the numbers worthless: a run in which no round changed the model. Empty where all is well."""
    counts = (summary.get(key) for key in ("rounds", "degraded_rounds"))
    rounds, degraded = (value if isinstance(value, int) else 0 for value in counts)
    if not rounds or degraded < rounds:
        return ""
    causes = {"rejected_updates": "updates were rejected", "failed_clients": "clients failed"}
    told = ", ".join(f"{summary[key]} {what}" for key, what in causes.items() if summary.get(key))
    return (
        f"WARNING: none of the {rounds} rounds changed the model ({told or 'no update could be merged'}); the numbers "
        "are those of the initial model. log.txt has the reasons; a lower learning rate often mends it."
    )


def told_preset(summary: Summary) -> str | None:
    """The preset to be told; of a method of the user's own only one that its module has: `paper` is of every method."""
    preset = summary.get("preset")
    return None if not preset or (preset == "paper" and ":" in str(summary.get("method"))) else str(preset)


def run_title(summary: Summary) -> str:
    """One line that says which run this is: method, preset, data set, seed."""
    method = str(summary.get("method") or "run")
    preset = f" ({known})" if (known := told_preset(summary)) else ""
    dataset = f" on {summary['dataset']}" if summary.get("dataset") else ""
    seed = "" if summary.get("seed") is None else f", seed {summary['seed']}"
    return f"{method}{preset}{dataset}{seed}"


def summary_table(summary: Summary) -> Table:
    """A rich table for the terminal: results, accuracies per domain, costs, and troubles if any."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(run_title(summary)), box=box.SIMPLE_HEAD, show_header=False, title_justify="left")
    table.caption, table.caption_style = escape(warning(summary)) or None, "bold red"
    table.add_column("what")
    table.add_column("value", justify="right", style="bold")
    trouble = [(label, write(summary[key])) for key, label, write in TROUBLE if summary.get(key)]
    for group in (lines_of(summary, results(summary)), domain_lines(summary), lines_of(summary, COSTS), trouble):
        if not group:
            continue
        for label, value in group:
            table.add_row(escape(label), escape(value))
        table.add_section()
    return table


def summary_text(summary: Summary) -> str:
    """The same table as plain text, for logs and pipes."""
    lines = summary_lines(summary)
    left = max((len(label) for label, _ in lines), default=0)
    right = max((len(value) for _, value in lines), default=0)
    told = [run_title(summary), *(f"  {label:<{left}}  {value:>{right}}" for label, value in lines), warning(summary)]
    return "\n".join(line for line in told if line)


def comparison_rows(summaries: Mapping[str, Summary]) -> list[tuple[str, list[str]]]:
    """(label, one value per run) for every number that at least one of the runs has."""
    known = [flat(summary) for summary in summaries.values()]
    return [
        (label, [NONE if (s.get(key) is None) else write(s[key]) for s in known])
        for key, label, write in (*results(*known), *COSTS, *TROUBLE)
        if any(s.get(key) is not None for s in known)
    ]


def markdown_table(summaries: Mapping[str, Summary]) -> str:
    """A Markdown table, one column per named run, one line per number that some run has."""
    head = ["", *(_cell(name) for name in summaries)]
    rule = ["---", *("---:" for _ in summaries)]
    body = [[label, *values] for label, values in comparison_rows(summaries)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, rule, *body)) + "\n"


def _cell(text: str) -> str:
    return " ".join(str(text).split()).replace("\\", "\\\\").replace("|", "\\|")
