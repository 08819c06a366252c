"""Comparisons on small runs: each run once, whatever happened before."""

from __future__ import annotations

import csv
import json
import math
import shutil
import statistics
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedloom
from fedloom import lifecycle
from fedloom.comparison import entries
from fedloom.core.errors import ConfigError, DataError, Interrupted, RunError
from fedloom.engine.experiment import Observer
from toys.federation import method_of
from toys.small_clip import architecture

SMALL = {
    "data": {"name": "sklearn/digits"},
    "model": {"name": "linear"},
    "stream": {"kind": "class_incremental", "tasks": 2},
    "partition": {"kind": "iid", "clients": 2},
    "training": {"rounds": 1},
}
TWO = ("fedavg", "fedprox+mu=1")
T_1 = 12.706204736432095  # 97.5 % quantile of Student's t with 1 degree of freedom


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures take a second."""
    monkeypatch.setattr(lifecycle, "_pictures", lambda *args: None)
    monkeypatch.setattr("fedloom.report.pareto.save", lambda *args: False)


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """(method, seed) of every run that is started or resumed, in order."""
    found: list[tuple[str, int]] = []
    real = lifecycle._carry_out

    def watch(built: Any, *args: Any) -> Any:
        found.append((built.config.method["name"], built.config.seed))
        return real(built, *args)

    monkeypatch.setattr(lifecycle, "_carry_out", watch)
    return found


def small(out: Path, methods: Any = TWO, seeds: Any = (0, 1), **more: Any) -> fedloom.Comparison:
    return fedloom.compare(SMALL, methods, seeds, out=out, **more)


def test_every_method_runs_on_every_seed_in_a_folder_named_by_its_hash(tmp_path: Path) -> None:
    done = small(tmp_path / "c")
    assert {label: list(runs) for label, runs in done.runs.items()} == {label: [0, 1] for label in TWO}
    for label, runs in done.runs.items():
        for seed, run in runs.items():
            key = json.loads((run.folder / "env.json").read_text())["config_hash"]
            assert run.folder == tmp_path / "c" / "runs" / key
            assert done.summary["methods"][label]["runs"][str(seed)] == key
            assert (run.folder / "DONE").exists() and run.summary["seed"] == seed
    alone = fedloom.run(SMALL, method={"name": "fedprox", "mu": 1}, seed=1, out=tmp_path / "alone")
    assert alone.summary["state_sha256"] == done.runs["fedprox+mu=1"][1].summary["state_sha256"]
    files = sorted(p.name for p in (tmp_path / "c").iterdir())
    assert files == ["compare.csv", "compare.json", "compare.md", "compare.tex", "runs"]
    assert not done.failed and "over seeds [0, 1]" in repr(done)


def test_the_numbers_are_those_of_the_runs(tmp_path: Path) -> None:
    pair = ("fedavg", "joint")
    done = small(tmp_path / "c", pair)
    content = json.loads((tmp_path / "c" / "compare.json").read_text())
    assert content == done.summary and content["complete"] is True and content["reference"] == "fedavg"
    values = {label: [run.summary["final_accuracy"] for run in runs.values()] for label, runs in done.runs.items()}
    for label, (a, b) in values.items():
        found = content["methods"][label]["metrics"]["final_accuracy"]
        assert found["mean"] == pytest.approx((a + b) / 2)
        half = T_1 * statistics.stdev([a, b]) / math.sqrt(2)
        assert found["high"] - found["mean"] == pytest.approx(half)
        shown = f"{100 * found['mean']:.1f} ± {100 * half:.1f}"
        assert shown in done.markdown and shown in (tmp_path / "c" / "compare.md").read_text()
    gaps = [b - a for a, b in zip(*values.values(), strict=True)]
    t = statistics.mean(gaps) / (statistics.stdev(gaps) / math.sqrt(2))
    test = content["methods"]["joint"]["tests"]["final_accuracy"]
    assert test["p_t"] == pytest.approx(1 - 2 / math.pi * math.atan(abs(t)))  # Student's t with 1 degree: Cauchy
    assert content["budget"]["equal"] is True and "Sample visits are equal for all." in done.markdown
    matrix = done.runs["fedavg"][0].summary["accuracy_matrix"]
    current = content["methods"]["fedavg"]["metrics"]["current_task_accuracy"]["values"]["0"]
    assert current == pytest.approx((matrix[0][0] + matrix[1][1]) / 2)
    lines = list(csv.DictReader((tmp_path / "c" / "compare.csv").read_text().splitlines()))
    assert [(line["label"], line["seed"]) for line in lines] == [(label, s) for label in pair for s in ("0", "1")]
    assert [float(line["final_accuracy"]) for line in lines] == [v for pair in values.values() for v in pair]
    assert [row["final_accuracy"] for row in done.table()] == [statistics.mean(pair) for pair in values.values()]


def test_only_what_is_missing_is_run_again(tmp_path: Path, begun: list[tuple[str, int]]) -> None:
    first = small(tmp_path / "c")
    assert begun == [("fedavg", 0), ("fedprox", 0), ("fedavg", 1), ("fedprox", 1)], (
        "all methods on a seed, then the next"
    )
    whole = (tmp_path / "c" / "compare.json").read_text()
    gone = first.runs["fedprox+mu=1"][0].folder
    before = {run.folder: (run.folder / "summary.json").stat() for runs in first.runs.values() for run in runs.values()}
    shutil.rmtree(gone)
    begun.clear()
    again = small(tmp_path / "c")
    assert begun == [("fedprox", 0)]
    for folder, stat in before.items():
        now = (folder / "summary.json").stat()
        assert ((now.st_ino, now.st_mtime_ns) == (stat.st_ino, stat.st_mtime_ns)) is (folder != gone)
    assert (
        again.runs["fedprox+mu=1"][0].summary["state_sha256"] == (first.runs["fedprox+mu=1"][0].summary["state_sha256"])
    )
    assert without_times(again.summary) == without_times(json.loads(whole))
    begun.clear()
    small(tmp_path / "c", methods=("fedavg", "joint"), seeds=(1, 2))
    assert begun == [("joint", 1), ("fedavg", 2), ("joint", 2)], "another comparison shares the runs"


def without_times(content: dict[str, Any]) -> dict[str, Any]:
    content = json.loads(json.dumps(content))
    for entry in content["methods"].values():
        for key in ("wall_seconds", "train_seconds"):
            del entry["metrics"][key]
    return content


def test_equal_configurations_share_their_runs(tmp_path: Path, begun: list[tuple[str, int]]) -> None:
    done = small(tmp_path / "c", methods={"plain": "fedavg", "named": "fedavg@paper+uniform=false"}, seeds=(0,))
    assert begun == [("fedavg", 0)]
    assert done.runs["plain"][0] is done.runs["named"][0]
    assert "The same configuration, so the same runs: plain, named." in done.markdown


class StopIn(Observer):
    """Stops the run that begins as the given one, as Ctrl-C does."""

    def __init__(self, number: int):
        self.left = number

    def started(self, info: Any) -> None:
        self.left -= 1

    def round_done(self, row: Any) -> None:
        if self.left == 0:
            raise KeyboardInterrupt


def test_an_interrupted_comparison_goes_on(
    tmp_path: Path, begun: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = small(tmp_path / "whole")
    begun.clear()
    with pytest.raises(Interrupted, match=r"run 3 of 4: fedavg, seed 1; what is done stays .* same command goes on"):
        small(tmp_path / "c", observers=[StopIn(3)])
    partial = json.loads((tmp_path / "c" / "compare.json").read_text())
    assert partial["complete"] is False
    assert partial["methods"]["fedavg"]["missing"] == {"1": None}
    assert partial["methods"]["fedavg"]["metrics"]["final_accuracy"]["n"] == 1
    assert partial["methods"]["fedavg"]["begun"] == [1] and partial["methods"]["fedprox+mu=1"]["begun"] == []
    table = (tmp_path / "c" / "compare.md").read_text()
    assert "Missing: fedavg, seed 1; begun, not ended." in table
    assert "Missing: fedprox+mu=1, seed 1; it has not been run yet." in table
    states = [line["state"] for line in csv.DictReader((tmp_path / "c" / "compare.csv").read_text().splitlines())]
    assert states == ["done", "unfinished", "done", "missing"]
    unfinished = tmp_path / "c" / "runs" / partial["methods"]["fedavg"]["runs"]["1"]
    assert (unfinished / "config.yaml").exists() and not (unfinished / "DONE").exists()
    begun.clear()
    resumed: list[Path] = []
    real = lifecycle.go_on
    monkeypatch.setattr(lifecycle, "go_on", lambda path, *args: resumed.append(path) or real(path, *args))
    done = small(tmp_path / "c")
    assert begun == [("fedavg", 1), ("fedprox", 1)] and resumed == [unfinished]
    assert without_times(done.summary) == without_times(whole.summary)


def test_a_failed_run_leaves_the_others_alone(
    tmp_path: Path, begun: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        fail_on(patch, seed=1)
        done = small(tmp_path / "c", methods=("fedavg", "joint"))
    assert begun == [("fedavg", 0), ("joint", 0), ("fedavg", 1), ("joint", 1)]
    assert list(done.failed) == [("fedavg", 1), ("joint", 1)] and "bad luck" in done.failed["fedavg", 1]
    assert done.summary["complete"] is False and done.summary["methods"]["joint"]["missing"].keys() == {"1"}
    assert "Missing: joint, seed 1: " in done.markdown and "bad luck" in done.markdown
    assert "2 runs failed" in repr(done) and [row["seeds"] for row in done.table()] == [1, 1]
    begun.clear()
    mended = small(tmp_path / "c", methods=("fedavg", "joint"))
    assert begun == [("fedavg", 1), ("joint", 1)] and not mended.failed and mended.summary["complete"]
    with monkeypatch.context() as patch:
        fail_on(patch, seed=2)
        with pytest.raises(RunError, match=r"no run ended well; fedavg, seed 2: .*bad luck"):
            small(tmp_path / "c", seeds=(2,))


def fail_on(patch: pytest.MonkeyPatch, seed: int) -> None:
    from fedloom.methods.fedavg import FedAvg

    real = FedAvg.client_update

    def work(self: Any, down: Any, state: Any, data: Any, ctx: Any) -> Any:
        if ctx.seed == seed:
            raise ValueError("bad luck")
        return real(self, down, state, data, ctx)

    patch.setattr(FedAvg, "client_update", work)


def test_a_run_folder_that_was_damaged_or_exchanged_is_named_and_left_alone(tmp_path: Path) -> None:
    done = small(tmp_path / "c", seeds=(0, 1, 2))
    broken, other, swapped = (done.runs["fedavg"][seed].folder for seed in (0, 1, 2))
    (broken / "summary.json").write_text("{")
    shutil.copyfile(broken / "env.json", other / "env.json")
    shutil.copyfile(done.runs["fedprox+mu=1"][2].folder / "summary.json", swapped / "summary.json")
    again = small(tmp_path / "c", seeds=(0, 1, 2))
    assert "summary.json' is damaged" in again.failed["fedavg", 0]
    assert "holds another run, that of the key" in again.failed["fedavg", 1]
    assert "is of another run; move" in again.failed["fedavg", 2]
    assert (broken / "summary.json").read_text() == "{"
    assert list(again.runs["fedprox+mu=1"]) == [0, 1, 2] and not again.runs["fedavg"]
    (other / "DONE").unlink()
    (other / "env.json").unlink()
    assert "env.json' is missing or damaged; move" in small(tmp_path / "c", seeds=(1,)).failed["fedavg", 1]


def test_a_run_that_another_process_holds_is_taken_last(tmp_path: Path, begun: list[Any]) -> None:
    from fedloom.engine.folder import RunFolder

    done = small(tmp_path / "c", seeds=(0,))
    for run in (done.runs[label][0] for label in TWO):
        (run.folder / "DONE").unlink()
    held, begun[:] = RunFolder.open(done.runs["fedavg"][0].folder), []

    class EndsMeanwhile(Notes):
        def started(self, info: Any) -> None:
            held.close()

    watching = EndsMeanwhile()
    again = small(tmp_path / "c", seeds=(0, 1), observers=[watching])
    assert begun == [("fedprox", 0), ("fedavg", 1), ("fedprox", 1), ("fedavg", 0)]
    assert again.summary["complete"] and not again.failed
    assert [text for text in watching.told if "fedavg, seed 0" in text] == [
        "put off, for another process works on it: fedavg, seed 0", "run 4 of 4: fedavg, seed 0",
    ]  # fmt: skip


@pytest.mark.parametrize("ends", [True, False])
def test_a_run_that_another_process_begins_at_the_same_moment_is_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    from fedloom import environment
    from fedloom.engine.folder import RunFolder

    whole = small(tmp_path / "whole", seeds=(0,))
    source = whole.runs["fedavg"][0].folder
    target = tmp_path / "c" / "runs" / source.name
    real, held = environment.environment, []

    def faster(built: Any) -> Any:
        if not target.exists():
            shutil.copytree(source, target)
            if not ends:
                (target / "DONE").unlink()
                held.append(RunFolder.open(target))
        return real(built)

    monkeypatch.setattr(environment, "environment", faster)
    done = small(tmp_path / "c", seeds=(0,))
    assert (target / "summary.json").stat().st_mtime_ns == (source / "summary.json").stat().st_mtime_ns
    if ends:
        assert done.summary["complete"] and not done.failed
    else:
        assert "is in use by another run" in done.failed["fedavg", 0] and 0 in done.runs["fedprox+mu=1"]
        assert done.summary["methods"]["fedavg"]["begun"] == [0]
        held[0].close()


def test_a_locked_run_does_not_stop_the_others(tmp_path: Path) -> None:
    from fedloom.engine.folder import RunFolder

    done = small(tmp_path / "c", seeds=(0,))
    (done.runs["fedavg"][0].folder / "DONE").unlink()
    with RunFolder.open(done.runs["fedavg"][0].folder):
        again = small(tmp_path / "c", seeds=(0,))
    assert "is in use by another run" in again.failed["fedavg", 0] and 0 in again.runs["fedprox+mu=1"]
    assert small(tmp_path / "c", seeds=(0,)).summary["complete"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"methods": ("fedavg", "fedprx")}, "unknown method 'fedprx'. Did you mean 'fedprox'"),
        ({"methods": ("fedavg", "fedprox+mu=-1")}, r"^fedprox\+mu=-1: method.mu must be at least 0, got -1"),
        ({"methods": {"mine": "fedprox+mu=-1"}}, "^mine: method.mu must be at least 0, got -1"),
        ({"methods": ("fedavg", "fedprx")}, "^unknown method 'fedprx'"),
        ({"methods": ("fedprox", "fedavg"), "training": {"rounds": 0}}, "^training.rounds must be"),
        ({"reference": ["fedavg"]}, "unknown reference"),
        ({"metric": ["final_accuracy"]}, "unknown metric"),
        ({"metric": "personal_domain_mean"}, "metric is 'personal_domain_mean', but the data have no domains"),
        ({"methods": ("fedavg", "fedprox@papre")}, "unknown preset of fedprox 'papre'"),
        ({"methods": ("fedprox", "fedavg"), "method": {"mu": 1.0}}, "unknown option of fedavg 'method.mu'"),
        (
            {"methods": ("fedprox", "joint"), "method.uniform": True},
            "for one of them name fedprox.uniform=true instead",
        ),
        ({"methods": ("joint", "joint+visits=all"), "method.visit": "all"}, "unknown option of joint 'method.visit'"),
        ({"method": "joint"}, "method.name is set by the entries of the comparison"),
        ({"method.preset": "paper"}, "method.preset is set by the entries"),
        ({"method": 5}, "method must be a mapping of options for every method"),
        ({"seed": 1}, "seed is set for every run by the seeds of the comparison"),
        ({"reference": "fedprox"}, "unknown reference 'fedprox'. Did you mean 'fedprox.mu=1'"),
        ({"seeds": (0, -1)}, "seeds must be whole numbers from 0"),
        ({"seeds": (2**63,)}, "seed must be at most"),
        ({"training": {"round": 2}}, "unknown key 'training.round'. Did you mean 'training.rounds'"),
        ({"engine": {"device": "cuda:99"}}, "fedavg, seed 0: engine.device is cuda:99"),
        ({"engine.device": "cuda:99"}, "fedavg, seed 0: engine.device is cuda:99"),
        ({"data": {"name": "no/such"}}, "fedavg, seed 0: "),
        ({"out": ""}, "out is empty; name a folder"),
    ],
)
def test_a_slip_costs_nothing(tmp_path: Path, begun: list[Any], given: dict[str, Any], words: str) -> None:
    with pytest.raises((ConfigError, DataError), match=words):
        fedloom.compare(**{"recipe_or_config": SMALL, "methods": TWO, "out": tmp_path / "c", **given})
    assert not begun and not (tmp_path / "c").exists()


def test_a_folder_that_cannot_be_written_is_refused_at_once(tmp_path: Path, begun: list[Any]) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "runs").touch()
    with pytest.raises(ConfigError, match=r"c', which cannot be written: File exists; name another folder"):
        small(tmp_path / "c")
    with pytest.raises(ConfigError, match=r"file', which is a file; name a folder"):
        small(tmp_path / "file")
    assert not begun


def test_the_settings_are_what_is_set_over_the_recipe() -> None:
    from torch import nn

    from fedloom.comparison.settings import settings

    given = {"data": None, "model": "linear", "engine": {"workers": 2, "device": "cpu"}, "training.rounds": 2}
    given |= {"training": {"optimizer": "adamw", "cohort": 0.5}, "method": {"uniform": True}, "data.root": "/x"}
    assert settings("quickstart", given) == {
        "engine.device": "cpu", "method.uniform": True, "model.name": "linear", "training.cohort": 0.5,
        "training.optimizer.name": "adamw", "training.rounds": 2,
    }  # fmt: skip
    below = {"method": {"name": "fedprox"}, "seed": 3, "stream": {"kind": "static"}, "training.rounds": 5}
    found = settings(below, {"data": (np.ones(2), np.ones(2)), "model": nn.Linear(4, 3), "training": {"rounds": 1}})
    assert found.pop("model.name").startswith("object:Linear-")
    assert found == {"stream.kind": "static", "training.rounds": 1}
    assert settings(None, {}) == {}


def test_the_table_says_what_was_set(tmp_path: Path) -> None:
    done = fedloom.compare(
        "quickstart", ["joint"], [0], out=tmp_path / "c", model="linear", stream={"tasks": 2}, training={"rounds": 1}
    )
    assert done.summary["settings"] == {"model.name": "linear", "stream.tasks": 2, "training.rounds": 1}
    assert "- Set: model.name=linear, stream.tasks=2, training.rounds=1." in done.markdown


def test_pooled_data_leave_traffic_and_clients_out(tmp_path: Path) -> None:
    done = small(tmp_path / "c", ("fedavg", "joint"), (0,))
    per = {label: entry["metrics"].keys() for label, entry in done.summary["methods"].items()}
    assert per["fedavg"] - per["joint"] == {
        "bytes_up", "bytes_down", "per_client_accuracy_mean", "per_client_accuracy_worst10",
    }  # fmt: skip
    assert (
        "- joint pools the data of all clients: a reference, not a federation; it has no traffic and no rank."
        in done.markdown
    )


def test_the_metric_changes_the_table_alone(tmp_path: Path, begun: list[Any]) -> None:
    from fedloom.evaluate.statistics import compare_paired

    usual, times = small(tmp_path / "c", seeds=(0, 1, 2)), len(begun)
    other = small(tmp_path / "c", seeds=(0, 1, 2), metric="forgetting")
    assert len(begun) == times == 6, "no run is made for it"
    shown = {"metric", "lower_is_better", "pareto"}
    assert {key for key, value in other.summary.items() if value != usual.summary[key]} <= shown
    assert other.summary["metric"] == "forgetting" and other.summary["lower_is_better"]
    assert other.table() == usual.table()
    values = [[run.summary["forgetting"] for run in runs.values()] for runs in other.runs.values()]
    p = compare_paired(values[1], values[0]).p_t
    assert p is not None and p != usual.table()[1]["final_accuracy_p"]
    row = next(line for line in other.markdown.splitlines() if line.startswith("| fedprox+mu=1 |"))
    assert "p of forgetting against fedavg" in other.markdown and f"| {p:.3f} |" in row
    assert "p of final accuracy against fedavg" in usual.markdown
    assert other.markdown == (tmp_path / "c" / "compare.md").read_text()


def test_a_metric_that_no_run_has_is_refused_and_the_runs_are_kept(tmp_path: Path, begun: list[Any]) -> None:
    words = r"no run of the comparison has the metric per_client_accuracy_mean; .* one of final_accuracy, average_incr"
    for _ in range(2):
        with pytest.raises(ConfigError, match=words):
            small(tmp_path / "c", ("joint",), (0,), metric="per_client_accuracy_mean")
    assert begun == [("joint", 0)] and "per_client" not in (tmp_path / "c" / "compare.csv").read_text()
    done = small(tmp_path / "c", ("joint", "fedavg"), (0,), metric="per_client_accuracy_mean")
    assert "- joint has no per client accuracy mean, so nothing is tested against it." in done.markdown


def test_personal_methods_are_told_by_what_they_declare(tmp_path: Path) -> None:
    done = small(tmp_path / "c", ("fedavg", "fedbn"), (0,))
    assert [entry["personal"] for entry in done.summary["methods"].values()] == [False, True]
    assert "fedbn: clients predict with views of their own" in done.markdown
    assert "--metric per_client_accuracy_mean tests by own views." in done.markdown


def test_common_options_are_for_every_method_that_does_not_set_them(tmp_path: Path) -> None:
    done = small(tmp_path / "c", ("fedavg", "fedprox", "fedprox+uniform=false"), (0,), **{"method.uniform": True})
    assert [entry["method"]["uniform"] for entry in done.summary["methods"].values()] == [True, True, False]


def test_own_arrays_and_an_own_network(tmp_path: Path, begun: list[Any]) -> None:
    from torch import nn

    rng = np.random.default_rng(0)
    y = np.arange(60) % 3
    x = (rng.normal(size=(60, 4)) + 4 * np.eye(3, 4)[y]).astype(np.float32)
    parts = {key: SMALL[key] for key in ("partition", "training")}
    given = {"data": (x, y), "model": nn.Linear(4, 3), "stream": {"kind": "static"}, "out": tmp_path / "c", **parts}
    done = fedloom.compare(methods=["fedavg"], seeds=[0, 1], **given)
    assert done.summary["recipe"] == "own-data" and len(begun) == 2
    assert "Forgetting" not in done.markdown and "Current task" not in done.markdown
    assert done.runs["fedavg"][1].predict(x).shape == (60,)
    (done.runs["fedavg"][1].folder / "DONE").unlink()
    again = fedloom.compare(methods=["fedavg"], seeds=[0, 1], **given)
    assert len(begun) == 3 and again.runs["fedavg"][0].predict(x).shape == (60,)


def test_the_default_folder_stays_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: list[Any]) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        done = fedloom.compare(SMALL, ["fedavg"], [0])
    assert done.folder == Path("runs/run/compare") and begun == [("fedavg", 0)]


class Notes(Observer):
    """Keeps what it is told between runs."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def note(self, text: str) -> None:
        self.told.append(text)


