import pytest
from scipy import stats

from fedloom.evaluate.statistics import Interval, mean_interval
from fedloom.report import several
from fedloom.report.groups import Group
from fedloom.report.record import RunRecord
from fedloom.report.units import count, percent, points


def group(folder, name, *summaries, **fields):
    records = [RunRecord(folder, status="done", summary={"seed": i, **s}, **fields) for i, s in enumerate(summaries)]
    return Group(name, tuple(records))


@pytest.mark.parametrize(
    ("write", "values", "text"),
    [
        (percent, [0.5], "50.0 %"),
        (percent, [0.5, 0.5], "50.0 ± 0.0 %"),
        (points, [-0.25, -0.25], "−25.0 ± 0.0 pp"),
        (str, [2, 2], "2.0 ± 0.0"),
    ],
)
def test_a_mean_has_its_unit_once(write, values, text):
    assert several.with_interval(write, mean_interval(values)) == text


def test_bars_are_scaled_to_the_longest_of_their_column(tmp_path):
    values = [0.5, 0.625, 0.75]
    groups = [
        group(tmp_path, "a", *({"final_accuracy": value} for value in values)),
        group(tmp_path, "b", {"final_accuracy": 0.25, "forgetting": 0.125}),
    ]
    found = several.bars(groups)
    assert found.head == ["", "Final accuracy", "Forgetting"]
    (_, (first, none)), (_, (second, forgotten)) = found.rows
    low, high = stats.t.interval(0.95, 2, 0.625, stats.sem(values))
    assert (first.low, first.share, first.high) == (pytest.approx(low / high), pytest.approx(0.625 / high), 1.0)
    assert (second.text, second.share, second.low) == ("25.0 %", pytest.approx(0.25 / high), None)
    assert (none.text, none.share, forgotten.share) == ("–", None, 1.0)
    assert several.bars([group(tmp_path, "a", {})]) is None


def test_numbers_are_means_over_seeds_and_troubles_are_sums(tmp_path):
    summaries = [{"final_accuracy": 0.5, "bytes_up": 1024 * (i + 1), "failed_clients": i} for i in range(3)]
    found = several.numbers([group(tmp_path, "a", *summaries), group(tmp_path, "b", {"rejected_updates": 0})])
    assert found.head == ["", "a", "b"]
    assert found.rows == [
        ["Seeds", "0, 1, 2", "0"],
        ["Final accuracy", "50.0 ± 0.0 %", "–"],
        ["Sent by clients", "2 KiB", "–"],
        ["Failed clients", "3", "–"],
    ]


def test_whole_numbers_of_several_seeds_are_written_whole():
    assert several._mean(count, Interval(1000.25, 2)) == "1\u2009000"
    assert several._mean(count, Interval(1.75, 2)) == "2"


def test_matrices_are_averaged_where_all_have_a_value():
    first, second = [[0.5, None], [0.25, 1.0]], [[1.0, 0.5], [0.75, None]]
    assert several.mean_matrix([first, second, [[0.5]], []]) == [[0.75, None], [0.5, None]]
    assert several.mean_matrix([[], []]) == []


def test_a_matrix_tells_its_numbers_where_there_is_room(tmp_path):
    matrix = [[0.5, None], [0.25, 1.0]]
    found = several.matrices([group(tmp_path, "a", {}, matrix=matrix), group(tmp_path, "b", {}, matrix=[[0.5]])])
    assert [table.title for table in found.maps] == ["a"] and found.told
    assert [[cell.text for cell in cells] for _, cells in found.maps[0].rows] == [["50", ""], ["25", "100"]]
    wide = [[0.5] * 20] * 20
    assert not several.matrices([group(tmp_path, "a", {}, matrix=wide)]).told
    assert several.matrices([group(tmp_path, "a", {}, matrix=[[0.5]])]) is None


def test_settings_that_differ_are_parted_from_those_that_only_some_have(tmp_path):
    configs = {"a": {"method": {"name": "a", "mu": 1}, "seed": 0}, "b": {"method": {"name": "b"}, "seed": 1}}
    shared, apart = several.differing([group(tmp_path, k, {}, config=config) for k, config in configs.items()])
    assert (shared.head, shared.rows) == (["", "a", "b"], [["method.name", "a", "b"]])
    assert apart.rows == [["method.mu", "1", "–"]]
    same = group(tmp_path, "a", {}, config=configs["a"])
    assert several.differing([same, same]) == (None, None)


def test_data_that_methods_share_are_shown_once(tmp_path):
    def runs(name, *plans, dataset="x"):
        records = [
            RunRecord(tmp_path / f"{name}{i}", summary={"seed": i, "dataset": dataset}, picture=tmp_path / f"{name}{i}",
                      partition={"fingerprint": plan}) for i, plan in enumerate(plans)
        ]  # fmt: skip
        return Group(name, tuple(records))

    shared = several.data_pictures([runs("a", "p", "q"), runs("b", "p", "q")])
    assert [one.title for one in shared] == ["Seed 0", "Seed 1"]
    apart = several.data_pictures([runs("a", "p"), runs("b", "q")])
    assert [one.title for one in apart] == ["Seed 0: a", "Seed 0: b"]
    named = several.data_pictures([runs("a", "p"), runs("b", "q", dataset="y")])
    assert [one.title for one in named] == ["x, Seed 0", "y, Seed 0"]
