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


def outcome(p, better=False, n=3):
    return {"difference": 0.1, "p_t": p and p / 2, "p_holm": p, "p_wilcoxon": 0.25, "better": better, "n": n}


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
        "tests": {} if p is None else {"final_accuracy": outcome(p)},
        "ranks": {},
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
    assert second == "p: two-sided paired t-test of final accuracy against a|b over the seeds of both."
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


def test_marks_and_corrections_are_told_where_there_are_any():
    many = {f"m{k}": entry("c" * 64, 0.5, p=p) for k, p in enumerate((0.01, 0.2))}
    many["m0"]["tests"]["final_accuracy"]["better"] = True
    found = content(methods={"a|b": entry(KEYS["a|b"], 0.6), **many})
    assert [row[3] for row in report.grid(found)[1:]] == ["–", "0.010 *", "0.200"]
    told = next(line for line in report.notes(found) if line.startswith("p:"))
    assert told.endswith("over the seeds of both, corrected for 2 tests (Holm). *: better than a|b, p below 0.05.")
    many["m0"]["tests"]["final_accuracy"] |= {"n": 2}
    assert report.grid(found)[2][3] == "–", "too few seeds have neither p nor mark"


def test_mean_ranks_have_a_column_and_a_note():
    first, second = ({**entry(k * 64, 0.5), "ranks": {"final_accuracy": r}} for k, r in (("a", 1.25), ("b", 1.75)))
    found = content(methods={"x": first, "y": second})
    head, *cells = report.grid(found)
    assert [row[head.index("Mean rank")] for row in cells] == ["1.25", "1.75"]
    told = "Mean rank: by final accuracy on each seed that all have; 1 is the best"
    assert f"{told}." in report.notes(found)
    assert f"{told}, the lowest." in report.notes({**found, "lower_is_better": True})
    assert [row["final_accuracy_rank"] for row in report.rows(found)] == [1.25, 1.75]
    lines = list(csv.DictReader(io.StringIO(report.csv_text(found))))
    assert {(line["label"], line["mean_rank"]) for line in lines} == {("x", "1.25"), ("y", "1.75")}


def test_costs_of_a_run_are_columns_where_they_are_known():
    costs = {"train_flops": 1.54e12, "own_peak_rss_bytes": 3 * 2**29}
    head, first, second = report.grid(content(methods={"x": entry("a" * 64, 0.5, **costs), "y": entry("b" * 64, 0.5)}))
    shown = [dict(zip(head, row, strict=True)) for row in (first, second)]
    assert [row["Training FLOPs"] for row in shown] == ["1.54 T", "–"]
    assert [row["Peak memory"] for row in shown] == ["1.5 GiB", "–"]


def test_a_comparison_from_before_corrections_is_still_read(tmp_path):
    old = content()
    for one in old["methods"].values():
        del one["ranks"]
        for test in one["tests"].values():
            del test["p_holm"], test["better"]
    (tmp_path / "compare.json").write_text(json.dumps(old))
    assert not any("p of" in head for head in report.grid(report.read_comparison(tmp_path))[0])


def test_the_runs_of_a_setting_are_beside_its_folder(tmp_path):
    found = content(runs_folder="../runs")
    assert set(report.run_folders(tmp_path, found).values()) >= {tmp_path / "../runs" / ("a" * 63 + "0")}
    (tmp_path / "compare.json").write_text(json.dumps(content(runs_folder="/etc")))
    with pytest.raises(ConfigError, match=r"compare.json' is damaged \(its runs are in none of runs, ../runs\)"):
        report.read_comparison(tmp_path)


def test_the_table_for_a_paper_is_escaped():
    label = "my_own+a=50%&b[*]"
    found = content(
        title="Comparison of_2", methods={label: entry("a" * 64, 0.5), "slow": entry("b" * 64, 0.4, p=0.01)}
    )
    made = report.latex({**found, "reference": label})
    lines = made.splitlines()
    assert lines[1:3] == [r"\begin{table}", r"  \centering\small"] and lines[-1] == r"\end{table}"
    assert lines[3].startswith(r"  \caption{Comparison of\_2, quickstart (sklearn/digits). Accuracies in per cent")
    head = next(line for line in lines if line.startswith("    Method"))
    assert head.startswith(
        r"    Method & Seeds & \begin{tabular}[b]{@{}r@{}}Final \\ accuracy, \%\end{tabular} & "
        r"\begin{tabular}[b]{@{}r@{}}p of final \\ accuracy \\ against \\ my\_own+a=50\%\&b{[}{*}]\end{tabular} & "
    )
    rows = [line for line in lines if line.startswith("    my")]
    assert rows == [
        r"    my\_own+a=50\%\&b{[}{*}] & 3 & 50.0 $\pm$ 1.2 & -- & 1.23 \\",
        r"    my\_own+a=50\%\&b{[}{*}] & 14\,380 & 90\,668 (64\,280) \\",
    ]
    assert len(re.findall(r"(?<!\\)&", head)) == 4 and "{lrrrr}" in made and "{lrr}" in made