def test_checks_that_take_long_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedloom.comparison import planned

    monkeypatch.setattr(planned, "PATIENCE", 0.0)
    told: list[str] = []
    given = {"out": tmp_path / "c", "reference": None, "data": None, "model": None, "engine": None}
    planned.plan(SMALL, TWO, (3, 4), tell=told.append, **given)
    assert told[0] == "checking run 1 of 4: fedavg, seed 3" and told[-1] == "checking run 4 of 4: fedprox+mu=1, seed 4"
    monkeypatch.undo()
    planned.plan(SMALL, TWO, (3, 4), tell=told.append, **given)
    assert len(told) == 4


def test_progress_names_the_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small(tmp_path / "c", seeds=(0,))
    assert not capsys.readouterr().err
    watching = Notes()
    small(tmp_path / "c", seeds=(0, 1), observers=[watching], verbose=True)
    told = ["already there: 2 of 4 runs", "run 3 of 4: fedavg, seed 1", "run 4 of 4: fedprox+mu=1, seed 1"]
    assert watching.told == told
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if line in told] == told and any(
        " round 0 of 1: 2 clients" in line for line in lines
    )


def small_ablation(out: Path, method: Any = "fedfmx+experts=2", **more: Any) -> fedloom.Comparison:
    return fedloom.ablate(method, {**SMALL, "training": {"rounds": 1, "batch_size": 64}}, (0,), out=out, **more)


