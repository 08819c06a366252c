import numpy as np
import pytest
from scipy import stats

from fedloom.report import overlays, plots
from fedloom.report.groups import Group
from fedloom.report.record import RunRecord, read_run


def draw(function):
    with plots.styled():
        ax = plots.figure(4, 3).subplots()
        function(ax)
    return ax


def of_stages(folder, accuracies):
    rows = [{"stage": t, "scope": "stage", "accuracy": value} for t, value in enumerate(accuracies)]
    return RunRecord(folder, status="done", metrics=tuple(rows))


def test_a_group_is_a_line_of_means_in_a_band_of_intervals(tmp_path):
    seeds = np.array([[0.5, 0.25], [0.75, 0.5], [1.0, 0.25]])
    group = Group("a", tuple(of_stages(tmp_path, row) for row in seeds))
    ax = draw(overlays.pictures([group])[0])
    (line,), (band,) = ax.get_lines(), ax.collections
    assert list(line.get_xdata()) == [0, 1]
    assert list(line.get_ydata()) == pytest.approx(list(100 * seeds.mean(0)))
    low, high = stats.t.interval(0.95, 2, seeds.mean(0), stats.sem(seeds))
    corners = band.get_paths()[0].vertices
    for place in (0, 1):
        found = corners[corners[:, 0] == place, 1]
        assert (found.min(), found.max()) == (pytest.approx(100 * low[place]), pytest.approx(100 * high[place]))
    assert ax.get_ylim() == (0, 103)


def test_one_seed_has_no_band(tmp_path):
    ax = draw(overlays.pictures([Group("a", (of_stages(tmp_path, [0.5, 0.25]),))])[0])
    assert [path for band in ax.collections for path in band.get_paths() if len(path.vertices)] == []


def test_groups_are_told_apart_and_names_stay_out(tmp_path, write_run):
    records = [read_run(write_run(tmp_path / f"r{i}", stages=2)) for i in range(8)]
    pictures = overlays.pictures([Group("_$x$<b>", (record,)) for record in records])
    titles = []
    for picture in pictures:
        ax = draw(picture)
        assert len({(line.get_color(), line.get_linestyle()) for line in ax.get_lines()}) == 8
        assert not any("<b>" in text.get_text() for text in ax.findobj(lambda artist: hasattr(artist, "get_text")))
        titles.append(ax.get_title(loc="left"))
    assert titles == [overlay.title for overlay in overlays.OVER_STAGES]


def test_forgetting_is_that_of_a_stream_that_had_ended_there(tmp_path):
    matrix = [[0.75, None, None], [0.5, 0.5, None], [0.25, 0.75, 1.0]]
    record = RunRecord(tmp_path, matrix=matrix)
    ax = draw(lambda ax: overlays.draw(ax, overlays.FORGETTING, [Group("", (record,))]))
    (line,) = ax.get_lines()
    assert list(line.get_xdata()) == [1, 2]
    assert list(line.get_ydata()) == pytest.approx([25.0, 100 * (0.75 - 0.25 + 0.5 - 0.75) / 2])


def test_runs_of_one_stage_are_drawn_over_rounds(tmp_path):
    rounds = [{"stage": 0, "round": r, "exchange": "train", "scope": "round", "accuracy": 0.25 * r} for r in range(3)]
    record = RunRecord(tmp_path, metrics=(*rounds, {"stage": 0, "scope": "stage", "accuracy": 0.75}))
    (picture,) = overlays.pictures([Group("a", (record,))])
    ax = draw(picture)
    assert list(ax.get_lines()[0].get_ydata()) == [0.0, 25.0, 75.0]
    assert (ax.get_xlabel(), ax.get_title(loc="left")) == ("rounds done", "Accuracy over rounds")


def test_low_accuracies_have_an_axis_of_their_size(tmp_path):
    ax = draw(overlays.pictures([Group("a", (of_stages(tmp_path, [0.2, 0.125]),))])[0])
    assert ax.get_ylim() == (0, pytest.approx(25.75))
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["0 %", "5 %", "10 %", "15 %", "20 %", "25 %"]
