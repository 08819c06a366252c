"""The Python API on small runs."""

from __future__ import annotations

import json
import runpy
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import nn

import fedloom
from fedloom import api, lifecycle
from fedloom.core.errors import CheckpointError, ConfigError, DataError, Interrupted, RunError
from fedloom.evaluate.summary import SUMMARY_KEYS

SMALL = {
    "stream": {"kind": "class_incremental", "tasks": 2},
    "partition": {"kind": "iid", "clients": 2},
    "training": {"rounds": 1},
}
DIGITS = {**SMALL, "data": {"name": "sklearn/digits"}, "model": {"name": "linear"}}


def blobs(count: int = 90) -> tuple[np.ndarray, np.ndarray]:
    """Three well separated classes."""
    rng = np.random.default_rng(0)
    y = np.arange(count) % 3
    return (rng.normal(size=(count, 4)) + 4 * np.eye(3, 4)[y]).astype(np.float32), y


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures take a second; one test makes them."""
    monkeypatch.setattr(lifecycle, "_pictures", lambda *args: None)


def test_a_run_leaves_everything_that_the_design_names(tmp_path: Path) -> None:
    done = fedloom.run(DIGITS, out=tmp_path / "run")
    for name in (
        "config.yaml", "env.json", "log.txt", "metrics.jsonl", "partition.json", "partition.png", "accuracy_matrix.csv",
        "accuracy.png", "checkpoints", "model", "report.html", "summary.json", "DONE",
    ):  # fmt: skip
        assert (done.folder / name).exists(), name
    assert set(SUMMARY_KEYS) <= done.summary.keys()
    assert done.summary["method"] == "fedavg" and done.summary["stages"] == 2
    assert json.loads((done.folder / "summary.json").read_text()) == done.summary
    assert {row["scope"] for row in done.metrics} >= {"round", "stage"}
    opened = fedloom.load_run(done.folder)
    assert opened.summary == done.summary
    assert "fedavg on sklearn/digits" in repr(opened)


@pytest.mark.usefixtures("no_pictures")
def test_the_same_run_from_a_mapping_a_file_and_its_own_config(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(DIGITS))
    first = fedloom.run(DIGITS, out=tmp_path / "a")
    second = fedloom.run(tmp_path / "mine.yaml", out=tmp_path / "b")
    third = fedloom.run(str(first.folder / "config.yaml"), out=tmp_path / "c")
    hashes = {json.loads((r.folder / "env.json").read_text())["config_hash"] for r in (first, second, third)}
    assert len(hashes) == 1
    assert len({r.summary["state_sha256"] for r in (first, second, third)}) == 1
    timeless = [[{k: v for k, v in row.items() if k != "seconds"} for row in r.metrics] for r in (first, third)]
    assert timeless[0] == timeless[1] and timeless[0]
    other = fedloom.run(DIGITS, seed=1, out=tmp_path / "d")
    assert other.summary["state_sha256"] != first.summary["state_sha256"]


@pytest.mark.usefixtures("no_pictures")
def test_own_arrays_predict(tmp_path: Path) -> None:
    x, y = blobs()
    done = fedloom.run(
        data=(x, y), method={"name": "fedprox", "mu": 0.01}, stream={"kind": "static"}, partition={"kind": "iid"},
        training={"rounds": 10, "batch_size": 4}, out=tmp_path / "run",
    )  # fmt: skip
    found = done.predict(x)
    assert isinstance(found, np.ndarray)
    assert (found == y).mean() > 0.9
    assert torch.equal(done.predict(torch.from_numpy(x)), torch.from_numpy(found))
    assert done.scores(x).shape == (90, 3)
    assert done.class_names == ["0", "1", "2"]
    assert isinstance(done.model, nn.Module) and not done.model.training
    again = fedloom.load_run(tmp_path / "run").scores(x)
    assert np.array_equal(again, done.scores(x))
    with pytest.raises(fedloom.FedloomError, match="the model needs"):
        done.predict(x[:, :2])
    with pytest.raises(fedloom.FedloomError, match="inputs are empty"):
        done.predict(x[:0])
    for wrong, words in (
        ("img.png", "got the text 'img.png'; for files use `fedloom predict"),
        (None, "must be numbers"),
        ([[1.0], [1.0, 2.0]], "must be an array or a tensor"),
        ([["a"] * 4], "must be numbers"),
        (np.where(np.arange(4) == 2, np.nan, x[:3]), "inputs hold NaN, the first at position 0"),
        (torch.tensor([[0.0] * 4, [float("inf")] * 4]), "inputs hold infinite values, the first at position 1"),
    ):
        with pytest.raises(DataError, match=words):
            done.predict(wrong)
    with pytest.raises(ConfigError, match="folder must be the path of a folder, got a int"):
        fedloom.load_run(5)  # type: ignore[arg-type]


@pytest.mark.usefixtures("no_pictures")
def test_eight_bit_models_take_no_scaled_floats(tmp_path: Path) -> None:
    done = fedloom.run(DIGITS, out=tmp_path / "run")
    x = np.random.default_rng(0).integers(0, 256, (3, 1, 8, 8), dtype=np.uint8)
    want = done.scores(x)
    for same in (x.astype(np.float32), x.astype(np.uint16), x.astype(np.int64)):
        assert np.array_equal(done.scores(same), want)
    for wrong in (x / 255, (x > 99).astype(np.float64), x > 99, x.astype(int) + 256, x.astype(int) - 256):
        with pytest.raises(DataError, match=r"from 0 to 255 \(integers, or floats that are whole numbers\), got"):
            done.predict(wrong)
    with pytest.raises(DataError, match="inputs hold NaN, the first at position 0"):
        done.predict(np.where(x > 99, np.nan, 1.0))
    assert (done.folder / "model" / "model.safetensors").stat().st_mode == (done.folder / "env.json").stat().st_mode


@pytest.mark.usefixtures("no_pictures")
def test_a_refused_run_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"engine.workers is 2"):
        fedloom.run(
            DIGITS, model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), engine={"workers": 2},
            out=tmp_path / "deep" / "run",
        )  # fmt: skip
    assert not (tmp_path / "deep").exists()

    def broken(self: Any, ctx: Any) -> None:
        raise ConfigError("no such thing")

    monkeypatch.setattr("fedloom.core.Method.init_server", broken)
    with pytest.raises(ConfigError, match="no such thing"):
        fedloom.run(DIGITS, out=tmp_path / "deep" / "run")
    assert not (tmp_path / "deep").exists()
    (tmp_path / "mine").mkdir()
    with pytest.raises(ConfigError, match="no such thing"):
        fedloom.run(DIGITS, out=tmp_path / "mine")
    assert (tmp_path / "mine").is_dir(), "the user's own folder stays"


@pytest.mark.usefixtures("no_pictures")
def test_a_log_that_a_sentence_names_outlives_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Any, ctx: Any) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr("fedloom.core.Method.init_server", broken)
    with pytest.raises(ConfigError, match=r"ZeroDivisionError: oops \(test_api.py:\d+; traceback in ") as caught:
        fedloom.run(DIGITS, out=tmp_path / "run")
    log = Path(str(caught.value).partition("traceback in ")[2].rstrip(")"))
    assert not (tmp_path / "run").exists() and "oops" in log.read_text()
    log.unlink()
    log.parent.rmdir()


@pytest.mark.usefixtures("no_pictures")
def test_progress_is_told_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fedloom.run(DIGITS, out=tmp_path / "a")
    assert not capsys.readouterr().err
    fedloom.run(DIGITS, out=tmp_path / "b", verbose=True)
    assert "stage 1 of 2, round 0 of 1: 2 clients" in capsys.readouterr().err


def test_own_arrays_need_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise AssertionError("a connection was tried")

    for name in ("connect", "connect_ex", "bind"):
        monkeypatch.setattr(socket.socket, name, refuse)
    x, y = blobs(60)
    done = fedloom.run(SMALL, data=(x[y < 2], y[y < 2]), stream={"kind": "static"}, out=tmp_path / "run")
    assert done.summary["final_accuracy"] > 0.5 and (done.folder / "DONE").exists()


@pytest.mark.usefixtures("no_pictures")
def test_dotted_keys_are_those_of_the_command_line(tmp_path: Path) -> None:
    done = fedloom.run(DIGITS, **{"training.rounds": 2, "method.uniform": True}, out=tmp_path / "run")
    assert done.summary["rounds"] == 4
    assert yaml.safe_load((done.folder / "config.yaml").read_text())["method"]["uniform"] is True


@pytest.mark.usefixtures("no_pictures")
def test_own_model_and_resume(tmp_path: Path) -> None:
    model = nn.Linear(4, 3)
    done = fedloom.run(SMALL, data=blobs(), model=model, out=tmp_path / "run")
    assert done.predict(blobs()[0]).shape == (90,)
    assert fedloom.load_run(done.folder, model=model).predict(blobs()[0]).shape == (90,)
    with pytest.raises(ConfigError, match="pass model= again"):
        fedloom.load_run(done.folder).predict(blobs()[0])
    (done.folder / "DONE").unlink()
    again = api.resume(done.folder, data=blobs(), model=model)
    assert again.summary["state_sha256"] == done.summary["state_sha256"]


@pytest.mark.usefixtures("no_pictures")
def test_two_runs_in_one_process_share_nothing(tmp_path: Path) -> None:
    a = fedloom.run(DIGITS, training={"optimizer": {"lr": 0.01}}, out=tmp_path / "a")
    b = fedloom.run(DIGITS, training={"optimizer": {"lr": 0.1}}, out=tmp_path / "b")
    c = fedloom.run(DIGITS, training={"optimizer": {"lr": 0.01}}, out=tmp_path / "c")
    assert a.summary["state_sha256"] == c.summary["state_sha256"] != b.summary["state_sha256"]


@pytest.mark.usefixtures("no_pictures", "no_global_draws")
def test_no_global_generator_is_touched(tmp_path: Path) -> None:
    fedloom.run(DIGITS, out=tmp_path / "run")


def test_configure_takes_names_and_mappings() -> None:
    name, tree, data, model = api.configure(None, method="fedavg", model="mlp", engine={"workers": 1}, seed=3)
    assert (name, tree.data.name, tree.model.name, tree.seed) == ("quickstart", "sklearn/digits", "mlp", 3)
    assert (data, model) == (None, None)
    x = blobs()
    name, tree, data, _ = api.configure(None, data=x)
    assert data is x and name == "own-data" and tree.model.name == "auto"
    with pytest.raises(ConfigError, match="method must be a name or a mapping of the section, got a int"):
        api.configure(None, method=5)
    with pytest.raises(ConfigError, match="unknown key 'trainin'"):
        api.configure(None, trainin={"rounds": 1})


def test_folders_of_the_same_second_differ() -> None:
    assert len({api.new_folder("x") for _ in range(20)}) == 20


@pytest.mark.usefixtures("no_pictures")
def test_a_folder_that_is_not_empty_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    with pytest.raises(ConfigError, match="which is not empty"):
        fedloom.run(DIGITS, out=tmp_path)
    assert (tmp_path / "file").read_text() == "precious"


@pytest.mark.usefixtures("no_pictures")
def test_resume_refuses_what_has_changed(tmp_path: Path) -> None:
    done = fedloom.run(DIGITS, out=tmp_path / "run")
    before = (done.folder / "summary.json").read_text()
    assert api.resume(done.folder).summary == done.summary
    (done.folder / "DONE").unlink()
    config = yaml.safe_load((done.folder / "config.yaml").read_text())
    (done.folder / "config.yaml").write_text(yaml.safe_dump({**config, "seed": 5}))
    with pytest.raises(CheckpointError, match="have changed since the run began"):
        api.resume(done.folder)
    config["engine"]["workers"] = 1
    (done.folder / "config.yaml").write_text(yaml.safe_dump(config))
    assert api.resume(done.folder).summary["state_sha256"] == json.loads(before)["state_sha256"]


def test_folders_that_are_no_runs(tmp_path: Path) -> None:
    for call in (fedloom.load_run, api.resume):
        with pytest.raises(CheckpointError, match="does not exist"):
            call(tmp_path / "nope")
    with pytest.raises(CheckpointError, match="is not a run folder"):
        api.resume(tmp_path)
    with pytest.raises(CheckpointError, match="has not ended"):
        fedloom.load_run(tmp_path)
    (tmp_path / "summary.json").write_text("{")
    with pytest.raises(CheckpointError, match="is damaged"):
        fedloom.load_run(tmp_path)


def end_with(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(*args: Any) -> None:
        raise error

    monkeypatch.setattr("fedloom.engine.loop.run", train)


def test_a_failed_run_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end_with(RunError("no client replied"), monkeypatch)
    with pytest.raises(RunError, match="no client replied"):
        fedloom.run(DIGITS, out=tmp_path / "a")
    assert (tmp_path / "a" / "FAILED").read_text() == "no client replied\n"
    end_with(ZeroDivisionError("oops"), monkeypatch)
    with pytest.raises(RunError, match=r"ZeroDivisionError: oops \(test_api.py:\d+; traceback in .*log.txt\)"):
        fedloom.run(DIGITS, out=tmp_path / "b")
    assert "Traceback" in (tmp_path / "b" / "log.txt").read_text()
    assert (tmp_path / "b" / "FAILED").exists()


def test_an_interrupted_run_can_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end_with(Interrupted("stopped by the user"), monkeypatch)
    with pytest.raises(Interrupted, match="continue with `fedloom resume"):
        fedloom.run(DIGITS, out=tmp_path / "a")
    assert not (tmp_path / "a" / "FAILED").exists()


def test_a_picture_that_fails_costs_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def draw(*args: Any) -> None:
        raise OSError("no font")

    monkeypatch.setattr("fedloom.data.plan.Plan.draw", draw)
    done = fedloom.run(DIGITS, out=tmp_path / "run")
    assert (done.folder / "DONE").exists() and (done.folder / "summary.json").exists()
    assert "no font" in (done.folder / "log.txt").read_text()


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = "import sys, fedloom; assert not {'torch', 'numpy', 'pydantic', 'typer'} & set(sys.modules), sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="no attribute 'runn'"):
        _ = fedloom.runn
    assert dir(fedloom) == sorted(fedloom.__all__)


@pytest.mark.usefixtures("no_pictures")
def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    script = Path(__file__).parents[1] / "examples" / "own_data.py"
    found = runpy.run_path(str(script))
    assert found["run"].summary["final_accuracy"] > 0.9
    assert "/runs/own-data/" in capsys.readouterr().out
