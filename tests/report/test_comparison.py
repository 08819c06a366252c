import csv
import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from fedloom.core.errors import ConfigError
from fedloom.evaluate.comparison import MEASURES
from fedloom.report import comparison as report
from fedloom.report.columns import megabytes
from fedloom.report.html import write_report

KEYS = {"a|b": "a" * 64, "slow": "b" * 64}


def interval(mean, half=None, values=None):
    low, high = (None, None) if half is None else (mean - half, mean + half)
    values = {"0": mean} if values is None else values
    return {"mean": mean, "std": None, "low": low, "high": high, "n": len(values), "values": values}


def entry(key, accuracy, *, seeds=3, half=0.012, p=None, missing=None, **metrics):
    values = {str(seed): accuracy for seed in range(seeds) if str(seed) not in (missing or {})}
    costs = {"bytes_up": 1_234_567, "sample_visits": 14380, "parameters": 90668, "active_parameters": 64280}
    return {
        "method": {"name": "fedavg", "preset": "paper"},
        "runs": {str(seed): f"{key[:-1]}{seed}" for seed in range(seeds)},
        "missing": missing or {},
        "metrics": {
            "final_accuracy": interval(accuracy, half if len(values) > 1 else None, values),
            **{name: interval(value, values=dict.fromkeys(values, value)) for name, value in (costs | metrics).items()},
        },
        "tests": {} if p is None else {"final_accuracy": {"difference": 0.1, "p_t": p, "p_wilcoxon": 0.25, "n": 3}},
    }


def content(seeds=3, **changes):
    methods = {"a|b": entry(KEYS["a|b"], 0.6333, seeds=seeds), "slow": entry(KEYS["slow"], 0.5, seeds=seeds, p=0.0321)}
    return {
        "title": "Comparison of 2 methods",
        "recipe": "quickstart",
        "dataset": "sklearn/digits",
        "scenario": None,
        "reference": "a|b",
        "seeds": list(range(seeds)),
        "complete": True,
        "methods": methods,
        "budget": {"equal": True, "visits": {}, "share": {"a|b": 1.0, "slow": 1.0}},
        **changes,
    }


def test_cells_hold_mean_and_half_width_and_empty_columns_are_left_out():
    head, first, second = report.grid(content())
    assert head == [
        "Method", "Seeds", "Final accuracy, %", "p of final accuracy against a|b", "MB sent by clients",
        "Sample visits", "Parameters (active)",
    ]  # fmt: skip
    assert first == ["a|b", "3", "63.3 ± 1.2", "–", "1.23", "14\u2009380", "90\u2009668 (64\u2009280)"]
    assert second[2:4] == ["50.0 ± 1.2", "0.032"]
    domains = content(methods={"a|b": entry(KEYS["a|b"], 0.5, domain_mean=0.5, domain_std=0.02, domain_worst=0.4)})
    assert [h for h in report.grid(domains)[0] if h.startswith("Domains")] == [
        "Domains, mean, %", "Domains, deviation (ddof 0), pp", "Domains, worst, %",
    ]  # fmt: skip


def test_each_domain_has_a_column_before_their_mean():
    first = {"domain_accuracy[photo]": 0.75, "domain_accuracy[a\nsketch|x]": 0.25, "domain_mean": 0.5}
    second = {"domain_accuracy[photo]": 0.5, "domain_accuracy[art]": 0.5, "domain_mean": 0.5}
    found = content(methods={"a|b": entry(KEYS["a|b"], 0.5, **first), "slow": entry(KEYS["slow"], 0.5, **second)})
    head, *cells = report.grid(found)
    place = head.index("Domains, mean, %") - 3
    assert head[place : place + 3] == ["Domain photo, %", "Domain a sketch|x, %", "Domain art, %"]
    assert [row[place : place + 3] for row in cells] == [["75.0", "25.0", "–"], ["50.0", "–", "50.0"]]
    assert "| Domain photo, % | Domain a sketch\\|x, % | Domain art, % | Domains, mean, % |" in report.markdown(found)
    assert "sketch|x, %" in report.text(found)
    lines = list(csv.DictReader(io.StringIO(report.csv_text(found))))
    assert [line["domain_accuracy[photo]"] for line in lines] == ["0.75"] * 3 + ["0.5"] * 3
    assert [line["domain_accuracy[art]"] for line in lines] == [""] * 3 + ["0.5"] * 3
    assert report.rows(found)[0]["domain_accuracy[photo]"] == 0.75
    assert not any(head.startswith("Domain") for head in report.grid(content())[0])