def test_fewer_than_three_common_seeds_have_no_p():
    few = entry(KEYS["slow"], 0.5, p=0.0001)
    few["tests"]["final_accuracy"]["n"] = 2
    two = content(methods={"a|b": entry(KEYS["a|b"], 0.6), "slow": few})
    assert not any("p of" in head for head in report.grid(two)[0])
    assert not any(line.startswith("p:") for line in report.notes(two))
    assert report.rows(two)[1]["final_accuracy_p"] is report.rows(two)[1]["final_accuracy_p_holm"] is None
    lines = list(csv.DictReader(io.StringIO(report.csv_text(two))))
    assert {(line["p_t"], line["p_holm"]) for line in lines} == {("", "")}, "in no form of the table"
    few["tests"]["final_accuracy"]["n"] = 3
    assert report.grid(two)[2][3] == "< 0.001" and report.rows(two)[1]["final_accuracy_p_holm"] == 0.0001


def with_test(key, p, reference=None, **changes):
    """Two methods with tests of two results; the first is the reference."""
    known = {"domain_mean": 0.5, "domain_std": 0.02, "domain_worst": 0.4, "personal_domain_mean": 0.5}
    slow = entry(KEYS["slow"], 0.5, p=0.0321, **known)
    slow["tests"][key] = outcome(p)
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
    assert report.rows(found)[1]["final_accuracy_p_holm"] == 0.0321
    ours, theirs = (list(csv.DictReader(io.StringIO(report.csv_text(one)))) for one in (found, usual))
    assert {key for a, b in zip(ours, theirs, strict=True) for key in a if a[key] != b[key]} == {"p_t", "p_holm"}
    assert (ours[-1]["p_holm"], theirs[-1]["p_holm"]) == ("0.0004", "0.0321")


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
    slow["tests"] = {metric: outcome(0.5)}
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
    told = "joint pools the data of all clients: a reference, not a federation; it has no traffic and no rank."
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
    assert (second["final_accuracy_p"], second["final_accuracy_p_holm"]) == (0.01605, 0.0321)
    assert second["final_accuracy_high"] == pytest.approx(0.512)


def test_csv_has_one_line_per_run_with_raw_numbers():
    ill = entry(KEYS["slow"], 0.25, missing={"1": None, "2": "broken"})
    lines = list(csv.DictReader(io.StringIO(report.csv_text(content(methods={"slow, very": ill})))))
    assert [line["state"] for line in lines] == ["done", "missing", "failed"]
    assert [line["seed"] for line in lines] == ["0", "1", "2"]
    assert lines[0]["label"] == "slow, very" and lines[0]["hash"] == "b" * 63 + "0"
    assert float(lines[0]["final_accuracy"]) == 0.25 and lines[1]["final_accuracy"] == ""
    begun = report.csv_text(content(methods={"slow": {**ill, "begun": [1]}}))
    assert [line["state"] for line in csv.DictReader(io.StringIO(begun))] == ["done", "unfinished", "failed"]


def test_perplexity_is_no_per_cent_and_can_be_what_is_tested():
    tests = {"measures.perplexity": outcome(0.02, better=True)}
    other = {**entry("b" * 64, 0.5, **{"measures.accuracy_norm": 0.25}), "tests": tests}
    other["metrics"]["measures.perplexity"] = interval(812.345, 12.5)
    methods = {"fedavg": entry("a" * 64, 0.5, **{"measures.perplexity": 900.0}), "other": other}
    found = content(methods=methods, metric="measures.perplexity", reference="fedavg")
    head, first, second = report.grid(found)
    shown = [dict(zip(head, row, strict=True)) for row in (first, second)]
    assert [row["Perplexity"] for row in shown] == ["900", "812.3 ± 12.5"]
    assert [row["Final accuracy, length-normalised, %"] for row in shown] == ["–", "25.0"]
    assert shown[1]["p of perplexity against fedavg"] == "0.020 *"


def test_the_documentation_names_every_column():
    page = (Path(__file__).parents[2] / "docs" / "compare.md").read_text(encoding="utf-8")
    told = re.findall(r"`([\w.]+)`", page.partition("## The folder")[2].partition("## From Python")[0])
    fixed = report.csv_text(content(methods={})).strip().split(",")
    assert [column for column in (*fixed, *MEASURES) if column not in told] == []
    assert "domain_accuracy[NAME]" in page
    every = {key: interval(0.5) for key in (*MEASURES, "domain_accuracy[NAME]")}
    full = {**entry("a" * 64, 0.5, p=0.5), "metrics": every, "ranks": {"final_accuracy": 1.5}}
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
    assert "Comparison of 2 methods, quickstart (sklearn/digits)" in page
    assert "Domain &lt;art&gt;, %" in page and "37.5" in page
    assert "Missing: top1, seed 1; it has not been run yet." in page


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
