import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from fedloom.report import plots
from fedloom.report.record import RunRecord, read_run
from fedloom.report.svg import svg

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


ROUND = {"stage": 0, "scope": "round", "exchange": "train"}
STATIC = (
    {**ROUND, "round": 0, "train/loss": 2.0, "accuracy": 0.3, "accuracy/domains": {"a": 0.25, "b": 0.5}},
    {**ROUND, "round": 1, "train/loss": 1.0},
    {"stage": 0, "scope": "stage", "accuracy": 0.6, "accuracy/domains": {"a": 0.5, "b": 1.0}, "seen_classes": 4},
)


def labels_of(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def test_domains_of_a_single_stage_are_lines_over_the_rounds_that_evaluated_them(tmp_path):
    record = RunRecord(tmp_path, metrics=STATIC)
    assert record.domain_curves_by_round == ([1, 2], {"a": [0.25, 0.5], "b": [0.5, 1.0]})
    assert record.accuracy_by_round == [(1, 0.3), (2, 0.6)]
    ax = draw(lambda ax: plots.overview(ax, record, named=True))
    a, b, mean = (line for line in ax.get_lines() if len(line.get_xdata()) == 2 and line.get_color() != plots.LINE)
    assert [list(line.get_ydata()) for line in (a, b, mean)] == [[25.0, 50.0], [50.0, 100.0], [37.5, 75.0]]
    assert list(a.get_xdata()) == [1, 2] and ax.get_title(loc="left") == "Accuracy per domain over rounds"
    assert labels_of(ax) == ["mean of 2 domains", "a", "b"]
    unnamed = draw(plots.overview, record)
    assert unnamed.get_title(loc="left") == "Accuracy over rounds" and unnamed.get_legend() is None
    once = RunRecord(tmp_path, metrics=({**STATIC[0], "accuracy/domains": None}, *STATIC[1:]))
    assert once.domain_curves_by_round == ([], {})


def test_domains_of_a_single_evaluation_are_bars_with_own_views_where_these_differ(tmp_path):
    def bars(**changes):
        record = RunRecord(tmp_path, metrics=({**STATIC[2], **changes},))
        ax = draw(lambda ax: plots.overview(ax, record, named=True))
        widths = [round(patch.get_width(), 6) for patch in ax.patches]
        return dict(zip([tick.get_text() for tick in ax.get_yticklabels()][::-1], widths[::-1], strict=True))

    known = {"all classes": 60.0, "domains, mean": 75.0, "a": 50.0, "b": 100.0, "chance": 25.0}
    assert bars() == known and bars(**{"accuracy/domains_personal": {"a": 0.5, "b": 1.0}}) == known
    own = {"domains, own views, mean": 80.0, "a, own views": 70.0, "b, own views": 90.0}
    found = bars(**{"accuracy/domains_personal": {"a": 0.7, "b": 0.9, "c": None}})
    assert found == {**known, **own} and list(found)[-1] == "chance"
    many = {str(k): 0.5 for k in range(plots.MOST_NAMED + 1)}
    assert list(bars(**{"accuracy/domains": many})) == ["all classes", "domains, mean", "chance"]
    assert "domains, mean" not in bars(**{"accuracy/domains": "damaged"})


DOMAINS = {"domain_names": ["photo", "_art$"], "task_domains": [[1], [0]]}


def test_tasks_that_are_domains_have_their_names(tmp_path, write_run):
    record = read_run(write_run(tmp_path / "run", stages=2))
    record = replace(record, partition=DOMAINS)
    assert record.task_names == ["_art$", "photo"]
    ax = draw(plots.accuracy_heatmap, record.matrix, record.task_names)
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["0 \u200b_art\\$", "1 photo"]
    named = draw(lambda ax: plots.accuracy_curve(ax, record, named=True))
    assert "first task: \u200b_art\\$" in lines_of(named)
    assert "first task" in lines_of(draw(plots.accuracy_curve, record))


@pytest.mark.parametrize(
    "damage", [[[0]], [[0], [0]], [[0, 1], [1]], [[0], [2]], [[0], ["photo"]], [0, 1], "x", None, [[0], [-1]]]
)
def test_other_tasks_have_no_names(tmp_path, damage):
    assert RunRecord(tmp_path, partition={**DOMAINS, "task_domains": damage}).task_names == []


@pytest.mark.parametrize(
    ("partition", "titles"),
    [
        (DOMAINS, ["Accuracy over stages", "Accuracy per task, %"]),
        ({}, ["Accuracy over stages", "Accuracy per task, %", "Accuracy per domain over stages"]),
    ],
)
def test_the_picture_of_a_run_has_a_panel_for_domains_that_are_no_tasks(
    tmp_path, write_run, monkeypatch, partition, titles
):
    drawn = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, *args, **kw: drawn.append(figure))
    record = read_run(write_run(tmp_path / "run", stages=2))
    metrics = tuple({**row, "accuracy/domains": {"photo": 0.5, "_$x": 0.75}} for row in record.metrics)
    plots.save_accuracy(replace(record, metrics=metrics, partition=partition), tmp_path / "a.png")
    axes = drawn[0].axes
    assert [ax.get_title(loc="left") for ax in axes] == titles
    if len(axes) == 3:
        assert labels_of(axes[2]) == ["mean of 2 domains", "photo", "\u200b_\\$x"]


