"""The columns of a comparison's table: what each is called, and its cell of a method's entry in compare.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fedloom.report.tables import differ
from fedloom.report.units import count, duration, percent

FEW = 3  # seeds below which a comparison says little
DOMAIN = "domain_accuracy["  # what the key of a domain's accuracy begins with: domain_accuracy[NAME]

Content = Mapping[str, Any]


class Column(NamedTuple):
    """A column after the label. cell: text of a method's entry; None where it has no value."""

    head: str
    cell: Callable[[Content], str | None]


def _spread(key: str) -> Callable[[Content], str | None]:
    """Mean and half width of the interval in per cent or points, as in "63.3 ± 1.2"."""

    def cell(entry: Content) -> str | None:
        found = entry["metrics"].get(key)
        if found is None:
            return None
        half = "" if found["high"] is None else f" ± {_hundredth(found['high'] - found['mean'])}"
        return f"{_hundredth(found['mean'])}{half}"

    return cell


def _mean(key: str, write: Callable[[float], str]) -> Callable[[Content], str | None]:
    def cell(entry: Content) -> str | None:
        found = entry["metrics"].get(key)
        return None if found is None else write(found["mean"])

    return cell


def _hundredth(fraction: float) -> str:
    return percent(fraction).removesuffix(" %")


def _whole(value: float) -> str:
    return count(round(value))


def megabytes(value: float) -> str:
    """Bytes as millions of bytes with three significant digits: 1234567 -> "1.23"."""
    return f"{value / 1e6:.3g}" if value < 1e8 else count(round(value / 1e6))


def _parameters(entry: Content) -> str | None:
    total, active = (_mean(key, _whole)(entry) for key in ("parameters", "active_parameters"))
    return total if active in (None, total) else f"{total} ({active})"


def _passes(entry: Content) -> str | None:
    found = entry["metrics"].get("pass_visits")
    return _whole(found["mean"]) if found and found["mean"] else None


def _seeds(entry: Content) -> str:
    done, asked = len(entry["runs"]) - len(entry["missing"]), len(entry["runs"])
    return str(done) if done == asked else f"{done} of {asked}"


def p_value(entry: Content, key: str) -> float | None:
    """p of the paired t-test; None for fewer seeds than say anything."""
    found = entry["tests"].get(key)
    p: float | None = found["p_t"] if found and found["n"] >= FEW else None
    return p


def p_value_text(entry: Content) -> str | None:
    """p of final accuracy as the table shows it."""
    p = p_value(entry, "final_accuracy")
    return None if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"


def _domains(content: Content) -> list[Column]:
    """A column per domain that some method has an accuracy on, of the global view."""
    keys = {key: None for entry in content["methods"].values() for key in entry["metrics"] if key.startswith(DOMAIN)}
    return [Column(f"Domain {' '.join(key[len(DOMAIN) : -1].split())}, %", _spread(key)) for key in keys]


def _own_views(content: Content) -> tuple[Column, ...]:
    """Columns of the clients' own views on domains, where those of some method differ from its global view."""
    keys = ("domain_mean", "domain_std", "domain_worst")
    means = [{key: found["mean"] for key, found in entry["metrics"].items()} for entry in content["methods"].values()]
    if not any(differ({key: mean.get(f"personal_{key}") for key in keys}, mean) for mean in means):
        return ()
    return (
        Column("Domains, own views, mean, %", _spread("personal_domain_mean")),
        Column("Domains, own views, deviation (ddof 0), pp", _spread("personal_domain_std")),
        Column("Domains, own views, worst, %", _spread("personal_domain_worst")),
    )


def columns(content: Content) -> list[Column]:
    """Results, then costs, without columns that are empty for every method."""
    known = (
        Column("Seeds", _seeds),
        Column("Final accuracy, %", _spread("final_accuracy")),
        Column("Average incremental accuracy, %", _spread("average_incremental_accuracy")),
        Column("Current task, mean over stages, %", _spread("current_task_accuracy")),
        Column("Forgetting, pp", _spread("forgetting")),
        Column("Final accuracy, task known, %", _spread("accuracy_within_task")),
        *_domains(content),
        Column("Domains, mean, %", _spread("domain_mean")),
        Column("Domains, deviation (ddof 0), pp", _spread("domain_std")),
        Column("Domains, worst, %", _spread("domain_worst")),
        *_own_views(content),
        Column(f"p of final accuracy against {content['reference']}", p_value_text),
        Column("MB sent by clients", _mean("bytes_up", megabytes)),
        Column("MB sent to clients", _mean("bytes_down", megabytes)),
        Column("Sample visits", _mean("sample_visits", _whole)),
        Column("Visits without training", _passes),
        Column("Parameters (active)", _parameters),
        Column("Wall time", _mean("wall_seconds", duration)),
    )
    entries = content["methods"].values()
    return [column for column in known if any(column.cell(entry) is not None for entry in entries)]