def test_own_views_have_columns_where_those_of_some_method_are_others_than_the_global_one():
    known = {"domain_mean": 0.5, "domain_std": 0.02, "domain_worst": 0.4}
    same, own = ({f"personal_{key}": value + more for key, value in known.items()} for more in (1e-15, 0.1))
    first, second = entry(KEYS["a|b"], 0.5, **known, **same), entry(KEYS["slow"], 0.5, **known, **own)
    assert not [head for head in report.grid(content(methods={"a|b": first}))[0] if "own views" in head]
    head, *cells = report.grid(content(methods={"a|b": first, "slow": second}))
    place = head.index("Domains, worst, %") + 1
    assert head[place : place + 3] == [
        "Domains, own views, mean, %", "Domains, own views, deviation (ddof 0), pp", "Domains, own views, worst, %",
    ]  # fmt: skip
    assert [row[place : place + 3] for row in cells] == [["50.0", "2.0", "40.0"], ["60.0", "12.0", "50.0"]]


@pytest.mark.parametrize(
    ("value", "text"), [(11_700, "0.0117"), (99_900_000, "99.9"), (324_000_000, "324"), (4_800_000_000, "4\u2009800")]
)
def test_megabytes(value, text):
    assert megabytes(value) == text


def test_tiny_p_values_are_bounds():
    small = content(methods={"a|b": entry(KEYS["a|b"], 0.5, p=0.0)})
    assert report.grid(small)[1][3] == "< 0.001"


def test_notes_say_how_to_read_the_numbers():
    first, second, third = report.notes(content())
    assert "half of the 95 % Student-t interval" in first
    assert "paired t-test of final accuracy against a|b" in second and "not corrected" in second
    assert third == "Sample visits are equal for all."
    one = content(seeds=1, methods={"a|b": entry(KEYS["a|b"], 0.5, seeds=1)})
    assert report.grid(one)[1][2] == "50.0"
    assert report.notes(one)[:2] == [
        "Accuracies in per cent, forgetting in percentage points.",
        "One seed: no interval and no test. Run at least 3.",
    ]
    assert "2 seeds: intervals say little, and a test nothing. Run at least 3." in report.notes(content(seeds=2))
    values = {"training.rounds": 2, "training.optimizer.betas": [0.9, 0.99], "stream.kind": "static"}
    assert report.notes(content(settings=values))[0] == (
        "Set: training.rounds=2, training.optimizer.betas=[0.9, 0.99], stream.kind=static."
    )
    assert report.notes(content(settings={})) == report.notes(content())


def test_fewer_than_three_common_seeds_have_no_p():
    few = entry(KEYS["slow"], 0.5, p=0.0001)
    few["tests"]["final_accuracy"]["n"] = 2
    two = content(methods={"a|b": entry(KEYS["a|b"], 0.6), "slow": few})
    assert not any("p of" in head for head in report.grid(two)[0])
    assert not any(line.startswith("p:") for line in report.notes(two))
    assert report.rows(two)[1]["final_accuracy_p"] is None
    few["tests"]["final_accuracy"]["n"] = 3
    assert report.grid(two)[2][3] == "< 0.001" and report.rows(two)[1]["final_accuracy_p"] == 0.0001


