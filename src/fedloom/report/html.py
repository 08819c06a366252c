"""One self-contained page about one run, or about several side by side.

Everything is inside the file: styles, pictures as SVG or data URIs. It asks the network for nothing and runs
no script. All text that comes from a run folder is escaped.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fedloom.core.errors import ConfigError
from fedloom.report import comparison, costs, plots
from fedloom.report.cells import domain_accuracies, domain_cells, fact_cells
from fedloom.report.record import Row, RunRecord, number, read_run
from fedloom.report.svg import legend_mark, svg
from fedloom.report.tables import COSTS, OWN_VIEWS, RESULTS, TROUBLE, comparison_rows, warning
from fedloom.report.units import NONE, byte_size, count, decimal, duration, percent, points, signed_points

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROUNDS_SHOWN = 200
GLOSSARY = (
    ("Average incremental accuracy", "Mean over stages of the accuracy over all classes seen by then."),
    (
        "Forgetting",
        "For every task but the last one's: its best accuracy before the last stage minus its accuracy at the end; the "
        "mean over those tasks, in percentage points (pp). Lower is better.",
    ),
    (
        "Backward transfer",
        "Accuracy of a task at the end minus its accuracy when it arrived; the mean over all tasks but the last one's. "
        "Above zero, later tasks helped earlier ones.",
    ),
    (
        "Clients, worst 10 %",
        "The global or personal model's expected accuracy on each client's own mix of classes; the mean over the tenth "
        "of the clients (at least one) where it is lowest.",
    ),
    (
        "Training loss",
        "Mean of the objective that clients minimise, with all terms of the method. A term that rewards entropy, such "
        "as the balance term of a gate, can take it below zero.",
    ),
)


class Grid(NamedTuple):
    """A table of texts: header cells and rows of cells; the first column is a label."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


def write_report(folders: Sequence[Path], out: Path) -> Path:
    """Write the page about the runs in `folders` to the file `out` and return its path.

    The folder of a comparison stands for its finished runs, and its table comes first. What a folder lacks is shown
    as "not recorded". Raises `ConfigError` when there is no folder, when one holds neither a run nor a comparison of
    which some run has ended, or when the file cannot be written.
    """
    if not folders:
        raise ConfigError("a report needs at least one run folder.")
    runs: list[tuple[str | None, Path]] = []
    contents = []
    for folder in map(Path, folders):
        if comparison.is_comparison(folder):
            content = comparison.read_comparison(folder)
            runs += comparison.run_folders(folder, content).items()
            contents.append(content)
        else:
            runs.append((None, folder))
    names = [name for name, _ in runs]
    page = render([read_run(path) for _, path in runs], names, contents)
    try:
        partial = out.with_name(out.name + ".partial")
        partial.write_text(page, encoding="utf-8", errors="backslashreplace")
        os.replace(partial, out)
    except OSError as error:
        raise ConfigError(f"the report '{out}' cannot be written: {error.strerror}.") from error
    return out


def render(
    records: Sequence[RunRecord], names: Sequence[str | None] = (), comparisons: Sequence[Mapping[str, Any]] = ()
) -> str:
    """The page as text. names: of the runs, None for one of its own making. comparisons: contents of compare.json."""
    from importlib.resources import files

    from jinja2 import Environment, StrictUndefined

    names = _unique(names, records)
    template = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    ).from_string(files("fedloom.report").joinpath("template.html").read_text(encoding="utf-8"))
    with plots.styled():
        runs = [_run_view(record, name, f"run{i}") for i, (record, name) in enumerate(zip(records, names, strict=True))]
        several = _comparison_view(records, names, costly=not comparisons) if len(records) > 1 else None
        compared = [_compared_view(content, f"compared{i}") for i, content in enumerate(comparisons)]
    title = names[0] if len(records) == 1 else f"{len(records)} runs compared"
    return template.render(title=title, runs=runs, several=several, comparisons=compared, glossary=GLOSSARY)