def test_an_ablation_sets_a_method_against_itself_without_its_parts(tmp_path: Path) -> None:
    done = small_ablation(tmp_path / "a", switches=["no-rar", "top1"])
    assert list(done.runs) == ["full", "no-rar", "top1"] and done.summary["reference"] == "full"
    methods = {label: entry["method"] for label, entry in done.summary["methods"].items()}
    assert {section["experts"] for section in methods.values()} == {2}
    assert (methods["full"]["gamma"], methods["no-rar"]["gamma"], methods["top1"]["stop"]) == (0.6, 0.0, 1)
    assert len({runs[0].summary["state_sha256"] for runs in done.runs.values()}) == 3
    assert done.markdown.startswith("**Ablation of fedfmx+experts=2, run (sklearn/digits;")


def test_options_of_a_switch_go_over_those_of_the_entry(tmp_path: Path) -> None:
    done = small_ablation(tmp_path / "a", {"name": "fedfmx", "experts": 2, "stop": 2}, switches="top1")
    assert [entry["method"]["stop"] for entry in done.summary["methods"].values()] == [2, 1]


def test_every_declared_switch_is_an_option_of_its_method(tmp_path: Path) -> None:
    from fedloom.comparison.planned import plan_ablation
    from fedloom.methods import ablations, names

    declaring = [name for name in names() if ablations(name)]
    assert "fedfmx" in declaring
    for name in declaring:
        given = {"switches": None, "out": tmp_path, "reference": None, "data": None, "engine": None}
        data = {**SMALL, "data": {"name": "sklearn/digits-domains"}}
        method = method_of(f"fedloom.methods.{name}:{name}")
        model = {"name": "moe_mlp" if method.needs_experts else "resnet8"}
        if method.needs_clip:
            design = {**architecture(image_size=8, patch_size=4), "embed_dim": 128}
            model = {"name": "clip_small", "weights": "random", "options": {"config": {"model_cfg": design}}}
        found = plan_ablation(name, data, (0,), model=model, **given)
        assert len(found.runs) == len(ablations(name)) + 1, f"a switch of {name} changes nothing"


