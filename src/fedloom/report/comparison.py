"""The table of a comparison in every form, from the content of its compare.json; and the runs that it names.

compare.json (fractions in [0, 1], bytes, seconds; a seed is a key as text; what does not apply is null):

title, recipe, dataset, scenario
    what was compared, in words; dataset and scenario as in the runs' summaries
settings
    dotted key -> value of what was set over the recipe, without what cannot change a result
reference, metric, lower_is_better, seeds, complete
    label that the others are tested against; key of the result whose test the table shows (final_accuracy where it is
    left out), and whether lower values of it are better; seeds asked for; whether every run is there
runs_folder
    where the runs are, seen from here: `runs`, or `../runs` for a setting of a sweep
methods
    label -> `method` (the resolved section), `runs` {seed: key, the name of the folder in runs/}, `missing` {seed: why
    the run is not there, null for not yet}, `begun` [seeds whose run was begun and has not ended], `pooled` (whether
    the method pools the data of all clients), `personal` (whether its clients may predict otherwise than the global
    view does), `metrics` {key: {mean, std, low, high, n, values {seed: value}}}, `tests`
    {key: {difference, p_t, p_holm, p_wilcoxon, better, n}}, `ranks` {key: mean rank over seeds} (empty where data are
    pooled); see `fedloom.evaluate.comparison`; a domain's accuracy has the key domain_accuracy[NAME]
budget
    `equal`, `visits` {label: {seed: sample visits}}, `share` {label: fraction of the reference's}
pareto
    `bytes` and `train_flops`: labels that no other beats in both the metric and that cost, see `fedloom.report.pareto`
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedloom.core.errors import ConfigError
from fedloom.evaluate.comparison import FEW
from fedloom.report.columns import (
    BETTER,
    better,
    columns,
    mean_rank,
    own_views_differ,
    p_value,
    p_value_text,
    tested,
    words,
)
from fedloom.report.latex import table
from fedloom.report.layout import aligned, fitted
from fedloom.report.units import NONE

if TYPE_CHECKING:
    from rich.table import Table

JSON, MARKDOWN, CSV, LATEX, RUNS = "compare.json", "compare.md", "compare.csv", "compare.tex", "runs"
RUNS_FOLDERS = (RUNS, f"../{RUNS}")
OWN, OWN_ON_DOMAINS = "per_client_accuracy_mean", "personal_domain_mean"  # what tells of clients' own views
COMMON = ("label_scope", "uniform", "buffers", "visits")  # options that mean the same in every method that has them

Content = Mapping[str, Any]


def grid(content: Content) -> list[list[str]]:
    """The table's cells: a row of heads, then a row per method that begins with its label."""
    shown = columns(content)
    rows = [[label, *(c.cell(entry) or NONE for c in shown)] for label, entry in content["methods"].items()]
    return [["Method", *(c.head for c in shown)], *rows]


def notes(content: Content) -> list[str]:
    """What has to be known to read the table, one sentence or two per line."""
    many = len(content["seeds"])
    lines = told_set(content.get("settings", {}))
    lines.append("Accuracies in per cent, forgetting in percentage points.")
    if many > 1:
        lines[-1] += " Mean ± half of the 95 % Student-t interval over seeds; costs are means."
    lines += _test(content)
    if any(mean_rank(entry, tested(content)) is not None for entry in content["methods"].values()):
        lower = ", the lowest" if content.get("lower_is_better") else ""
        lines.append(f"Mean rank: by {words(tested(content))} on each seed that all have; 1 is the best{lower}.")
    if many == 1:
        lines.append(f"One seed: no interval and no test. Run at least {FEW}.")
    elif many < FEW:
        lines.append(f"{many} seeds: intervals say little, and a test nothing. Run at least {FEW}.")
    parts = (_budget, _differing, _pooled, _personal, _shared, _troubles, _missing)
    return [*lines, *(line for part in parts for line in part(content))]


def told_set(layer: Mapping[str, Any]) -> list[str]:
    """A sentence that says what was set over the recipe; none where nothing was. layer: dotted key -> value."""
    set_ = ", ".join(f"{key}={_text(value)}" for key, value in layer.items())
    return [f"Set: {set_}."] if set_ else []


def _test(content: Content) -> list[str]:
    key, reference = tested(content), content["reference"]
    entries = content["methods"].values()
    if any(p_value_text(entry, key) for entry in entries):
        family = sum(entry["tests"].get(key, {}).get("p_holm") is not None for entry in entries)
        many = f", corrected for {family} tests (Holm)" if family > 1 else ""
        mark = (
            f" {BETTER}: better than {reference}, p below 0.05." if any(better(entry, key) for entry in entries) else ""
        )
        return [f"p: two-sided paired t-test of {words(key)} against {reference} over the seeds of both{many}.{mark}"]
    base = content["methods"].get(reference, {"metrics": {}})["metrics"]
    return [f"{reference} has no {words(key)}, so nothing is tested against it."] if base and key not in base else []