def _unique(names: Sequence[str | None], records: Sequence[RunRecord]) -> list[str]:
    """The given names where there is one for every run and no two are alike, else names of their own making."""
    given = [name for name in names if name is not None]
    return given if len(set(given)) == len(records) else run_names(records)


def run_names(records: Sequence[RunRecord]) -> list[str]:
    """A short name per run: the method, with seed, data set and folder added until all names differ."""
    makers: tuple[Callable[[RunRecord], str], ...] = (
        lambda r: r.method,
        lambda r: f"{r.method}, seed {r.seed}",
        lambda r: f"{r.method}, {r.dataset}, seed {r.seed}",
        lambda r: f"{r.method} ({r.folder.name})",
        lambda r: f"{r.method} ({r.folder})",
    )
    for make in makers:
        names = [make(record) for record in records]
        if len(set(names)) == len(names):
            return names
    return [f"{i + 1}. {name}" for i, name in enumerate(names)]


def _run_view(record: RunRecord, name: str, key: str) -> dict[str, Any]:
    """Everything that the template shows about one run."""
    return {
        "key": key,
        "name": name,
        "folder": str(record.folder),
        "dataset": record.dataset,
        "status": record.status,
        "facts": _facts(record),
        "problems": [*filter(None, [warning(record.summary)]), *record.problems],
        "tiles": _tiles(record),
        "pictures": _pictures(record, key),
        "stages": _stage_grid(record),
        "domains": domain_cells(record),
        "domain_curves": _domain_curves(record, key),
        "told": fact_cells(record),
        "costs": _key_grid(record.summary, (*COSTS, *TROUBLE)),
        "rounds": _round_grid(record),
        "partition_picture": _data_uri(record.picture),
        "partition": _flat_grid(record.partition, limit=40),
        "config": record.config_text,
        "environment": _flat_grid(record.env),
        "digests": [(k, record.summary[k]) for k in ("params_sha256", "state_sha256") if record.summary.get(k)],
    }


def _facts(record: RunRecord) -> list[str]:
    known = record.summary
    facts = [f"seed {record.seed}"] if record.seed is not None else []
    facts += [str(known[k]).replace("_", " ") for k in ("scenario",) if known.get(k)]
    facts += [
        f"{known[k]} {k if known[k] != 1 else k[:-1]}"
        for k in ("clients", "stages", "rounds")
        if known.get(k) is not None
    ]
    facts += [f"preset {known['preset']}"] if known.get("preset") else []
    return facts + ([f"engine {known['engine']}"] if known.get("engine") else [])


def _tiles(record: RunRecord) -> list[tuple[str, str]]:
    """Headline numbers; without a summary the last stage's accuracy stands in, under its own name."""
    known = record.summary
    if not known:
        last = record.stages[-1] if record.stages else {}
        return [("Accuracy so far", percent(number(last, "accuracy"))), ("Stages evaluated", str(len(record.stages)))]
    sent = [number(known, key) for key in ("bytes_up", "bytes_down")]
    total = sum(v for v in sent if v is not None) if any(v is not None for v in sent) else None
    tiles = [
        ("Final accuracy", percent(number(known, "final_accuracy"))),
        ("Average incremental accuracy", percent(number(known, "average_incremental_accuracy"))),
        ("Forgetting", points(number(known, "forgetting"))),
        ("Backward transfer", signed_points(number(known, "backward_transfer"))),
        ("Clients, worst 10 %", percent(number(known, "per_client_accuracy_worst10"))),
        ("Sent both ways", byte_size(total)),
        ("Wall time", duration(number(known, "wall_seconds"))),
    ]
    return [(label, value) for label, value in tiles if value != NONE or label in ("Final accuracy", "Wall time")]