def test_a_method_without_switches_cannot_be_ablated(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"method 'fedavg' declares no switches"):
        small_ablation(tmp_path / "a", "fedavg")


@pytest.mark.parametrize(
    ("entry", "name"),
    [
        ("fedfmx", "fedfmx"),
        ("fedloom.methods.fedfmx:fedfmx", "fedloom.methods.fedfmx-fedfmx"),
        ("fedfmx@paper+experts=2", "fedfmx@paper+experts=2"),
        ({"name": "fedfmx", "body": [8, 4]}, "fedfmx+body=-8-4"),
        ("fedfmx+body=[" + "8," * 90 + "8]", "fedfmx+body=" + "-8" * 44),
    ],
)
def test_the_title_and_the_default_folder_of_an_ablation_name_the_whole_word(entry: Any, name: str) -> None:
    found = ablation(entry, switches="top1")
    assert found.folder == Path("runs/run") / f"ablate-{name}"
    assert found.title == f"Ablation of {entries.label(entry)}"


def ablation(entry: Any, **more: Any) -> Any:
    """Plan one."""
    from fedloom.comparison.planned import plan_ablation

    given = {"switches": None, "out": None, "reference": None, "data": None, "model": None, "engine": None}
    return plan_ablation(entry, SMALL, (0,), **{**given, **more})


