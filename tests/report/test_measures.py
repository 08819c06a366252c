"""Curves of what a network measures of itself, and its numbers on the page."""

from __future__ import annotations

import json

from fedloom.report import plots
from fedloom.report.html import write_report
from fedloom.report.measures import panels
from fedloom.report.record import RunRecord
from fedloom.report.tables import markdown_table, summary_lines


def record(tmp_path, *found):
    rows = ({"stage": k, "scope": "stage", "round": None, "exchange": None, "measures": m} for k, m in enumerate(found))
    return RunRecord(tmp_path, metrics=tuple(rows))


def drawn(found):
    made = plots.figure(8, 3)
    with plots.styled():
        for ax, draw in zip(made.subplots(1, len(found), squeeze=False)[0], found, strict=True):
            draw(ax)
    return made


def test_every_measure_of_several_stages_has_its_panel(tmp_path):
    first = {"matched_cosine": 0.5, "alignment": 0.25, "other": 1.0}
    made = drawn(panels(record(tmp_path, first, {"alignment": -0.125}, {"matched_cosine": 0.75, "alignment": None})))
    assert [ax.get_title(loc="left") for ax in made.axes] == ["Alignment over tasks", "Matched cosine over tasks"]
    (alignment,), (matched,) = (ax.get_lines() for ax in made.axes)
    assert (list(alignment.get_xdata()), list(alignment.get_ydata())) == ([0, 1], [0.25, -0.125])
    assert (list(matched.get_xdata()), list(matched.get_ydata())) == ([0, 2], [0.5, 0.75])
    low, high = made.axes[1].get_ylim()
    assert low == 0 and high >= 0.75, "from zero on, so that a small change does not look like a large one"
    assert made.axes[0].get_ylim()[0] <= -0.125


def test_without_measures_of_several_stages_there_is_no_panel(tmp_path):
    for found in (
        (),
        ({"alignment": 0.5},),
        (None, None),
        ({"alignment": 0.5}, {"alignment": "odd"}),
        ({"x": 1.0},) * 2,
    ):
        assert panels(record(tmp_path, *found)) == []


def test_the_page_the_summary_and_the_comparison_show_alignment(tmp_path, write_run):
    folder = write_run(tmp_path / "run", stages=3)
    plain = write_report([folder], tmp_path / "plain.html").read_text()
    assert "Alignment over tasks" not in plain and ">alignment<" not in plain
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    told = {"alignment": 0.0625, "matched_cosine": 0.2712}
    rows = [{**row, "measures": told} if row["scope"] == "stage" else row for row in rows]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    summary = json.loads((folder / "summary.json").read_text()) | {"measures": told}
    (folder / "summary.json").write_text(json.dumps(summary))
    page = write_report([folder], tmp_path / "report.html").read_text()
    assert ">Alignment over tasks</text>" in page and ">Matched cosine over tasks</text>" in page
    assert "<b>0.0625</b><span>Alignment</span>" in page and "<td>0.2712</td>" in page
    assert "Of the global view, over the test examples" in page
    lines = dict(summary_lines(summary))
    assert lines["Alignment of pictures and texts"] == "0.0625"
    assert lines["Cosine of pictures and their texts"] == "0.2712"
    assert "| Alignment of pictures and texts | 0.0625 | – |" in markdown_table({"a": summary, "b": {}})
