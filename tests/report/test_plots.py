import re
from xml.etree import ElementTree

import pytest

from fedloom.report import plots
from fedloom.report.record import RunRecord, read_run

PNG = b"\x89PNG\r\n\x1a\n"


def draw(function, *args):
    with plots.styled():
        ax = plots.figure(4, 3).subplots()
        function(ax, *args)
    return ax


def lines_of(ax):
    return {line.get_label(): line for line in ax.get_lines()}


def test_curve_holds_the_recorded_values(tmp_path, write_run):
    record = read_run(write_run(tmp_path / "run", stages=3))
    lines = lines_of(draw(plots.accuracy_curve, record))
    assert list(lines["all seen classes"].get_xdata()) == [0, 1, 2]
    assert list(lines["all seen classes"].get_ydata()) == [100 * row["accuracy"] for row in record.stages]
    assert list(lines["first task"].get_ydata()) == [100 * row[0] for row in record.matrix]
    assert list(lines["chance"].get_ydata()) == pytest.approx([50.0, 25.0, 100 / 6])


def test_domains_are_lines_with_their_mean_and_deviation(tmp_path):
    found = [{"a": 0.5, "b": None, "c": None}, {"a": 0.25, "b": 0.75, "c": None}]
    metrics = tuple({"stage": t, "scope": "stage", "accuracy/domains": row} for t, row in enumerate(found))
    record = RunRecord(tmp_path, metrics=metrics)
    assert record.domain_curves == {"a": [0.5, 0.25], "b": [None, 0.75]}
    ax = draw(plots.domain_curves, record)
    a, b, mean = ax.get_lines()
    assert list(a.get_ydata()) == [50.0, 25.0] and list(b.get_ydata())[1] == 75.0
    assert list(mean.get_ydata()) == [50.0, 50.0]
    assert (a.get_color(), b.get_color()) == (plots.look(0)[0], plots.look(1)[0])
    (band,) = ax.collections
    edges = band.get_paths()[0].vertices
    assert {y for x, y in edges if x == 1} == {25.0, 75.0} and {y for x, y in edges if x == 0} == {50.0}


def test_heat_map_writes_every_value_once():
    matrix = [[0.9, None], [0.4, 0.876]]
    ax = draw(plots.accuracy_heatmap, matrix)
    assert {(*t.get_position(), t.get_text()) for t in ax.texts} == {(0, 0, "90"), (0, 1, "40"), (1, 1, "88")}


def test_bars_and_loss(tmp_path, write_run):
    record = read_run(write_run(tmp_path / "run", stages=1, rounds=4))
    bars = draw(plots.accuracy_bars, record)
    assert [round(p.get_width(), 6) for p in bars.patches][-1] == round(100 * record.stages[0]["accuracy"], 6)
    (line,) = draw(plots.loss_curve, record).get_lines()
    assert list(line.get_ydata()) == [row["train/loss"] for row in record.rounds]
    assert list(line.get_xdata()) == [1, 2, 3, 4]


@pytest.mark.parametrize("stages", [1, 2, 20])
def test_picture_file(tmp_path, write_run, stages):
    record = read_run(write_run(tmp_path / "run", stages=stages))
    path = plots.save_accuracy(record, tmp_path / "accuracy.png")
    assert path.read_bytes().startswith(PNG)


def test_pictures_of_almost_nothing(tmp_path):
    for record in (
        RunRecord(tmp_path),
        RunRecord(tmp_path, metrics=({"stage": 0, "scope": "stage"},)),
        RunRecord(tmp_path, metrics=({"stage": 0, "scope": "stage"}, {"stage": 1, "scope": "stage", "accuracy": 0.5})),
    ):
        assert plots.save_accuracy(record, tmp_path / "a.png").read_bytes().startswith(PNG)


def test_the_same_run_gives_the_same_file(tmp_path, write_run):
    record = read_run(write_run(tmp_path / "run", stages=2))
    first, second = (plots.save_accuracy(record, tmp_path / name).read_bytes() for name in ("a.png", "b.png"))
    assert first == second


def test_svg_is_well_formed_and_restylable(tmp_path, write_run):
    record = read_run(write_run(tmp_path / "run", stages=2))
    with plots.styled():
        made = plots.figure(4, 3)
        plots.accuracy_curve(made.subplots(), record)
        text = plots.svg(made, "one")
    ElementTree.fromstring(text)
    assert text.startswith("<svg")
    assert "var(--series-0)" in text
    assert "var(--ink)" in text
    assert "#0072b2" not in text.lower()
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert all(name.startswith("one-") for name in ids)
    assert set(re.findall(r"(?:url\(#|href=\"#)([^\")]+)", text)) <= set(ids)


def test_overlaid_runs_are_told_apart_and_names_stay_out(tmp_path, write_run):
    records = [read_run(write_run(tmp_path / f"r{i}", stages=2, method="_$x$<b>")) for i in range(8)]
    lines = draw(plots.overlaid_curves, records).get_lines()
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == 8


ROUNDS = tuple(
    {
        "stage": s,
        "round": r,
        "exchange": e,
        "scope": "round",
        "train/loss": 1.0 + r,
        **({"accuracy": 0.5} if e == "_$a" else {}),
    }
    for s in (0, 1)
    for r in (0, 1)
    for e in ("_$a", "b")
)


def test_accuracy_inside_stages_is_drawn_over_rounds(tmp_path):
    record = RunRecord(tmp_path, metrics=(*ROUNDS, {"stage": 1, "scope": "stage", "accuracy": 0.75}))
    (line,) = [line for line in draw(plots.accuracy_over_rounds, record).get_lines() if len(line.get_xdata()) == 4]
    assert list(line.get_xdata()) == [1, 2, 3, 4]
    assert list(line.get_ydata()) == [50, 50, 50, 75]
    assert plots.save_accuracy(record, tmp_path / "a.png").read_bytes().startswith(PNG)


def test_losses_of_several_exchanges_have_a_legend(tmp_path):
    ax = draw(plots.loss_curve, RunRecord(tmp_path, metrics=ROUNDS))
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [r"\$a", "b"]
    assert draw(plots.loss_curve, RunRecord(tmp_path, metrics=ROUNDS[1::2])).get_legend() is None


@pytest.mark.parametrize(
    ("metrics", "title"),
    [
        (({"stage": 0, "scope": "stage", "accuracy": 0.5},), "Accuracy"),
        ((*ROUNDS[:4], {"stage": 0, "scope": "stage", "accuracy": 0.5}), "Accuracy over rounds"),
        (({"stage": 0, "scope": "stage"}, {"stage": 1, "scope": "stage"}), "Accuracy over stages"),
    ],
)
def test_overview_picks_the_picture(tmp_path, metrics, title):
    assert draw(plots.overview, RunRecord(tmp_path, metrics=metrics)).get_title(loc="left") == title
