"""`sweep` on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from fedloom import lifecycle
from fedloom.cli import app
from fedloom.cli.sweep import _grid

FAST = ["-s", "model.name=linear", "-s", "training.rounds=1", "-s", "training.local_epochs=1",
        "-s", "partition.clients=3", "-s", "stream.tasks=2"]  # fmt: skip
FILE = "methods: [fedavg, fedprox+mu=1]\nseeds: [0]\nsettings: {b 16: {training.batch_size: 16}, b 32: {}}\n"


def call(*arguments: Any) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], prog_name="fedloom")


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures take a second."""
    monkeypatch.setattr(lifecycle, "_pictures", lambda *args: None)
    monkeypatch.setattr("fedloom.report.pareto.save", lambda *args: False)
    monkeypatch.setattr("fedloom.report.sweep_picture.save", lambda *args: False)


def test_a_file_is_swept_and_each_setting_can_be_opened(tmp_path: Path) -> None:
    (tmp_path / "study.yaml").write_text(FILE)
    arguments = ["sweep", tmp_path / "study.yaml", "--out", tmp_path / "s", *FAST]
    preview = call(*arguments, "--dry-run")
    assert preview.exit_code == 0 and not (tmp_path / "s").exists()
    assert preview.stdout.splitlines()[0].split()[:5] == ["b", "16", "fedavg", "seed", "0"]
    assert preview.stdout.splitlines()[-1] == f"4 runs in {tmp_path / 's'}: 4 missing"
    result = call(*arguments)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("Sweep of 2 methods over 2 settings, quickstart\n")
    assert result.stdout.endswith(f"folder: {tmp_path / 's'}\n") and str(tmp_path / "s" / "sweep.tex") in result.stdout
    begun = [line for line in result.stderr.splitlines() if line.startswith("run ")]
    assert begun[0] == "run 1 of 4: b 16, fedavg, seed 0" and len(begun) == 4
    again = call(*arguments, "--json")
    content = json.loads(again.stdout)
    assert content.pop("folder") == str(tmp_path / "s") and not again.stderr
    assert content == json.loads((tmp_path / "s" / "sweep.json").read_text())
    found = json.loads(call(*arguments, "--dry-run", "--json").stdout)["runs"]
    assert [run["state"] for run in found] == ["done"] * 4 and set(found[0]) == {
        "setting", "label", "seed", "hash", "state",
    }  # fmt: skip
    opened = call("report", tmp_path / "s" / "b-32")
    assert opened.exit_code == 0 and "Comparison of 2 methods, b 32" in (tmp_path / "s/b-32/report.html").read_text()


def test_flags_make_a_grid(tmp_path: Path) -> None:
    flags = ["--grid", "partition.alpha=0.5,0.1", "-g", "training.optimizer.lr=1e-1", "-m", "fedavg", "--seeds", "0,1"]
    found = json.loads(call("sweep", "quickstart", *flags, "--out", tmp_path, "--dry-run", "--json", *FAST).stdout)
    assert [(run["setting"], run["seed"]) for run in found["runs"]] == [
        (f"alpha={alpha}, lr=0.1", seed) for alpha in (0.5, 0.1) for seed in (0, 1)
    ]
    assert len({run["hash"] for run in found["runs"]}) == 4


def test_values_of_a_grid_are_yaml_between_commas() -> None:
    assert _grid(["method.body=[8,4],[16]", "a.b=null, x", "a.b=true"]) == {
        "method.body": [[8, 4], [16]], "a.b": [None, "x", True],
    }  # fmt: skip
    assert _grid(None) is None


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["-m", "fedavg"], "a sweep needs settings: name them under settings or grid of a file, or give --grid"),
        (
            ["-m", "fedavg", "--grid", "alpha"],
            "--grid takes key=value,value such as partition.alpha=0.1,0.5; got 'alpha'",
        ),
        (["-m", "fedavg", "--grid", "partition.alpha="], "grid: partition.alpha must be a list of values such as"),
        (["-m", "fedavg", "--grid", "alpha=1"], "setting alpha=1: unknown key 'alpha'"),
        (
            ["-m", "fedavg", "--grid", "partition.alfa=1"],
            "unknown key 'partition.alfa'. Did you mean 'partition.alpha'",
        ),
        (["-m", "fedavg", "--grid", "partition.alpha=[1"], "a value of --grid partition.alpha is not valid YAML"),
        (["--grid", "partition.alpha=1"], "methods is empty; name at least one"),
        (
            ["-m", "fedavg", "--grid", "seed=1", "--jobs", "x"],
            "jobs must be auto or a whole number in [1, 512], got 'x'",
        ),
        (["quikstart", "-m", "fedavg", "--grid", "partition.alpha=1"], "unknown recipe 'quikstart'"),
    ],
)
def test_errors_are_one_sentence_and_exit_code_2(arguments: list[str], sentence: str) -> None:
    result = call("sweep", *arguments)
    assert result.exit_code == 2 and sentence in result.stderr and result.stderr.count("\n") == 1


def test_the_folder_of_a_run_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    result = call("sweep", "-m", "fedavg", "--grid", "training.rounds=1", "--out", tmp_path, "--dry-run")
    assert result.exit_code == 2 and "which is the folder of a run (it holds config.yaml)" in result.stderr


def test_failed_runs_are_named_and_exit_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(*args: Any, **kwargs: Any) -> None:
        raise ValueError("my bug")

    monkeypatch.setattr("fedloom.methods.scaffold.Scaffold.client_update", work)
    flags = ["--grid", "training.batch_size=16,32", "-m", "fedavg,scaffold", "--seeds", "0", "--out", tmp_path / "s"]
    result = call("sweep", *flags, *FAST)
    assert result.exit_code == 1 and "batch_size=16: 1 run is missing; see batch_size=16/compare.md." in result.stdout
    last = result.stderr.splitlines()[-1]
    assert last.startswith("error: 2 of 4 runs failed: batch_size=16, scaffold, seed 0: ") and "my bug" in last
