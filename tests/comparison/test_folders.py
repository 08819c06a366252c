"""Run folders of a comparison that were damaged, exchanged or shared: named with the mend, and the others run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fedloom
from fedloom import lifecycle
from fedloom.comparison import planned
from fedloom.comparison.folders import finished
from fedloom.core.errors import CheckpointError, ConfigError, Interrupted
from fedloom.engine.experiment import Observer
from fedloom.engine.folder import RunFolder

SMALL = {
    "data": {"name": "sklearn/digits"},
    "model": {"name": "linear"},
    "stream": {"kind": "static"},
    "partition": {"kind": "iid", "clients": 2},
    "training": {"rounds": 1},
}
DEEP = "[" * 100_000
MEND = r"; move '{}' away, and the same comparison makes the run anew"


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures take a second."""
    monkeypatch.setattr(lifecycle, "_pictures", lambda *args: None)
    monkeypatch.setattr("fedloom.report.pareto.save", lambda *args: False)


def small(out: Path, seeds: Any = (0,), methods: Any = ("fedavg", "fedprox"), **more: Any) -> fedloom.Comparison:
    return fedloom.compare(SMALL, methods, seeds, out=out, **more)


SUMMARY = {"method": "fedavg", "seed": 0, "final_accuracy": 0.5, "dataset": "d", "accuracy_matrix": [[1, None], [1, 2]]}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"accuracy_matrix": [[1], [1, 2, 3]]}, "accuracy_matrix is no list of rows of one length"),
        ({"accuracy_matrix": [None, None]}, "accuracy_matrix is no list of rows"),
        ({"accuracy_matrix": [1, 2]}, "accuracy_matrix is no list of rows"),
        ({"accuracy_matrix": {"0": [1]}}, "accuracy_matrix is no list of rows"),
        ({"accuracy_matrix": [["a", "b"], ["c", "d"]]}, "accuracy_matrix holds what is no number"),
        ({"accuracy_matrix": [[1.0, 0.5], [1.0, 1e300]]}, "accuracy_matrix holds what is no number"),
        ({"bytes_up": 10**400}, "bytes_up is a number of more than 64 bits"),
        ({"bytes_up": 1e300}, "bytes_up is 1e.300"),
        ({"final_accuracy": float("nan")}, "final_accuracy is nan"),
        ({"final_accuracy": "high"}, "final_accuracy is 'high'"),
        ({"failed_clients": True}, "failed_clients is True"),
        ({"dataset": 3}, "dataset is 3"),
        ({"dataset": "\ud800"}, "dataset holds characters that are no text"),
        ({"scenario": ["static"]}, "scenario is .'static'"),
        ({"data_view": 1}, "data_view is 1"),
        ({"method": "joint"}, "is of another run"),
        ({"seed": 3}, "is of another run"),
    ],
)
def test_a_summary_that_no_run_writes_is_damaged(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    (tmp_path / "summary.json").write_text(json.dumps(SUMMARY))
    assert finished(tmp_path, "fedavg", 0).summary["dataset"] == "d"
    (tmp_path / "summary.json").write_text(json.dumps({**SUMMARY, **changes}))
    with pytest.raises(CheckpointError, match=words + ".*" + MEND.format(tmp_path)):
        finished(tmp_path, "fedavg", 0)


@pytest.mark.parametrize("text", ["", "[]", "{}", DEEP, '{"final_accuracy":' + DEEP])
def test_a_summary_that_cannot_be_read_is_damaged(tmp_path: Path, text: str) -> None:
    (tmp_path / "summary.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"summary.json' is damaged \(.+\)" + MEND.format(tmp_path)):
        finished(tmp_path, "fedavg", 0)


def test_damaged_folders_leave_the_other_runs_alone(tmp_path: Path) -> None:
    done = small(tmp_path / "c", range(6))
    folder = {seed: run.folder for seed, run in done.runs["fedavg"].items()}
    rewrite(folder[0] / "summary.json", accuracy_matrix=[[1], [1, 2, 3]])
    rewrite(folder[1] / "summary.json", dataset=3)
    (folder[2] / "summary.json").write_text(DEEP)
    (folder[3] / "env.json").write_text(DEEP)
    (folder[4] / "FAILED").mkdir()
    (folder[5] / ".lock").unlink()
    (folder[5] / ".lock").mkdir()
    for seed in (4, 5):
        (folder[seed] / "DONE").unlink()
    shutil.rmtree(done.runs["fedprox"][5].folder)
    again = small(tmp_path / "c", range(6))
    assert list(again.failed) == [("fedavg", seed) for seed in range(6)] and list(again.runs["fedprox"]) == [*range(6)]
    for seed, words in enumerate(("accuracy_matrix is", "dataset is 3", "recursion", "env.json' is missing or damaged",
                                  "FAILED' cannot be used (Is a directory)", ".lock' cannot be used")):  # fmt: skip
        assert words in again.failed["fedavg", seed]
        assert again.failed["fedavg", seed].endswith(MEND.format(folder[seed]))


def rewrite(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_what_lies_in_the_way_of_a_run_is_named_until_it_is_moved_away(tmp_path: Path) -> None:
    done = small(tmp_path / "c", range(7), ("fedavg",))
    folder = {seed: run.folder for seed, run in done.runs["fedavg"].items()}
    for seed in range(4):
        shutil.rmtree(folder[seed])
    (folder[0]).mkdir()
    (folder[0] / "notes.txt").touch()
    (folder[1]).touch()
    (folder[2]).symlink_to(tmp_path / "nowhere")
    (folder[3]).mkdir()
    (folder[3] / "env.json").write_text("{}")
    (folder[3] / "metrics.jsonl").touch()
    for seed in (4, 5, 6):
        (folder[seed] / "DONE").unlink()
    config = folder[4] / "config.yaml"
    config.write_text(config.read_text().replace("rounds: 1", "rounds: 2"))
    (folder[5] / "config.yaml").write_text(DEEP)
    for meta in folder[6].glob("checkpoints/*/meta.json"):
        meta.write_text("{")
    (tmp_path / "c" / "runs" / "stray").touch()
    again = small(tmp_path / "c", range(8), ("fedavg",))
    assert list(again.runs["fedavg"]) == [7]
    words = ["is in the way, for it is no run folder"] * 4
    words += [
        "config.yaml' has changed since the run began",
        "config.yaml' can no longer be run (",
        "cannot be gone on",
    ]
    for seed, told in enumerate(words):
        assert told in again.failed["fedavg", seed]
        assert again.failed["fedavg", seed].endswith(MEND.format(folder[seed]))
        assert again.failed["fedavg", seed].count(";") == 1, "one mend, that of a comparison"
        folder[seed].rename(tmp_path / f"moved {seed}")
    mended = small(tmp_path / "c", range(8), ("fedavg",))
    assert not mended.failed and mended.summary["complete"]
    for seed, run in done.runs["fedavg"].items():
        assert mended.runs["fedavg"][seed].summary["state_sha256"] == run.summary["state_sha256"]


class When(Observer):
    """Does something once it is told a note that holds certain words."""

    def __init__(self, words: str, act: Callable[[], Any]):
        self.words, self.act, self.told = words, act, list[str]()

    def note(self, text: str) -> None:
        self.told.append(text)
        if self.words in text:
            self.act()


def test_a_run_that_another_process_ends_at_the_last_moment_counts(tmp_path: Path) -> None:
    done = small(tmp_path / "c")
    path = done.runs["fedavg"][0].folder
    (path / "DONE").unlink()
    with RunFolder.open(path):
        ends = When("fedavg, seed 0 failed: ", (path / "DONE").touch)
        again = small(tmp_path / "c", observers=[ends])
    assert any("is in use by another run" in text for text in ends.told), "it was given up before"
    assert not again.failed and again.summary["complete"]
    assert json.loads((tmp_path / "c" / "compare.json").read_text()) == again.summary


def test_what_another_process_has_done_meanwhile_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = small(tmp_path / "whole").runs["fedprox"][0].folder
    target = tmp_path / "c" / "runs" / source.name
    copies = When("run 1 of 2", lambda: shutil.copytree(source, target))
    again = small(tmp_path / "c", observers=[copies])
    assert copies.told == ["run 1 of 2: fedavg, seed 0"] and again.summary["complete"]
    assert (target / "DONE").stat().st_mtime_ns == (source / "DONE").stat().st_mtime_ns


def test_a_lock_that_is_taken_between_a_look_and_the_start_reads_as_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = small(tmp_path / "c")
    path = done.runs["fedavg"][0].folder
    (path / "DONE").unlink()
    monkeypatch.setattr(planned.Planned, "held", lambda self, key: False)
    with RunFolder.open(path):
        again = small(tmp_path / "c")
    assert again.failed["fedavg", 0] == (
        f"'{path}' is in use by another run; when that has ended, call the same comparison again"
    )


def test_an_error_that_nobody_foresaw_fails_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, raised = planned.start, [ZeroDivisionError("odd"), SystemExit(3)]

    def start(*args: Any) -> Any:
        if raised:
            raise raised.pop(0)
        return real(*args)

    monkeypatch.setattr(planned, "start", start)
    done = small(tmp_path / "c", (0, 1))
    assert list(done.failed) == [("fedavg", 0), ("fedprox", 0)] and all(
        list(runs) == [1] for runs in done.runs.values()
    )
    assert done.failed["fedavg", 0].startswith("the run failed with ZeroDivisionError: odd (test_folders.py:")
    assert done.failed["fedprox", 0].startswith("the run failed with SystemExit: 3 (")


def test_a_stop_in_the_middle_of_an_import_stops_the_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*args: Any) -> Any:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            raise ImportError("half a module") from error

    monkeypatch.setattr(planned, "start", start)
    with pytest.raises(Interrupted, match="interrupted in run 1 of 2: fedavg, seed 0"):
        small(tmp_path / "c")


def test_an_observer_that_fails_is_told_no_more(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise ValueError("no room")

    bad, good = When("run 1", fail), When("none", fail)
    done = small(tmp_path / "c", observers=[bad, good])
    assert done.summary["complete"] and bad.told == ["run 1 of 2: fedavg, seed 0"]
    assert [text for text in good.told if text.startswith("run ")] == [
        "run 1 of 2: fedavg, seed 0", "run 2 of 2: fedprox, seed 0",
    ]  # fmt: skip
    assert capsys.readouterr().err == "an observer failed and is told no more: ValueError: no room\n"


def test_the_folder_of_a_run_is_no_folder_of_a_comparison(tmp_path: Path) -> None:
    run = fedloom.run(SMALL, out=tmp_path / "r")
    with pytest.raises(ConfigError, match=r"r', which is the folder of a run \(it holds config.yaml\); name another"):
        small(run.folder)
    assert not (run.folder / "compare.json").exists() and not (run.folder / "runs").exists()


@pytest.mark.parametrize("out", ["\0", "a\0b", "\ud800"])
def test_what_is_no_path_is_refused_in_words(out: Any) -> None:
    with pytest.raises(ConfigError, match=r"out '.*' is no usable path: .*; name another"):
        small(out)
