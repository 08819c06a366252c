"""The columns of a comparison's table: what each is called, and its cell of a method's entry in compare.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fedloom.evaluate.comparison import DOMAIN, FEW
from fedloom.report.tables import differ
from fedloom.report.units import byte_size, count, decimal, duration, percent, short_count

BETTER = "*"  # marks what is better than the reference
METRIC = "final_accuracy"  # whose test is shown where no other is asked for
PLAIN = ("measures.perplexity", "measures.alignment", "measures.matched_cosine")  # results that are no fractions
OVER_DOMAINS = ("domain_mean", "domain_std", "domain_worst")

Content = Mapping[str, Any]


class Column(NamedTuple):
    """A column after the label. cell: text of a method's entry; None where it has no value."""

    head: str
    cell: Callable[[Content], str | None]


def _spread(key: str) -> Callable[[Content], str | None]:
    def cell(entry: Content) -> str | None:
        found = entry["metrics"].get(key)
        if found is None:
            return None
        return value_text(key, found["mean"], None if found["high"] is None else found["high"] - found["mean"])

    return cell


def _mean(key: str, write: Callable[[float], str]) -> Callable[[Content], str | None]:
    def cell(entry: Content) -> str | None:
        found = entry["metrics"].get(key)
        return None if found is None else write(found["mean"])

    return cell


def rank_text(rank: float | None) -> str | None:
    """A mean rank with two decimals."""
    return None if rank is None else f"{rank:.2f}"


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


def p_value(entry: Content, key: str, kind: str = "p_holm") -> float | None:
    """p of the paired t-test; None for fewer seeds than say anything. kind: p_holm, corrected, or p_t, not."""
    found = entry["tests"].get(key)
    p: float | None = found.get(kind) if found and found["n"] >= FEW else None
    return p


def better(entry: Content, key: str) -> bool:
    """Whether the method is better than the reference by the corrected test."""
    return p_value(entry, key) is not None and bool(entry["tests"][key].get("better"))


def p_value_text(entry: Content, key: str) -> str | None:
    """The corrected p as the table shows it, with the mark of what is better than the reference."""
    p = p_value(entry, key)
    if p is None:
        return None
    return ("< 0.001" if p < 0.001 else f"{p:.3f}") + (f" {BETTER}" if better(entry, key) else "")


def mean_rank(entry: Content, key: str) -> float | None:
    """Mean rank over seeds, 1 for the best; None where the methods share no seed, and for pooled data."""
    rank: float | None = entry.get("ranks", {}).get(key)
    return rank


def value_text(key: str, value: float, half: float | None) -> str:
    """Mean and half width of the interval, as in "63.3 ± 1.2": in per cent or points, or as `PLAIN` says."""
    write = decimal if key in PLAIN else _hundredth
    return write(value) + ("" if half is None else f" ± {write(half)}")


def tested(content: Content) -> str:
    """Key of the measure whose test the table shows."""
    key: str = content.get("metric", METRIC)
    return key


def words(key: str) -> str:
    """A measure in words: domain_worst -> "domain worst", domain_accuracy[art] -> "domain art", measures.perplexity ->
    "perplexity".
    """
    return f"domain {_domain(key)}" if key.startswith(DOMAIN) else key.removeprefix("measures.").replace("_", " ")


def _domain(key: str) -> str:
    return " ".join(key[len(DOMAIN) : -1].split())


def own_views_differ(entry: Content) -> bool:
    """Whether the clients' own views of a method have other means over domains than its global view."""
    means = {key: found["mean"] for key, found in entry["metrics"].items()}
    return differ({key: means.get(f"personal_{key}") for key in OVER_DOMAINS}, means)


def _domains(content: Content) -> list[tuple[str, str]]:
    """Head and key per domain that some method has an accuracy on, of the global view."""
    keys = {key: None for entry in content["methods"].values() for key in entry["metrics"] if key.startswith(DOMAIN)}
    return [(f"Domain {_domain(key)}, %", key) for key in keys]


def _results(content: Content) -> list[Column]:
    """Those of own views on domains only where they differ from the global view of some method."""
    known = (
        ("Final accuracy, %", "final_accuracy"),
        ("Average incremental accuracy, %", "average_incremental_accuracy"),
        ("Current task, mean over stages, %", "current_task_accuracy"),
        ("Forgetting, pp", "forgetting"),
        ("Final accuracy, task known, %", "accuracy_within_task"),
        ("Final accuracy, length-normalised, %", "measures.accuracy_norm"),
        ("Perplexity", "measures.perplexity"),
        ("Alignment", "measures.alignment"),
        ("Matched cosine", "measures.matched_cosine"),
        *_domains(content),
        ("Domains, mean, %", "domain_mean"),
        ("Domains, deviation (ddof 0), pp", "domain_std"),
        ("Domains, worst, %", "domain_worst"),
    )
    own = (
        ("Domains, own views, mean, %", "personal_domain_mean"),
        ("Domains, own views, deviation (ddof 0), pp", "personal_domain_std"),
        ("Domains, own views, worst, %", "personal_domain_worst"),
    )
    rest = (
        ("Backward transfer, pp", "backward_transfer"),
        ("Clients, mean, %", "per_client_accuracy_mean"),
        ("Clients, worst tenth, %", "per_client_accuracy_worst10"),
    )
    shown = [*known, *own] if any(map(own_views_differ, content["methods"].values())) else list(known)
    shown += [(head, key) for head, key in (*own, *rest) if key == tested(content) and (head, key) not in shown]
    return [Column(head, _spread(key)) for head, key in shown]


def columns(content: Content) -> list[Column]:
    """Results, the test of one of them, then costs, without columns that are empty for every method."""
    key = tested(content)
    known = (
        Column("Seeds", _seeds),
        *_results(content),
        Column(f"p of {words(key)} against {content['reference']}", lambda entry: p_value_text(entry, key)),
        Column("Mean rank", lambda entry: rank_text(mean_rank(entry, key))),
        Column("MB sent by clients", _mean("bytes_up", megabytes)),
        Column("MB sent to clients", _mean("bytes_down", megabytes)),
        Column("Training FLOPs", _mean("train_flops", short_count)),
        Column("Sample visits", _mean("sample_visits", _whole)),
        Column("Visits without training", _passes),
        Column("Parameters (active)", _parameters),
        Column("Peak memory", _mean("own_peak_rss_bytes", byte_size)),
        Column("Wall time", _mean("wall_seconds", duration)),
    )
    entries = content["methods"].values()
    return [column for column in known if any(column.cell(entry) is not None for entry in entries)]