def _budget(content: Content) -> list[str]:
    equal, share = content["budget"]["equal"], content["budget"]["share"]
    if equal is None:
        return []
    if equal:
        return ["Sample visits are equal for all."]
    other = [f"{label} makes {value:.4g} times as many" for label, value in share.items() if value not in (None, 1.0)]
    return [f"Sample visits differ from those of {content['reference']}: {', '.join(other) or 'see compare.csv'}."]


def _differing(content: Content) -> list[str]:
    """`COMMON` options that differ between methods, where their labels do not say so.

    Options of one method alone are what its labels compare; others share no more than a name with those of another.
    """
    found: dict[str, dict[str, list[tuple[str, str]]]] = {}
    for label, entry in content["methods"].items():
        for option, value in entry["method"].items():
            if option in COMMON and not re.search(rf"\+\s*{option}\s*=", label):
                found.setdefault(option, {}).setdefault(_text(value), []).append((label, entry["method"]["name"]))
    lines = []
    for option, values in found.items():
        methods = [{name for _, name in labels} for labels in values.values()]
        if len(values) > 1 and len(set.union(*methods)) > 1:
            told = (f"{value} ({', '.join(label for label, _ in labels)})" for value, labels in values.items())
            lines.append(f"{option} differs: {', '.join(told)}.")
    return lines


def _pooled(content: Content) -> list[str]:
    return [
        f"{label} pools the data of all clients: a reference, not a federation; it has no traffic and no rank."
        for label, entry in content["methods"].items()
        if entry.get("pooled")
    ]


def _personal(content: Content) -> list[str]:
    """Methods whose own views differ from the global one: as measured on domains, else as the method says."""
    found: dict[str, list[str]] = {}
    for label, entry in content["methods"].items():
        on_domains = OWN_ON_DOMAINS in entry["metrics"]
        if own_views_differ(entry) if on_domains else entry.get("personal") and OWN in entry["metrics"]:
            found.setdefault(OWN_ON_DOMAINS if on_domains else OWN, []).append(label)
    told = "clients predict with views of their own, and the global view may mean little"
    by_own = tested(content).startswith(("personal_", "per_client_"))
    return [
        f"{', '.join(labels)}: {told}" + ("." if by_own else f"; --metric {key} tests by own views.")
        for key, labels in found.items()
    ]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _shared(content: Content) -> list[str]:
    groups: dict[str, list[str]] = {}
    for label, entry in content["methods"].items():
        groups.setdefault(json.dumps(entry["runs"]), []).append(label)
    return [f"The same configuration, so the same runs: {', '.join(g)}." for g in groups.values() if len(g) > 1]


def _troubles(content: Content) -> list[str]:
    lines = []
    for label, entry in content["methods"].items():
        for key in ("failed_clients", "rejected_updates", "degraded_rounds"):
            found = {seed: v for seed, v in entry["metrics"].get(key, {}).get("values", {}).items() if v}
            if found:
                seeds = f"seed{'s' * (len(found) > 1)} {', '.join(found)}"
                lines.append(
                    f"{label}: {sum(found.values())} {key.replace('_', ' ')} ({seeds}); see log.txt of these runs."
                )
    return lines


def _missing(content: Content) -> list[str]:
    lines = []
    for label, entry in content["methods"].items():
        for seed, reason in entry["missing"].items():
            begun = int(seed) in entry.get("begun", ())
            why = (
                f": {' '.join(reason.split())}"
                if reason
                else "; begun, not ended."
                if begun
                else "; it has not been run yet."
            )
            lines.append(f"Missing: {label}, seed {seed}{why}")
    return lines


def title(content: Content) -> str:
    """One line that says what was compared on what."""
    on = "; ".join(part for part in (content["dataset"], content["scenario"]) if part)
    return f"{content['title']}, {content['recipe']}" + (f" ({on})" if on else "")


def markdown(content: Content) -> str:
    """Title, table and notes as Markdown."""
    head, *body = map(escaped, grid(content))
    lines = [markdown_row(row) for row in (head, ["---", *["---:"] * (len(head) - 1)], *body)]
    return "\n".join([f"**{title(content)}**", "", *lines, "", *(f"- {line}" for line in notes(content)), ""])


def escaped(row: Sequence[str]) -> list[str]:
    """Cells of a Markdown table as text."""
    return [cell.replace("\\", "\\\\").replace("|", "\\|") for cell in row]


def markdown_row(row: Sequence[str]) -> str:
    """One line of a Markdown table."""
    return "| " + " | ".join(row) + " |"


