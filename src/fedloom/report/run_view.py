"""Everything that a page shows of one run, as texts, tables of texts and pictures."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedloom.core.errors import ConfigError
from fedloom.report import clients, measures, overlays, plots, routing
from fedloom.report.cells import Grid, domain_cells, fact_cells, fact_groups
from fedloom.report.groups import Group, flatten
from fedloom.report.record import Row, RunRecord, number
from fedloom.report.svg import legend, picture
from fedloom.report.tables import COSTS, TROUBLE, flat, told_preset, warning
from fedloom.report.units import NONE, byte_size, count, decimal, duration, percent, points, signed_points

ROUNDS_SHOWN = 200
OF_MACHINE = ("data.root", "data.tokenizer", "engine.device", "engine.workers", "training.memory_format")
NAMED = (("class_names", "classes"), ("domain_names", "domains"), ("tasks", "tasks"))

Defaults = Callable[[Mapping[str, Any]], Mapping[str, Any]]


def run_view(record: RunRecord, name: str, key: str, defaults: Defaults | None = None) -> dict[str, Any]:
    """Everything that the template shows of one run. key: what the ids of its pictures begin with."""
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
        "measures": _panels(measures.panels(record), f"{key}-measures"),
        "routing": _panels(routing.panels(record), f"{key}-routing"),
        "told": fact_cells(record),
        "groups": fact_groups(record),
        "costs": _key_grid(record.summary, (*COSTS, *TROUBLE)),
        "rounds": _round_grid(record),
        "partition_picture": data_uri(record.picture),
        "data": _data_facts(record),
        "partition": _flat_grid(record.partition, limit=40),
        "changes": changes(record, defaults),
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
    facts += [f"preset {preset}"] if (preset := told_preset(known)) else []
    return facts + ([f"engine {known['engine']}"] if known.get("engine") else [])


def _tiles(record: RunRecord) -> list[tuple[str, str]]:
    """Headline numbers; without a summary the last stage's accuracy stands in, under its own name."""
    known = flat(record.summary)
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
        ("Final accuracy, length-normalised", percent(number(known, "measures.accuracy_norm"))),
        ("Perplexity", decimal(number(known, "measures.perplexity"))),
        ("Alignment", decimal(number(known, "measures.alignment"))),
        ("Sent both ways", byte_size(total)),
        ("Wall time", duration(number(known, "wall_seconds"))),
    ]
    return [(label, value) for label, value in tiles if value != NONE or label in ("Final accuracy", "Wall time")]


def _pictures(record: RunRecord, key: str) -> list[Any]:
    many = len(record.stages) > 1
    alone = [Group("", (record,))]
    drawn: list[tuple[str, float, Any]] = []
    if record.stages:
        drawn.append(("accuracy", 3.6 if many else 2.6, lambda ax: plots.overview(ax, record)))
    if record.matrix and many:
        drawn.append(("heat", 3.6, lambda ax: plots.accuracy_heatmap(ax, record.matrix)))
    if many and record.forgetting_by_stage:
        drawn.append(("forgetting", 2.8, lambda ax: overlays.draw(ax, overlays.FORGETTING, alone)))
    if clients.has_spread(record):
        drawn.append(("clients", 3.3, lambda ax: clients.spread_curve(ax, record)))
    if many and record.accuracy_by_round:
        drawn.append(("rounds", 2.8, lambda ax: plots.accuracy_over_rounds(ax, record)))
    if any(number(row, "train/loss") is not None for row in record.rounds):
        drawn.append(("loss", 2.8, lambda ax: plots.loss_curve(ax, record)))
    return [picture(f"{key}-{name}", draw, height=height) for name, height, draw in drawn]


def _panels(draw: Sequence[Callable[..., None]], name: str) -> list[Any]:
    return [picture(f"{name}{i}", panel, height=2.9) for i, panel in enumerate(draw)]


def _stage_grid(record: RunRecord) -> Grid | None:
    columns = (
        ("classes seen", "seen_classes", lambda v: count(None if v is None else int(v))),
        ("all seen", "accuracy", percent),
        ("current task", "accuracy/current", percent),
        ("task known", "accuracy/within_task", percent),
        ("length-normalised", "measures.accuracy_norm", percent),
        ("perplexity", "measures.perplexity", decimal),
        ("alignment", "measures.alignment", decimal),
        ("matched cosine", "measures.matched_cosine", decimal),
        ("clients, mean", "accuracy/client_mean", percent),
        ("clients, worst 10 %", "accuracy/client_worst10", percent),
        ("clients, weighted", "accuracy/weighted", percent),
    )
    stages = [flat(row) for row in record.stages]
    used = [c for c in columns if any(number(row, c[1]) is not None for row in stages)]
    rows = [[str(row["stage"]), *(write(number(row, key)) for _, key, write in used)] for row in stages]
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
        "picture": picture(f"{key}-domains", lambda ax: plots.domain_curves(ax, record)),
        "legend": legend(list(curves)),
    }


def _key_grid(summary: Row, keys: Sequence[tuple[str, str, Callable[[Any], str]]]) -> Grid | None:
    rows = [[label, write(number(summary, key))] for key, label, write in keys if number(summary, key) is not None]
    return Grid(["", ""], rows) if rows else None


def changes(record: RunRecord, defaults: Defaults | None) -> Grid | None:
    """Settings that differ from the defaults of the same choices: the key, the default, and the value of this run.

    What a run finds out on its machine (`OF_MACHINE`) is left out. defaults: the tree of defaults for a tree of
    settings; raises `ConfigError` where there is none, as for a method that is not at hand.
    """
    if defaults is None or not record.config:
        return None
    try:
        usual = flatten(defaults(record.config))
    except ConfigError:
        return None
    here = flatten(record.config)
    keys = [key for key in here if here[key] != usual.get(key) and key not in OF_MACHINE]
    note = "" if keys else "Every setting has its default."
    return Grid(["", "default", "this run"], [[key, usual.get(key, NONE), here[key]] for key in keys], note)


def _data_facts(record: RunRecord) -> str:
    """Sizes of the data and their notes, in a sentence or two."""
    known = record.partition
    sizes = [
        f"{count(int(value))} {label}"
        for label, value in (
            ("clients", number(known, "clients")),
            ("training examples", number(known, "train_examples")),
            ("test examples", _sum(known.get("test_examples_per_task"))),
        )
        if value is not None
    ]
    sizes += [f"{len(known[k])} {label}" for k, label in NAMED if isinstance(known.get(k), list) and known[k]]
    notes = known.get("notes")
    told = [str(note) for note in notes] if isinstance(notes, list) else []
    return " ".join([f"{', '.join(sizes)}." if sizes else "", *told]).strip()


def _sum(values: Any) -> float | None:
    known = [number({"v": v}, "v") for v in values] if isinstance(values, list) else []
    return sum(v for v in known if v is not None) if known else None


def _flat_grid(tree: Mapping[str, Any], limit: int | None = None) -> Grid | None:
    rows = [[key, value] for key, value in flatten(tree).items()]
    note = f"{len(rows) - limit} more entries are in the file." if limit and len(rows) > limit else ""
    return Grid(["", ""], rows[:limit], note) if rows else None


def data_uri(picture: Path | None) -> str | None:
    """A picture as part of a page; None where it cannot be read."""
    if picture is None:
        return None
    kind = "svg+xml" if picture.suffix == ".svg" else "png"
    try:
        return f"data:image/{kind};base64,{base64.b64encode(picture.read_bytes()).decode()}"
    except OSError:
        return None
