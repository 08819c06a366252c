import pytest

from fedloom.report import clients, plots
from fedloom.report.record import RunRecord

KEYS = ("mean", "std", "worst10")


def record(folder, *rows):
    stages = [
        {"stage": t, "scope": "stage", **{f"accuracy/client_{k}": v for k, v in zip(KEYS, row, strict=True)}}
        for t, row in enumerate(rows)
    ]
    return RunRecord(folder, metrics=tuple(stages))


def test_the_spread_is_the_mean_with_a_deviation_around_it_and_the_worst_tenth(tmp_path):
    with plots.styled():
        ax = plots.figure(4, 3).subplots()
        clients.spread_curve(ax, record(tmp_path, (0.75, 0.125, 0.5), (0.5, 0.25, 0.0)))
    lines = {line.get_label(): list(line.get_ydata()) for line in ax.get_lines()}
    assert lines == {"mean": [75.0, 50.0], "worst tenth": [50.0, 0.0]}
    corners = ax.collections[0].get_paths()[0].vertices
    for stage, low, high in ((0, 62.5, 87.5), (1, 25.0, 75.0)):
        found = corners[corners[:, 0] == stage, 1]
        assert (found.min(), found.max()) == (pytest.approx(low), pytest.approx(high))


def test_it_takes_two_stages_with_a_deviation(tmp_path):
    assert clients.has_spread(record(tmp_path, (0.5, 0.1, 0.4), (0.5, 0.1, 0.4)))
    assert not clients.has_spread(record(tmp_path, (0.5, 0.1, 0.4), (0.5, None, 0.4)))