def latex(content: Content) -> str:
    """The table for a paper, its title and notes as the caption."""
    head, *body = grid(content)
    return table(head, body, " ".join([f"{title(content)}.", *notes(content)]))


def text(content: Content) -> str:
    """Title, table and notes as plain text, for logs and pipes."""
    return "\n".join([title(content), "", *aligned(grid(content)), "", *notes(content)])


def tables(content: Content, width: int) -> list[Table]:
    """Rich tables for a terminal of that width; see `fitted`."""
    return fitted(grid(content), width)


def rows(content: Content) -> list[dict[str, Any]]:
    """The table as numbers: per method its label, the seeds that are there, and per measure `<key>` (mean),
    `<key>_low` and `<key>_high` (95 % interval), `<key>_p` and `<key>_p_holm` (paired t-test against the reference,
    as it is and corrected, None as in the table), `<key>_rank` (mean over seeds).
    """
    found = []
    for label, entry in content["methods"].items():
        row: dict[str, Any] = {"label": label, "seeds": len(entry["runs"]) - len(entry["missing"])}
        for key, measured in entry["metrics"].items():
            row |= {key: measured["mean"], f"{key}_low": measured["low"], f"{key}_high": measured["high"]}
            if key in entry["tests"]:
                row |= {f"{key}_p": p_value(entry, key, "p_t"), f"{key}_p_holm": p_value(entry, key)}
            if (rank := mean_rank(entry, key)) is not None:
                row[f"{key}_rank"] = rank
        found.append(row)
    return found


def csv_text(content: Content) -> str:
    """Raw numbers, one line per label and seed; empty where there is no value.

    What is of a label and not of a run, the test and the rank by the table's metric, stands on each of its lines.
    """
    entries, metric = content["methods"].values(), tested(content)
    keys = list(dict.fromkeys(key for entry in entries for key in entry["metrics"]))
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["label", "method", "preset", "seed", "state", "hash", "p_t", "p_holm", "mean_rank", *keys])
    for label, entry in content["methods"].items():
        whole = (p_value(entry, metric, "p_t"), p_value(entry, metric), mean_rank(entry, metric))
        for seed, key in entry["runs"].items():
            state = _state(entry, seed)
            named = [label, entry["method"]["name"], entry["method"]["preset"], seed, state, key]
            values = (entry["metrics"].get(k, {}).get("values", {}).get(seed) for k in keys)
            writer.writerow([*named, *("" if v is None else repr(v) for v in (*whole, *values))])
    return out.getvalue()


def _state(entry: Content, seed: str) -> str:
    if seed not in entry["missing"]:
        return "done"
    return "failed" if entry["missing"][seed] else "unfinished" if int(seed) in entry.get("begun", ()) else "missing"


def is_comparison(folder: Path) -> bool:
    """Whether a comparison was written to the folder."""
    return (folder / JSON).is_file()


def read_comparison(folder: Path) -> dict[str, Any]:
    """The content of compare.json. Raises `ConfigError` when it is damaged."""

    def check(found: Content) -> None:
        if not isinstance(found["methods"], dict):
            raise ValueError("it holds no comparison")
        for label, entry in found["methods"].items():
            if not all(isinstance(key, str) and key.isalnum() for key in entry["runs"].values()):
                raise ValueError(f"the runs of {label} are not named by keys")
        if found.get("runs_folder", RUNS) not in RUNS_FOLDERS:
            raise ValueError(f"its runs are in none of {', '.join(RUNS_FOLDERS)}")
        text(found)

    return read_content(folder / JSON, "compare", check)


def read_content(file: Path, command: str, check: Callable[[Content], None]) -> dict[str, Any]:
    """The mapping that a command wrote to a JSON file. check: raises what it likes for one that is not whole.

    Raises `ConfigError` when it is damaged.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError("it holds no mapping")
        check(found)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ConfigError(
            f"'{file}' is damaged ({error}); call `fedloom {command}` again with the same arguments, which writes it "
            "anew from the runs"
        ) from error
    return found


def run_folders(folder: Path, content: Content) -> dict[str, Path]:
    """Name -> folder of every finished run of a comparison, each run once.

    Raises `ConfigError` when none has ended.
    """
    found = {
        f"{label}, seed {seed}": folder / content.get("runs_folder", RUNS) / key
        for label, entry in content["methods"].items()
        for seed, key in entry["runs"].items()
        if seed not in entry["missing"]
    }
    if not found:
        raise ConfigError(f"no run of the comparison '{folder}' has ended; go on with the same `fedloom compare`")
    first = {path: name for name, path in reversed(found.items())}
    return {name: path for name, path in found.items() if first[path] == name}


FORMS = {MARKDOWN: markdown, LATEX: latex, CSV: csv_text}  # the tables of a comparison by the names of their files
