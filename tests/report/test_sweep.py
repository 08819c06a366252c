"""The table of a sweep in every form."""

import csv
import io

from fedloom.report import sweep as report


def result(mean, half=None, **more):
    low, high = (None, None) if half is None else (mean - half, mean + half)
    none = dict.fromkeys(("std", "difference", "p_t", "p_holm", "rank"))
    return {**none, "mean": mean, "low": low, "high": high, "n": 3, "better": False, **more}


def setting(folder, best, missing=0, **results):
    told = {"set": {}, "dataset": "d", "scenario": "s", "complete": not missing, "missing": missing}
    return {"folder": folder, **told, "results": results, "best": best}


def content(**changes):
    return {
        "title": "Sweep of 2 methods over 2 settings",
        "recipe": "quickstart",
        "set": {"training.rounds": 2, "training.optimizer": {"lr": 0.1}},
        "reference": "a|b",
        "metric": "final_accuracy",
        "lower_is_better": False,
        "seeds": [0, 1, 2],
        "complete": True,
        "methods": ["a|b", "slow_1"],
        "settings": {
            "alpha 0.5": setting(
                "alpha-0.5", ["slow_1"], **{"a|b": result(0.5, 0.012), "slow_1": result(0.6, 0.02, better=True)}
            ),
            "x|y": setting("x-y", [], 3, **{"a|b": result(0.4)}),
        },
        "mean_rank": {"a|b": 2.0, "slow_1": 1.0},
        **changes,
    }


def test_cells_are_of_methods_and_settings():
    assert report.grid(content()) == [
        ["Method", "alpha 0.5", "x|y", "Mean rank"],
        ["a|b", "50.0 ± 1.2", "40.0", "2.00"],
        ["slow_1", "60.0 ± 2.0 *", "–", "1.00"],
    ]
    perplexity = content(metric="measures.perplexity", mean_rank={})
    assert report.grid(perplexity)[1] == ["a|b", "0.5 ± 0.012", "0.4", "–"]


def test_notes_say_what_cells_hold_and_what_is_missing():
    assert report.notes(content()) == [
        'Set: training.rounds=2, training.optimizer={"lr": 0.1}.',
        "Cells: final accuracy; mean ± half of the 95 % Student-t interval over seeds. Fractions in per cent.",
        "*: better than a|b by a two-sided paired t-test over seeds, p below 0.05, "
        "corrected within the setting (Holm).",
        "Mean rank: by the mean, over the settings that have every method; 1 is the best.",
        "x|y: 3 runs are missing; see x-y/compare.md.",
    ]
    told = "slow_1 pools the data of all clients: a reference, not a federation; it is in no rank and never bold."
    assert told in report.notes(content(pooled=["slow_1"]))
    plain = content(set={}, seeds=[0], metric="forgetting", lower_is_better=True, settings={}, mean_rank={})
    assert report.notes(plain) == ["Cells: forgetting, lower is better; one seed. Fractions in per cent."]


def test_markdown_and_latex_have_the_best_in_bold():
    lines = report.markdown(content()).splitlines()
    assert lines[0] == "**Sweep of 2 methods over 2 settings, quickstart**"
    assert lines[2:6] == [
        "| Method | alpha 0.5 | x\\|y | Mean rank |",
        "| --- | ---: | ---: | ---: |",
        "| a\\|b | 50.0 ± 1.2 | 40.0 | 2.00 |",
        "| slow_1 | **60.0 ± 2.0 *** | – | 1.00 |",
    ]
    assert lines[-1] == "- Bold: the best mean of a setting."
    made = report.latex(content()).splitlines()
    assert r"    slow\_1 & \textbf{60.0 $\pm$ 2.0 {*}} & -- & 1.00 \\" in made


def test_plain_text_is_aligned():
    lines = report.text(content()).splitlines()
    start = next(k for k, line in enumerate(lines) if line.startswith("Method"))
    assert lines[start + 1].index("2.00") == lines[start + 2].index("1.00")


def test_csv_and_rows_hold_raw_numbers():
    lines = list(csv.DictReader(io.StringIO(report.csv_text(content()))))
    assert [(line["setting"], line["label"], line["mean"]) for line in lines] == [
        ("alpha 0.5", "a|b", "0.5"), ("alpha 0.5", "slow_1", "0.6"), ("x|y", "a|b", "0.4"), ("x|y", "slow_1", ""),
    ]  # fmt: skip
    assert lines[1]["better"] == "true" and lines[2]["high"] == ""
    rows = report.rows(content())
    assert (rows[1]["mean"], rows[1]["better"], rows[3]["mean"]) == (0.6, True, None)