def with_test(key, p, reference=None, **changes):
    """Two methods with tests of two results; the first is the reference."""
    known = {"domain_mean": 0.5, "domain_std": 0.02, "domain_worst": 0.4, "personal_domain_mean": 0.5}
    slow = entry(KEYS["slow"], 0.5, p=0.0321, **known)
    slow["tests"][key] = {"difference": 0.1, "p_t": p, "p_wilcoxon": 0.25, "n": 3}
    return content(methods={"a|b": reference or entry(KEYS["a|b"], 0.6, **known), "slow": slow}, **changes)


def test_the_metric_is_the_one_whose_test_is_shown():
    found = with_test("personal_domain_mean", 0.0004, metric="personal_domain_mean")
    head, first, second = report.grid(found)
    place = head.index("p of personal domain mean against a|b")
    assert (first[place], second[place]) == ("–", "< 0.001") and sum(h.startswith("p of") for h in head) == 1
    assert head[place - 1] == "Domains, own views, mean, %" and second[place - 1] == "50.0", "what is tested is shown"
    assert any(
        line.startswith("p: two-sided paired t-test of personal domain mean against") for line in report.notes(found)
    )
    usual = with_test("personal_domain_mean", 0.0004)
    head, _, second = report.grid(usual)
    assert second[head.index("p of final accuracy against a|b")] == "0.032" and "own views" not in "".join(head)
    assert report.grid({**usual, "metric": "final_accuracy"}) == report.grid(usual)
    assert report.rows(found) == report.rows(usual), "numbers are those of every metric"
    assert report.rows(found)[1]["final_accuracy_p"] == 0.0321 and report.csv_text(found) == report.csv_text(usual)


@pytest.mark.parametrize(
    ("metric", "head", "cell", "words"),
    [
        ("per_client_accuracy_worst10", "Clients, worst tenth, %", "25.0", "per client accuracy worst10"),
        ("per_client_accuracy_mean", "Clients, mean, %", "25.0", "per client accuracy mean"),
        ("backward_transfer", "Backward transfer, pp", "25.0", "backward transfer"),
        ("domain_accuracy[Art Work]", "Domain Art Work, %", "25.0", "domain Art Work"),
        ("domain_worst", "Domains, worst, %", "25.0", "domain worst"),
    ],
)
def test_a_metric_without_a_column_of_its_own_gets_one(metric, head, cell, words):
    slow = entry(KEYS["slow"], 0.5, **{metric: 0.25})
    slow["tests"] = {metric: {"difference": 0.1, "p_t": 0.5, "p_wilcoxon": 0.25, "n": 3}}
    heads, row = report.grid(content(methods={"slow": slow}, reference="x", metric=metric))
    assert heads.count(head) == 1 and row[heads.index(head)] == cell
    assert row[heads.index(f"p of {words} against x")] == "0.500"


def test_a_reference_without_the_metric_is_told():
    told = "a|b has no domain mean, so nothing is tested against it."
    bare = entry(KEYS["a|b"], 0.6)
    found = with_test("domain_mean", None, bare, metric="domain_mean")
    assert told in report.notes(found) and not any(head.startswith("p of") for head in report.grid(found)[0])
    assert told not in report.notes(with_test("domain_mean", 0.5, metric="domain_mean"))
    assert not any("so nothing is tested" in line for line in report.notes(content(metric="final_accuracy")))
    none_yet = {**bare, "metrics": {}}
    assert told not in report.notes(content(methods={"a|b": none_yet}, metric="domain_mean"))