def _pictures(record: RunRecord, key: str) -> list[Any]:
    many = len(record.stages) > 1
    drawn = []
    if record.stages:
        height = 4.3 if many else 3.0
        drawn.append(_svg(f"{key}-accuracy", 5.4, height, lambda ax: plots.overview(ax, record)))
    if record.matrix and many:
        drawn.append(_svg(f"{key}-heat", 5.0, 4.3, lambda ax: plots.accuracy_heatmap(ax, record.matrix)))
    if many and record.accuracy_by_round:
        drawn.append(_svg(f"{key}-rounds", 5.4, 3.0, lambda ax: plots.accuracy_over_rounds(ax, record)))
    if any(number(row, "train/loss") is not None for row in record.rounds):
        drawn.append(_svg(f"{key}-loss", 5.4, 3.0, lambda ax: plots.loss_curve(ax, record)))
    return drawn


def _svg(name: str, width: float, height: float, draw: Callable[[Axes], None]) -> Any:
    made = plots.figure(width, height)
    draw(made.subplots())
    return _markup(svg(made, name))


def _markup(svg: str) -> Any:
    """Pictures hold fixed words and numbers only, so they are what enters the page unescaped."""
    from markupsafe import Markup

    return Markup(svg)


def _stage_grid(record: RunRecord) -> Grid | None:
    columns = (
        ("classes seen", "seen_classes", lambda v: count(None if v is None else int(v))),
        ("all seen", "accuracy", percent),
        ("current task", "accuracy/current", percent),
        ("task known", "accuracy/within_task", percent),
        ("clients, mean", "accuracy/client_mean", percent),
        ("clients, worst 10 %", "accuracy/client_worst10", percent),
        ("clients, weighted", "accuracy/weighted", percent),
    )
    used = [c for c in columns if any(number(row, c[1]) is not None for row in record.stages)]
    rows = [[str(row["stage"]), *(write(number(row, key)) for _, key, write in used)] for row in record.stages]
    note = (
        "All seen: class-incremental, over every class that has arrived. Task known: task-incremental. "
        "Clients: expected accuracy on the test set reweighted to each client's labels."
    )
    return Grid(["stage", *(label for label, _, _ in used)], rows, note) if rows else None