def test_the_picture_of_a_single_stage_has_bars_of_domains_beside_what_is_drawn_over_rounds(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, *args, **kw: drawn.append(figure))
    plain = tuple({key: value for key, value in row.items() if key != "accuracy/domains"} for row in STATIC)
    for metrics in (STATIC, (*plain[:2], STATIC[2]), STATIC[1:], plain):
        plots.save_accuracy(RunRecord(tmp_path, metrics=metrics), tmp_path / "a.png")
    assert [[ax.get_title(loc="left") for ax in figure.axes] for figure in drawn] == [
        ["Accuracy per domain over rounds", "Training loss", "Accuracy"],
        ["Accuracy over rounds", "Training loss", "Accuracy"],
        ["Accuracy", "Training loss"],
        ["Accuracy over rounds", "Training loss"],
    ]
    for figure in drawn[:3]:
        bars = next(ax for ax in figure.axes if ax.get_title(loc="left") == "Accuracy")
        assert {"domains, mean", "a", "b"} <= {tick.get_text() for tick in bars.get_yticklabels()}


def test_names_are_cut_short_and_many_domains_are_not_named(tmp_path):
    rows = {f"{k}{'x' * 40}": 0.5 for k in range(2)}, {str(k): 0.5 for k in range(plots.MOST_NAMED + 1)}
    for row, told in zip(rows, (["0" + "x" * 22 + "…", "1" + "x" * 22 + "…"], []), strict=True):
        metrics = tuple({"stage": t, "scope": "stage", "accuracy/domains": row} for t in range(2))
        ax = draw(lambda ax, m=metrics: plots.domain_curves(ax, RunRecord(tmp_path, metrics=m), named=True))
        assert labels_of(ax) == [f"mean of {len(row)} domains", *told]


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
        text = svg(made, "one")
    ElementTree.fromstring(text)
    assert text.startswith("<svg")
    assert "var(--series-0)" in text
    assert "var(--ink)" in text
    assert "#0072b2" not in text.lower()
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert all(name.startswith("one-") for name in ids)
    assert set(re.findall(r"(?:url\(#|href=\"#)([^\")]+)", text)) <= set(ids)


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


@pytest.mark.parametrize("rounds", [1, 2, 7])
def test_rounds_are_whole_numbers_on_their_axis(rounds, tmp_path):
    metrics = tuple({**ROUND, "round": k, "train/loss": 2.0 - k / 10} for k in range(rounds))
    ticks = draw(plots.loss_curve, RunRecord(tmp_path, metrics=metrics)).get_xticks()
    assert len(ticks) and all(tick == round(tick) for tick in ticks)


def test_losses_of_several_exchanges_have_a_legend(tmp_path):
    ax = draw(plots.loss_curve, RunRecord(tmp_path, metrics=ROUNDS))
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["\u200b_\\$a", "b"]
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


def test_thirty_six_runs_are_told_apart_by_colour_and_mark_and_by_colour_and_stroke():
    looks = [plots.look(i) for i in range(36)]
    assert len({(colour, mark) for colour, mark, _ in looks}) == len({(c, str(s)) for c, _, s in looks}) == 36