def test_methods_with_views_of_their_own_are_told_with_the_metric_that_fits():
    told = "clients predict with views of their own, and the global view may mean little"
    known = {"domain_mean": 0.5, "domain_std": 0.02, "domain_worst": 0.4}
    same, own = ({f"personal_{key}": value + more for key, value in known.items()} for more in (1e-15, 0.1))
    first = {**entry("a" * 64, 0.5, **known, **same), "personal": True}
    second, third = (entry(key * 64, 0.5, **known, **own) for key in "bc")
    methods = {"alike": first, "fedbn": second, "fdse": third}

    def lines(**changes):
        return [line for line in report.notes(content(**changes)) if "views of their own" in line]

    assert lines(methods=methods) == [f"fedbn, fdse: {told}; --metric personal_domain_mean tests by own views."]
    assert lines(methods=methods, metric="personal_domain_worst") == [f"fedbn, fdse: {told}."]
    assert not lines(methods={"alike": first}) and not lines()
    plain = {**entry("d" * 64, 0.5, per_client_accuracy_mean=0.6), "personal": True}
    common = {**plain, "personal": False}
    assert lines(methods={"fedavg": common, "fedbn": plain}) == [
        f"fedbn: {told}; --metric per_client_accuracy_mean tests by own views."
    ]
    assert not lines(methods={"fedbn": {**entry("d" * 64, 0.5), "personal": True}}), "nothing of clients was measured"


def options(name, **given):
    return {**entry("a" * 64, 0.5), "method": {"name": name, "preset": given.pop("preset", "paper"), **given}}


def differences(methods):
    return [line for line in report.notes(content(methods=methods)) if " differs: " in line]


def test_options_that_differ_between_methods_are_named_unless_labels_do():
    methods = {
        "fedavg": options("fedavg", label_scope="seen", uniform=False),
        "fedavg+label_scope=current": options("fedavg", label_scope="current", uniform=False),
        "fedewc": options("fedewc", label_scope="current", uniform=False, lam=5.0),
        "fedlwf": options("fedlwf", label_scope="current", uniform=False),
        "joint": options("joint"),
    }
    assert differences(methods) == ["label_scope differs: seen (fedavg), current (fedewc, fedlwf)."]
    del methods["fedavg"]
    assert not differences(methods)
    assert not differences({"a": options("x", k=1), "b": options("x", k=2)}), "settings of one method"
    assert not differences({"a": options("x", preset="paper"), "b": options("y", preset="code")})
    assert not differences({"x + uniform = 1": options("x", uniform=1), "y": options("y", uniform=2)})
    assert differences({"x+nonuniform=1": options("x", uniform=[1]), "y": options("y", uniform=None)}) == [
        "uniform differs: [1] (x+nonuniform=1), null (y)."
    ]


@pytest.mark.parametrize("option", ["label_scope", "uniform", "buffers", "visits"])
def test_options_that_mean_the_same_in_every_method_are_compared_between_methods(option):
    methods = {"x": options("x", **{option: "a"}), "y": options("y", **{option: "b"})}
    assert differences(methods) == [f"{option} differs: a (x), b (y)."]


@pytest.mark.parametrize("option", ["alpha", "beta", "tau", "importance", "mu", "weights"])
def test_options_that_share_only_a_name_are_not_compared_between_methods(option):
    methods = {"x": options("x", **{option: 0.1}), "y": options("y", **{option: 0.2}), "z": options("x", **{option: 3})}
    assert not differences(methods)


def test_pooled_data_are_told():
    told = "joint pools the data of all clients: a reference, not a federation; it has no traffic."
    pooled = {"fedavg": entry("a" * 64, 0.5), "joint": {**entry("b" * 64, 0.5), "pooled": True}}
    assert [line for line in report.notes(content(methods=pooled)) if "pools" in line] == [told]


