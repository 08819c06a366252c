"""The table of a sweep in every form, from the content of its sweep.json.

sweep.json (fractions in [0, 1]; what does not apply is null):

title, recipe, set
    what was swept, in words; dotted key -> value of what was set over the recipe in every setting
reference, metric, lower_is_better, seeds, complete
    as in compare.json
methods
    labels, the rows
settings
    label -> `folder` (of its comparison, beside sweep.json), `set` {dotted key: value}, `dataset`, `scenario`,
    `complete`, `missing` (number of runs that are not there), `results` {method: {mean, std, low, high, n, difference,
    p_t, p_holm, better, rank}} of the metric, see `fedloom.report.comparison` (p null for fewer than three seeds), and
    `best` (methods with the best mean)
pooled
    labels of methods that pool the data of all clients: references, never best and without a rank
mean_rank
    method -> mean over the settings of its rank by the mean, 1 for the best; empty where no setting has all methods
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedloom.report.columns import BETTER, rank_text, value_text, words
from fedloom.report.comparison import escaped, markdown_row, read_content, told_set
from fedloom.report.latex import table
from fedloom.report.layout import aligned
from fedloom.report.units import NONE

JSON, MARKDOWN, CSV, LATEX = "sweep.json", "sweep.md", "sweep.csv", "sweep.tex"
VALUES = ("mean", "std", "low", "high", "n", "difference", "p_t", "p_holm", "better", "rank")

Content = Mapping[str, Any]


def grid(content: Content) -> list[list[str]]:
    """The table's cells: a row of heads, then a row per method that begins with its label."""
    settings, ranks = content["settings"], content["mean_rank"]
    rows = [
        [label, *(_cell(content, setting, label) for setting in settings), rank_text(ranks.get(label)) or NONE]
        for label in content["methods"]
    ]
    return [["Method", *settings, "Mean rank"], *rows]


def _cell(content: Content, setting: str, label: str) -> str:
    found = content["settings"][setting]["results"].get(label)
    if found is None:
        return NONE
    half = None if found["high"] is None else found["high"] - found["mean"]
    return value_text(content["metric"], found["mean"], half) + (f" {BETTER}" if found["better"] else "")


def _best(content: Content) -> list[tuple[int, int]]:
    """(row, column) of the cells with the best mean of a setting."""
    places = enumerate(content["settings"].values(), start=1)
    return [(content["methods"].index(label), k) for k, found in places for label in found["best"]]


def notes(content: Content) -> list[str]:
    """What has to be known to read the table, one sentence or two per line."""
    lines = told_set(content["set"])
    lower = ", lower is better" if content["lower_is_better"] else ""
    many = len(content["seeds"])
    spread = "; mean ± half of the 95 % Student-t interval over seeds" if many > 1 else "; one seed"
    lines.append(f"Cells: {words(content['metric'])}{lower}{spread}. Fractions in per cent.")
    found = [result for setting in content["settings"].values() for result in setting["results"].values()]
    if any(result["better"] for result in found):
        told = "two-sided paired t-test over seeds, p below 0.05, corrected within the setting (Holm)"
        lines.append(f"{BETTER}: better than {content['reference']} by a {told}.")
    if content["mean_rank"]:
        lines.append("Mean rank: by the mean, over the settings that have every method; 1 is the best.")
    lines += [
        f"{label} pools the data of all clients: a reference, not a federation; it is in no rank and never bold."
        for label in content.get("pooled", ())
    ]
    lines += [
        f"{label}: {absent} run{'s are' if absent > 1 else ' is'} missing; see {setting['folder']}/compare.md."
        for label, setting in content["settings"].items()
        if (absent := setting["missing"])
    ]
    return lines


def title(content: Content) -> str:
    """One line that says what was swept on what."""
    return f"{content['title']}, {content['recipe']}"


def markdown(content: Content) -> str:
    """Title, table and notes as Markdown; the best mean of a setting is bold."""
    head, *body = grid(content)
    best = _best(content)
    shown = [
        [f"**{cell}**" if (i, k) in best else cell for k, cell in enumerate(row)]
        for i, row in enumerate(escaped(row) for row in body)
    ]
    ruled = [escaped(head), ["---", *["---:"] * (len(head) - 1)], *shown]
    told = [*notes(content), *(["Bold: the best mean of a setting."] if best else [])]
    return "\n".join([f"**{title(content)}**", "", *map(markdown_row, ruled), "", *(f"- {line}" for line in told), ""])


def latex(content: Content) -> str:
    """The table for a paper; the best mean of a setting is bold."""
    head, *body = grid(content)
    best = _best(content)
    told = [*notes(content), *(["Bold: the best mean of a setting."] if best else [])]
    return table(head, body, " ".join([f"{title(content)}.", *told]), best)


def text(content: Content) -> str:
    """Title, table and notes as plain text, for logs and pipes."""
    return "\n".join([title(content), "", *aligned(grid(content)), "", *notes(content)])


def csv_text(content: Content) -> str:
    """One line per setting and method, raw numbers; empty where there is no value."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["setting", "label", *VALUES])
    for setting, found in content["settings"].items():
        for label in content["methods"]:
            result = found["results"].get(label, {})
            values = (result.get(key) for key in VALUES)
            writer.writerow([setting, label, *("" if v is None else json.dumps(v) for v in values)])
    return out.getvalue()


def rows(content: Content) -> list[dict[str, Any]]:
    """The table as numbers: one mapping per setting and method, with the columns of sweep.csv."""
    return [
        {"setting": setting, "label": label, **{key: found["results"].get(label, {}).get(key) for key in VALUES}}
        for setting, found in content["settings"].items()
        for label in content["methods"]
    ]


def is_sweep(folder: Path) -> bool:
    """Whether a sweep was written to the folder."""
    return (folder / JSON).is_file()


def read_sweep(folder: Path) -> dict[str, Any]:
    """The content of sweep.json. Raises `ConfigError` when it is damaged."""

    def check(found: Content) -> None:
        if not isinstance(found["settings"], dict):
            raise ValueError("it holds no sweep")
        for label, setting in found["settings"].items():
            if Path(name := setting["folder"]).name != name or name == "..":
                raise ValueError(f"the folder of {label} is not beside it")
        text(found)

    return read_content(folder / JSON, "sweep", check)


FORMS = {MARKDOWN: markdown, LATEX: latex, CSV: csv_text}  # the tables of a sweep by the names of their files
