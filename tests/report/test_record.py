import json

import pytest

from fedloom.core.errors import ConfigError
from fedloom.report.record import number, read_run


def test_a_finished_run(tmp_path, write_run):
    record = read_run(write_run(tmp_path / "run", stages=3, rounds=2))
    assert (record.method, record.dataset, record.seed, record.status) == ("fedfmx", "sklearn/digits", 0, "done")
    assert [len(record.stages), len(record.rounds), len(record.matrix)] == [3, 6, 3]
    assert record.matrix[0][1:] == [None, None]
    assert record.problems == ()


@pytest.mark.parametrize("gone", ["summary.json", "accuracy_matrix.csv"])
def test_the_matrix_is_found_in_other_files(tmp_path, write_run, gone):
    folder = write_run(tmp_path / "run")
    whole = read_run(folder).matrix
    (folder / gone).unlink()
    assert read_run(folder).matrix == whole
    (folder / "summary.json").unlink(missing_ok=True)
    (folder / "accuracy_matrix.csv").unlink(missing_ok=True)
    assert read_run(folder).matrix == whole


def test_a_run_that_has_only_begun(tmp_path):
    (tmp_path / "config.yaml").write_text("method: {name: fedprox}\nseed: 7\n")
    record = read_run(tmp_path)
    assert (record.method, record.seed, record.status, record.dataset) == ("fedprox", 7, "unfinished", None)
    assert record.stages == record.rounds == record.matrix == []


def test_damaged_files_become_problems(tmp_path, write_run):
    folder = write_run(tmp_path / "run")
    (folder / "FAILED").touch()
    (folder / "DONE").unlink()
    (folder / "summary.json").write_text('{"method": ')
    (folder / "config.yaml").write_text("a: [")
    (folder / "env.json").write_bytes(b"\xff\xfe\x00")
    (folder / "accuracy_matrix.csv").write_text("stage,task_0\n0,x\n")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"stage": 3, "sc')
    record = read_run(folder)
    assert record.status == "failed"
    assert len(record.problems) == 5
    assert len(record.matrix) == 4
    assert record.method == "run"


@pytest.mark.parametrize("name", ["summary.json", "env.json", "partition.json", "config.yaml", "metrics.jsonl"])
def test_endless_nesting_is_a_problem_of_its_file(tmp_path, write_run, name):
    folder = write_run(tmp_path / "run")
    (folder / name).write_text("[" * 100_000)
    assert [problem.split()[0] for problem in read_run(folder).problems] == [name]


def test_rows_are_taken_as_they_are_meant(tmp_path):
    rows = [
        {"stage": 0, "round": 0, "exchange": "train", "scope": "round", "train/loss": 3.0},
        {"stage": 0, "round": 0, "exchange": "train", "scope": "round", "train/loss": 2.0},
        {"stage": 0, "round": 0, "exchange": "measure", "scope": "round"},
        {"stage": "x", "scope": "round"},
        {"stage": 10**400, "scope": "round"},
        {"stage": 0, "round": [0], "scope": "round"},
        {"stage": 0, "round": 0, "exchange": ["train"], "scope": "round"},
        {"scope": "stage"},
        [1],
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    record = read_run(tmp_path)
    assert [row.get("train/loss") for row in record.rounds] == [2.0, None]
    assert record.stages == []


@pytest.mark.parametrize(
    ("value", "found"),
    [(1, 1), (0.5, 0.5), (float("nan"), None), (1e308, None), (10**400, None), ("1", None), (True, None)],
)
def test_number(value, found):
    assert number({"k": value}, "k") == found
    assert number({}, "k") is None


def test_folders_that_are_no_run(tmp_path):
    with pytest.raises(ConfigError, match="not a run folder: it holds none of"):
        read_run(tmp_path)
    with pytest.raises(ConfigError, match="is not a folder"):
        read_run(tmp_path / "missing")


def test_a_folder_of_runs_names_one_of_them(tmp_path, write_run):
    write_run(tmp_path / "b")
    write_run(tmp_path / "a")
    with pytest.raises(ConfigError, match=r"name the folders of runs in it, such as '.*/a'\.$"):
        read_run(tmp_path)
