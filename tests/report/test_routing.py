import json
import re

import numpy as np
import pytest

from fedloom.report import plots
from fedloom.report.html import write_report
from fedloom.report.record import RunRecord
from fedloom.report.routing import expert_curves, panels
from fedloom.report.svg import svg

ROUND = {"stage": 0, "scope": "round", "exchange": "train"}


def record(tmp_path, *rows):
    return RunRecord(tmp_path, metrics=tuple({**ROUND, "round": k, **row} for k, row in enumerate(rows)))


def drawn(found):
    made = plots.figure(8, 3)
    with plots.styled():
        for ax, draw in zip(made.subplots(1, len(found), squeeze=False)[0], found, strict=True):
            draw(ax)
    return made


def test_every_metric_of_routing_has_its_panel(tmp_path):
    first = {"train/gate_entropy": 1.25, "train/load_cv": 0.5, "train/expert_10_usage": 0.75, "train/expert_2": 0.25}
    found = record(tmp_path, first, {"train/gate_entropy": 1.0, "train/expert_2": "odd"}, {"train/expert_2": 0.5})
    made = drawn(panels(found))
    entropy, load, experts = made.axes[:3]
    (line,) = entropy.get_lines()
    assert (list(line.get_xdata()), list(line.get_ydata())) == ([1, 2], [1.25, 1.0])
    assert entropy.get_ylim()[0] == 0 and entropy.get_ylabel() == "nats"
    assert list(load.get_lines()[0].get_ydata()) == [0.5]
    (image,) = experts.get_images()
    shown = np.ma.filled(image.get_array(), np.nan)
    np.testing.assert_array_equal(shown, [[0.25, np.nan, 0.5], [0.75, np.nan, np.nan]])
    assert [text.get_text() for text in experts.get_yticklabels()] == ["2", "10"], "in the order of the experts"
    assert [ax.get_title(loc="left") for ax in made.axes[:3]] == ["Gate entropy", "Expert load", "Use of each expert"]


def test_experts_are_found_by_their_number_and_rounds_run_through_stages(tmp_path):
    later = {**ROUND, "stage": 1, "round": 0, "train/expert_0_usage": 0.5, "train/expert_x": 1.0, "train/experts": 1.0}
    found = RunRecord(tmp_path, metrics=({**ROUND, "round": 0, "train/expert_0_usage": 0.25}, later))
    assert expert_curves(found) == {0: {1: 0.25, 2: 0.5}}


@pytest.mark.parametrize("row", [{}, {"train/loss": 1.0}, {"train/gate_entropy": None, "train/expert_1": "high"}])
def test_without_metrics_of_routing_there_is_no_panel(tmp_path, row):
    assert panels(record(tmp_path, row)) == []


def test_a_picture_of_many_experts_and_rounds_stays_small_and_in_the_page(tmp_path):
    rows = [{f"train/expert_{e}_usage": (e + k) % 7 / 7 for e in range(64)} for k in range(200)]
    with plots.styled():
        text = svg(drawn(panels(record(tmp_path, *rows))), "x")
    assert len(text) < 100_000
    assert all(link.startswith(("data:", "#")) for link in re.findall(r'href="([^"]*)', text))


def test_the_page_shows_routing_and_groups_of_maps(tmp_path, write_run):
    folder = write_run(tmp_path / "run", stages=1)
    plain = write_report([folder], tmp_path / "plain.html").read_text()
    assert "Gate entropy" not in plain and '<div class="maps">' not in plain
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    told = [{**row, "train/gate_entropy": 1.0} if row["scope"] == "round" else row for row in rows]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, told)))
    whole = {"title": "Overlap, layer <1>", "axes": ["client", "expert"], "rows": [0], "columns": [0, 1], "note": ""}
    tables = [{**whole, "values": [[0.5, None]], "group": "Overlap"}]
    (folder / "facts.json").write_text(json.dumps({"tables": tables}))
    page = write_report([folder], tmp_path / "report.html").read_text()
    assert ">Gate entropy</text>" in page and "<h3>Overlap</h3>" in page
    assert "<caption>layer &lt;1&gt;</caption>" in page
    assert '<td style="--v:1.000" title="0.5"></td><td title="–"></td>' in page