def test_notes_name_unequal_budgets_shared_runs_troubles_and_what_is_missing():
    unequal = {"equal": False, "visits": {}, "share": {"a|b": 1.0, "slow": 1.25}}
    assert "Sample visits differ from those of a|b: slow makes 1.25 times as many." in report.notes(
        content(budget=unequal)
    )
    assert not any("visits" in line for line in report.notes(content(budget={"equal": None, "share": {}})))
    alike = content(methods={"x": entry("c" * 64, 0.5), "y": entry("c" * 64, 0.5)})
    assert "The same configuration, so the same runs: x, y." in report.notes(alike)
    ill = entry(KEYS["slow"], 0.5, failed_clients=2, missing={"1": None, "2": "no client replied"})
    told = report.notes(content(methods={"slow": ill}))
    assert "slow: 2 failed clients (seed 0); see log.txt of these runs." in told
    assert "Missing: slow, seed 1; it has not been run yet." in told
    assert "Missing: slow, seed 2: no client replied" in told
    assert report.grid(content(methods={"slow": ill}))[1][1] == "1 of 3"
    told = report.notes(content(methods={"slow": {**ill, "begun": [1, 2]}}))
    assert "Missing: slow, seed 1; begun, not ended." in told and "Missing: slow, seed 2: no client replied" in told


def test_markdown_is_a_table_with_notes():
    lines = report.markdown(content()).splitlines()
    assert lines[0] == "**Comparison of 2 methods, quickstart (sklearn/digits)**"
    assert lines[2].startswith("| Method | Seeds | Final accuracy, % | p of final accuracy against a\\|b |")
    assert lines[3] == "| --- | " + " | ".join(["---:"] * 6) + " |"
    assert lines[4].startswith("| a\\|b | 3 | 63.3 ± 1.2 |")
    assert lines[7].startswith("- Accuracies in per cent")


def test_plain_text_is_aligned_under_wrapped_heads():
    lines = report.text(content()).splitlines()
    start = next(k for k, line in enumerate(lines) if line.startswith("Method"))
    assert lines[start].split()[:6] == ["Method", "Seeds", "accuracy,", "%", "against", "a|b"]
    where = lines[start + 1].index("63.3 ± 1.2")
    assert lines[start + 2].index("50.0 ± 1.2") == where


@pytest.mark.parametrize(("width", "parts"), [(200, 1), (60, 2)])
def test_a_narrow_terminal_gets_more_tables_and_no_number_less(width, parts):
    made = report.tables(content(), width)
    assert len(made) == parts
    out = io.StringIO()
    console = Console(file=out, width=width)
    for table in made:
        console.print(table)
    for cell in (cell for row in report.grid(content())[1:] for cell in row):
        assert cell in out.getvalue()
    assert out.getvalue().count("slow") == parts


def test_rows_hold_plain_numbers():
    first, second = report.rows(content())
    assert first["label"] == "a|b" and first["seeds"] == 3 and first["final_accuracy"] == 0.6333
    assert second["final_accuracy_p"] == 0.0321 and second["final_accuracy_high"] == pytest.approx(0.512)


def test_csv_has_one_line_per_run_with_raw_numbers():
    ill = entry(KEYS["slow"], 0.25, missing={"1": None, "2": "broken"})
    lines = list(csv.DictReader(io.StringIO(report.csv_text(content(methods={"slow, very": ill})))))
    assert [line["state"] for line in lines] == ["done", "missing", "failed"]
    assert [line["seed"] for line in lines] == ["0", "1", "2"]
    assert lines[0]["label"] == "slow, very" and lines[0]["hash"] == "b" * 63 + "0"
    assert float(lines[0]["final_accuracy"]) == 0.25 and lines[1]["final_accuracy"] == ""
    begun = report.csv_text(content(methods={"slow": {**ill, "begun": [1]}}))
    assert [line["state"] for line in csv.DictReader(io.StringIO(begun))] == ["done", "unfinished", "failed"]


def test_the_documentation_names_every_column():
    page = (Path(__file__).parents[2] / "docs" / "compare.md").read_text(encoding="utf-8")
    told = re.findall(r"`(\w+)`", page.partition("## The folder")[2].partition("## From Python")[0])
    fixed = report.csv_text(content(methods={})).strip().split(",")
    assert [column for column in (*fixed, *MEASURES) if column not in told] == []
    assert "domain_accuracy[NAME]" in page
    every = {key: interval(0.5) for key in (*MEASURES, "domain_accuracy[NAME]")}
    full = {**entry("a" * 64, 0.5, p=0.5), "metrics": every}
    table = page.partition("## The table")[2].partition("`63.3 ± 1.2`")[0]
    for head in report.grid(content(methods={"a|b": full}))[0][2:]:
        assert head.partition(",")[0].partition(" against")[0] in table, head