@pytest.mark.parametrize(
    ("declared", "words"),
    [
        ({"full": {}}, "declares a switch named 'full', which is what the method with all its parts is called; rename"),
        ({"no-x": {"uniform": True, "unifrom": True}}, "switch no-x of own:fedx: unknown option 'unifrom'. Did you"),
        ({"no-x": {"name": "fedavg"}}, "switch no-x of own:fedx: unknown option 'name'"),
        ({"no-x": {"uniform": 5}}, "switch no-x: method.uniform must be true or false, got 5"),
        ({"no-x": {"preset": "code"}}, "switch no-x: unknown preset of own:fedx 'code'"),
    ],
)
def test_a_switch_that_cannot_be_run_is_refused_by_its_name(
    monkeypatch: pytest.MonkeyPatch, declared: dict[str, Any], words: str
) -> None:
    from fedloom.methods.fedavg import fedavg

    own = types.ModuleType("own")
    own.fedx, own.ABLATIONS = fedavg, {"fine": {"uniform": True}, **declared}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "own", own)
    with pytest.raises(ConfigError, match=words):
        ablation("own:fedx")


def test_a_comparison_is_a_value_that_notebooks_show(tmp_path: Path) -> None:
    done = small(tmp_path / "c", ("fedavg",), (0,))
    assert done._repr_markdown_() == (tmp_path / "c" / "compare.md").read_text()
    assert isinstance(done.runs["fedavg"], dict) and not isinstance(done.runs, Sequence)