def _round_grid(record: RunRecord) -> Grid | None:
    rows = record.rounds
    if not rows:
        return None
    step = -(-len(rows) // ROUNDS_SHOWN)
    head = [
        "stage.round",
        "exchange",
        "clients",
        "loss",
        "accuracy",
        "failed",
        "rejected",
        "degraded",
        "up",
        "down",
        "time",
    ]
    note = f"One in {step} of {len(rows)} rows is shown." if step > 1 else ""
    shown = [_round_row(row) for row in rows[::step]]
    if all(row[4] == NONE for row in shown):
        head, shown = head[:4] + head[5:], [row[:4] + row[5:] for row in shown]
    return Grid(head, shown, note)


def _round_row(row: Row) -> list[str]:
    def whole(key: str) -> str:
        value = number(row, key)
        return NONE if value is None else count(int(value))

    round_ = number(row, "round")
    return [
        f"{row['stage']}" if round_ is None else f"{row['stage']}.{int(round_)}",
        str(row.get("exchange") or NONE),
        whole("clients"),
        decimal(number(row, "train/loss")),
        percent(number(row, "accuracy")),
        whole("failed"),
        whole("rejected"),
        "yes" if row.get("degraded") else "no",
        byte_size(number(row, "bytes_up")),
        byte_size(number(row, "bytes_down")),
        duration(number(row, "seconds")),
    ]


def _domain_curves(record: RunRecord, key: str) -> dict[str, Any] | None:
    """The picture and its legend, where there are domains and stages or rounds to draw a line through."""
    curves = record.domain_curves if len(record.stages) > 1 else record.domain_curves_by_round[1]
    if not curves:
        return None
    return {
        "picture": _svg(f"{key}-domains", 5.4, 3.8, lambda ax: plots.domain_curves(ax, record)),
        "legend": _legend(list(curves)),
    }


def _key_grid(summary: Row, keys: Sequence[tuple[str, str, Callable[[Any], str]]]) -> Grid | None:
    rows = [[label, write(number(summary, key))] for key, label, write in keys if number(summary, key) is not None]
    return Grid(["", ""], rows) if rows else None


def _flat_grid(tree: Mapping[str, Any], limit: int | None = None) -> Grid | None:
    rows = [[key, value] for key, value in flatten(tree).items()]
    note = f"{len(rows) - limit} more entries are in the file." if limit and len(rows) > limit else ""
    return Grid(["", ""], rows[:limit], note) if rows else None


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Dotted keys and short texts of a nested mapping; long lists are cut, with their length."""
    flat: dict[str, str] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
            continue
        text = value if isinstance(value, str) else json.dumps(value, default=str)
        size = f" … ({len(value)} entries)" if isinstance(value, list) else " …"
        flat[f"{prefix}{key}"] = text if len(text) <= 200 else text[:160] + size
    return flat


def _compared_view(content: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Title, table and costs of a comparison."""
    head, *rows = comparison.grid(content)
    points = costs.of_methods(content)
    return {
        "title": comparison.title(content),
        "table": Grid(head, rows, " ".join(comparison.notes(content))),
        "costs": _costs(list(points.values()), f"{key}-costs"),
        "legend": _legend(list(points)),
    }


def _costs(points: Sequence[costs.Point], name: str) -> Any:
    """Accuracy against what it costs; None where nothing differs."""
    drawn = costs.drawable(points)
    if not drawn:
        return None
    made = plots.figure(3.8 * len(drawn), 3.4)
    for ax, cost in zip(made.subplots(1, len(drawn), squeeze=False)[0], drawn, strict=True):
        costs.scatter(ax, points, cost)
    return _markup(svg(made, name))


def _legend(names: Sequence[str]) -> list[tuple[str, Any]]:
    return [(name, _markup(legend_mark(i))) for i, name in enumerate(names)]


def _comparison_view(records: Sequence[RunRecord], names: Sequence[str], *, costly: bool) -> dict[str, Any]:
    """Side by side: every number that some run has, the settings that differ, the curves in one picture.

    costly: with accuracy against costs, which a comparison of methods shows by itself.
    """
    keyed = {name: _clean(record.summary) for name, record in zip(names, records, strict=True)}
    configs = [flatten(record.config) for record in records]
    keys = dict.fromkeys(key for config in configs for key in config)
    differing = [key for key in keys if len({config.get(key) for config in configs}) > 1]
    rows = {key: [key, *(config.get(key, NONE) for config in configs)] for key in differing}
    shared = [row for key, row in rows.items() if all(key in config for config in configs)]
    apart = [row for key, row in rows.items() if any(key not in config for config in configs)]
    any_curve = any(record.stages for record in records)
    return {
        "numbers": Grid(["", *names], [[label, *values] for label, values in comparison_rows(keyed)]),
        "settings": Grid(["", *names], shared) if shared else None,
        "options": Grid(["", *names], apart) if apart else None,
        "curves": _svg("all", 7.6, 4.0, lambda ax: plots.overlaid_curves(ax, records)) if any_curve else None,
        "costs": _costs([costs.of_summary(record.summary) for record in records], "all-costs") if costly else None,
        "legend": _legend(names),
    }


def _clean(summary: Row) -> dict[str, Any]:
    numbers = {key: number(summary, key) for key, _, _ in (*RESULTS, *OWN_VIEWS, *COSTS, *TROUBLE)}
    return {**numbers, **domain_accuracies(summary)}


def _data_uri(picture: Path | None) -> str | None:
    if picture is None:
        return None
    kind = "svg+xml" if picture.suffix == ".svg" else "png"
    try:
        return f"data:image/{kind};base64,{base64.b64encode(picture.read_bytes()).decode()}"
    except OSError:
        return None