def test_the_report_of_a_comparison_shows_its_table_and_its_runs(tmp_path, write_run):
    first = entry("a" * 64, 0.6, seeds=1, **{"domain_accuracy[<art>]": 0.375})
    methods = {"full": first, "top1": entry("b" * 64, 0.5, seeds=2, missing={"1": None})}
    (tmp_path / "compare.json").write_text(json.dumps(content(methods=methods)))
    for key in ("a" * 63 + "0", "b" * 63 + "0"):
        write_run(tmp_path / "runs" / key, stages=2, rounds=1)
    page = write_report([tmp_path], tmp_path / "report.html").read_text()
    assert "Comparison of 2 methods, quickstart (sklearn/digits)" in page and "2 runs compared" in page
    assert "Domain &lt;art&gt;, %" in page and "37.5" in page
    assert "<h2>full, seed 0</h2>" in page and "<h2>top1, seed 0</h2>" in page
    assert "Missing: top1, seed 1; it has not been run yet." in page
    both = write_report([tmp_path, tmp_path / "runs" / ("a" * 63 + "0")], tmp_path / "both.html").read_text()
    assert "3 runs compared" in both
    assert "Accuracy against" not in page, "both send as much"


def test_the_report_of_a_comparison_shows_accuracy_against_costs(tmp_path, write_run):
    cheap, dear = (entry(key * 64, 0.5, flops_per_example=cost) for key, cost in (("a", 1e6), ("b", 1e9)))
    (tmp_path / "compare.json").write_text(json.dumps(content(methods={"<cheap>": cheap, "dear": dear})))
    for key in "ab":
        for seed in range(3):
            write_run(tmp_path / "runs" / f"{key * 63}{seed}", stages=1, rounds=1)
    page = write_report([tmp_path], tmp_path / "report.html").read_text()
    assert page.count("Accuracy against operations</text>") == 1 and "Accuracy against traffic" not in page
    assert "</svg>&lt;cheap&gt;</li>" in page and "</svg>dear</li>" in page


def test_runs_that_two_labels_share_are_shown_once(tmp_path):
    methods = {"x": entry("c" * 64, 0.5, seeds=2), "y": entry("c" * 64, 0.5, seeds=2)}
    found = report.run_folders(tmp_path, content(methods=methods))
    assert list(found) == ["x, seed 0", "x, seed 1"]
    assert found["x, seed 1"] == tmp_path / "runs" / ("c" * 63 + "1")


def test_comparisons_that_cannot_be_shown_are_refused_in_words(tmp_path):
    methods = {"x": entry("c" * 64, 0.5, seeds=1, missing={"0": None})}
    (tmp_path / "compare.json").write_text(json.dumps(content(methods=methods)))
    with pytest.raises(ConfigError, match=r"no run of the comparison .* has ended; go on with the same"):
        write_report([tmp_path], tmp_path / "report.html")
    runs = [
        json.dumps(content(methods={"x": {**methods["x"], "runs": runs}})) for runs in ([1], {"0": 5}, {"0": "../x"})
    ]
    huge = json.dumps(content(methods={"x": entry("c" * 64, 0.5, sample_visits=float("inf"))}))
    deep = "[" * 100_000
    for damage in ("{", "[]", "{}", '{"methods": {"x": {}}}', deep, f'{{"methods": {deep}', huge, *runs):
        (tmp_path / "compare.json").write_text(damage)
        with pytest.raises(ConfigError, match=r"compare.json' is damaged .*; call `fedloom compare` again"):
            write_report([tmp_path], tmp_path / "report.html")
