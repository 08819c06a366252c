import io

from rich.console import Console

from fedloom.report.tables import (
    domain_lines,
    extremes,
    markdown_table,
    run_title,
    summary_lines,
    summary_table,
    summary_text,
)
from fedloom.report.units import short_count

SUMMARY = {
    "method": "fedfmx",
    "preset": "paper",
    "dataset": "a[b]",
    "seed": 0,
    "final_accuracy": 0.5,
    "forgetting": None,
    "backward_transfer": 0.01,
    "bytes_up": 2048,
    "sample_visits": 34512,
    "failed_clients": 0,
    "rejected_updates": 3,
}


def test_lines_leave_out_what_does_not_apply():
    assert summary_lines(SUMMARY) == [
        ("Final accuracy", "50.0 %"),
        ("Backward transfer", "+1.0 pp"),
        ("Sent by clients", "2 KiB"),
        ("Sample visits", "34\u2009512"),
        ("Rejected updates", "3"),
    ]


def test_passes_and_the_parameters_in_use_are_told_where_there_are_any():
    pruned = {**SUMMARY, "parameters": 78042, "active_parameters": 38912, "flops_per_example": 1530000}
    lines = dict(summary_lines({**pruned, "pass_visits": 1200}))
    assert (lines["Sample visits"], lines["Visits without training"]) == ("34\u2009512", "1\u2009200")
    assert lines["Parameters used per example"] == short_count(38912) != lines["Parameters"] == short_count(78042)
    assert lines["FLOPs per example"] == short_count(1530000)
    for none in (pruned, {**pruned, "pass_visits": 0}):
        assert "Visits without training" not in dict(summary_lines(none))


def test_title():
    assert run_title(SUMMARY) == "fedfmx (paper) on a[b], seed 0"
    assert run_title({}) == "run"
    own = {"method": "mine:method", "preset": "paper"}
    assert run_title(own) == "mine:method", "of no paper that we know"
    assert run_title({**own, "preset": "loud"}) == "mine:method (loud)"


def test_rich_table_shows_everything_and_reads_no_markup():
    out = io.StringIO()
    Console(file=out, width=80).print(summary_table(SUMMARY))
    shown = out.getvalue()
    assert "on a[b]" in shown
    assert all(part in shown for line in summary_lines(SUMMARY) for part in line)


def test_plain_text_is_aligned():
    lines = summary_text(SUMMARY).splitlines()
    assert lines[0] == run_title(SUMMARY)
    assert len({len(line) for line in lines[1:]}) == 1
    assert summary_text({}) == "run"


def test_markdown():
    text = markdown_table({"a|b": SUMMARY, "c\nd": {"final_accuracy": 0.25}})
    lines = text.splitlines()
    assert lines[0] == "|  | a\\|b | c d |"
    assert lines[2] == "| Final accuracy | 50.0 % | 25.0 % |"
    assert "| Backward transfer | +1.0 pp | – |" in lines
    assert "Forgetting" not in text


DOMAINS = {
    "final_accuracy": 0.5,
    "domain_accuracy": {"photo": 0.75, "sketch": 0.25, "art": None},
    "domain_mean": 0.5,
    "domain_std": 0.25,
    "domain_std_ddof1": 0.35,
    "domain_worst": 0.25,
}
OWN = {
    "personal_domain_accuracy": {"photo": 0.75, "sketch": 0.5, "art": None},
    "personal_domain_mean": 0.625,
    "personal_domain_std": 0.125,
    "personal_domain_worst": 0.5,
}


def test_domains_are_shown_with_their_mean_deviation_and_worst():
    assert summary_lines(DOMAINS) == [
        ("Final accuracy", "50.0 %"),
        ("Domains, mean", "50.0 %"),
        ("Domains, deviation (ddof 0)", "25.0 pp"),
        ("Domains, worst", "25.0 %"),
        ("Domain photo", "75.0 %"),
        ("Domain sketch", "25.0 %"),
        ("Domain art", "–"),
    ]


def test_own_views_are_shown_where_they_are_others_than_the_global_one():
    same = {f"personal_{key}": value for key, value in DOMAINS.items() if key.startswith("domain")}
    noise = {**same, "personal_domain_accuracy": {"photo": 0.75 + 1e-15, "sketch": None, "art": None}}
    assert summary_lines({**DOMAINS, **same}) == summary_lines({**DOMAINS, **noise}) == summary_lines(DOMAINS)
    lines = summary_lines({**DOMAINS, **OWN})
    assert lines[4:7] == [
        ("Domains, own views, mean", "62.5 %"),
        ("Domains, own views, deviation (ddof 0)", "12.5 pp"),
        ("Domains, own views, worst", "50.0 %"),
    ]
    assert lines[-2] == ("Domain sketch, own views", "50.0 %")
    table = markdown_table({"a": {**DOMAINS, **same}, "b": {**DOMAINS, **OWN}})
    assert "| Domains, own views, mean | 50.0 % | 62.5 % |" in table
    assert "own views" not in markdown_table({"a": {**DOMAINS, **same}})
    shown = io.StringIO()
    Console(file=shown, width=80).print(summary_table({**DOMAINS, **OWN}))
    assert all(part in shown.getvalue() for line in lines for part in line)


def test_what_the_network_measures_itself_has_lines_of_its_own():
    told = {"final_accuracy": 0.5, "measures": {"accuracy_norm": 0.625, "perplexity": 812.345, "other": 2.0}}
    lines = [("Final accuracy, length-normalised", "62.5 %"), ("Perplexity", "812.3")]
    assert summary_lines(told)[1:] == lines
    shown = io.StringIO()
    Console(file=shown, width=80).print(summary_table(told))
    assert all(part in shown.getvalue() for line in lines for part in line)
    assert "| Perplexity | 812.3 | – |" in markdown_table({"a": told, "b": {"final_accuracy": 0.5, "measures": None}})
    for nothing in (None, {}, 5, {"perplexity": None}):
        assert summary_lines({"final_accuracy": 0.5, "measures": nothing}) == [("Final accuracy", "50.0 %")]


def test_of_many_domains_the_worst_and_the_best_are_told():
    found = {f"d{k}": k / 20 for k in range(20)} | {"empty": None}
    assert [name for name, _ in extremes(found)] == ["d0", "d1", "d2", "d17", "d18", "d19"]
    few = {"a": 0.5, "b": None}
    assert extremes(few) == [("a", 0.5), ("b", None)]
    assert len([label for label, _ in domain_lines({"domain_accuracy": found})]) == 6
