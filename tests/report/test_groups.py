import pytest
from scipy import stats

from fedloom.config.digest import NEUTRAL
from fedloom.report.groups import APART, Group, flatten, grouped
from fedloom.report.record import RunRecord


def run(folder, method="a", seed=0, *, status="done", accuracy=None, **config):
    tree = {"method": {"name": method}, "seed": seed, **config}
    summary = {} if accuracy is None else {"final_accuracy": accuracy}
    return RunRecord(folder, status=status, config=tree, summary=summary)


def shape(records):
    return [(group.name, len(group.records)) for group in grouped(records)]


def test_runs_that_differ_in_nothing_but_the_seed_are_one_group(tmp_path):
    records = [run(tmp_path, method, seed) for seed in range(3) for method in ("a", "b")]
    assert shape(records) == [("a", 3), ("b", 3)]
    assert grouped(records)[0].seeds == ["0", "1", "2"]


def test_what_cannot_change_a_result_does_not_part_runs(tmp_path):
    engines = [{"name": "serial", "workers": 1}, {"name": "flower", "workers": "auto", "runtime": "simulation"}]
    same = [run(tmp_path, seed=i, engine=engine, data={"root": f"/{i}"}) for i, engine in enumerate(engines)]
    assert shape(same) == [("a", 2)]
    other = [run(tmp_path, seed=i, engine={"min_replies": i}) for i in range(2)]
    assert len(shape(other)) == 2


def test_what_parts_no_runs_is_what_no_hash_counts_and_the_seed():
    assert sorted(APART) == sorted(["seed", "tracker", *map(".".join, NEUTRAL)])


def test_a_seed_that_is_there_twice_is_no_second_sample(tmp_path):
    assert shape([run(tmp_path / "x"), run(tmp_path / "y")]) == [("a (x)", 1), ("a (y)", 1)]
    assert len({name for name, _ in shape([run(tmp_path), run(tmp_path)])}) == 2


def test_runs_whose_settings_are_not_recorded_stay_apart(tmp_path):
    records = [RunRecord(tmp_path / "run", summary={"method": "a", "seed": seed}) for seed in range(2)]
    assert shape(records) == [("a, seed 0", 1), ("a, seed 1", 1)]


def test_names_say_what_tells_groups_of_one_method_apart(tmp_path):
    rounds = [run(tmp_path, training={"rounds": rounds}) for rounds in (2, 5)]
    assert [name for name, _ in shape([*rounds, run(tmp_path, "b")])] == ["a, rounds 2", "a, rounds 5", "b"]
    data = [run(tmp_path, data={"name": name}) for name in ("x", "y")]
    assert [name for name, _ in shape(data)] == ["a, x", "a, y"]
    many = [run(tmp_path / name, training=dict.fromkeys("pqrs", i)) for i, name in enumerate("xy")]
    assert [name for name, _ in shape(many)] == ["a (x)", "a (y)"]


def test_means_are_over_runs_that_are_done_with_the_interval_of_student(tmp_path):
    values = [0.5, 0.625, 0.25]
    records = [run(tmp_path, seed=i, accuracy=v) for i, v in enumerate(values)]
    group = Group("a", (*records, run(tmp_path, seed=3, status="failed", accuracy=0.0)))
    found = group.interval(lambda record: record.summary["final_accuracy"])
    low, high = stats.t.interval(0.95, 2, sum(values) / 3, stats.sem(values))
    assert (found.mean, found.low, found.high) == tuple(map(pytest.approx, (sum(values) / 3, low, high)))
    alone = Group("a", group.records[3:])
    assert alone.interval(lambda record: record.summary["final_accuracy"]).mean == 0.0, "all, where none is done"
    assert alone.interval(lambda record: None) is None


def test_a_curve_has_the_places_that_all_its_runs_have(tmp_path):
    curves = {0: {0: 0.5, 1: 0.25, 2: 0.75}, 1: {0: 1.0, 1: 0.75}, 2: {}}
    group = Group("a", tuple(run(tmp_path, seed=seed) for seed in curves))
    found = group.curve(lambda record: curves[record.seed])
    assert {place: one.mean for place, one in found.items()} == {0: 0.75, 1: 0.5}, "a run without a curve has no say"


def test_flatten():
    tree = {"a": {"b": 1, "c": {}}, "d": [1, 2], "e": "x" * 300, "f": list(range(99)), "g": None}
    flat = flatten(tree)
    assert (flat["a.b"], flat["a.c"], flat["d"], flat["g"]) == ("1", "{}", "[1, 2]", "null")
    assert len(flat["e"]) < 200
    assert flat["f"].endswith("(99 entries)")
