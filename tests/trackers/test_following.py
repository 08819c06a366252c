"""What lies between a run and its tracker: every row once, and no fault of the tracker ends the run."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import fedloom
from fedloom import api
from fedloom.core.errors import Interrupted
from fedloom.engine.experiment import Observer
from fedloom.trackers import Card
from fedloom.trackers.following import how_to_see

SMALL = {
    "method": "fedavg",
    "model": "linear",
    "training": {"rounds": 2, "local_epochs": 1},
    "partition": {"clients": 3},
    "stream": {"tasks": 2},
}


class Memory:
    """A tracker that remembers what it was told, and fails when told to."""

    lasting, see = True, "look here"

    def __init__(self, card: Card, fails: Sequence[str]):
        self.card, self.fails, self.record = card, fails, card.record or "first"
        self.points: list[tuple[int, Mapping[str, float]]] = []
        self.end: Any = None
        self.closed: list[str] = []
        self._may_fail("begin")

    def _may_fail(self, where: str) -> None:
        if where in self.fails:
            raise OSError(f"no space for {where}\nand a second line")

    def log(self, values: Mapping[str, float], step: int) -> None:
        if len(self.points) == 1:
            self._may_fail("log")
        self.points.append((step, values))

    def finish(self, values: Mapping[str, float], step: int, pictures: Sequence[Path], files: Sequence[Path]) -> None:
        self._may_fail("finish")
        self.end = values, step, [p.name for p in pictures], [p.name for p in files]

    def close(self, how: str) -> None:
        self.closed.append(how)
        self._may_fail("close")


@pytest.fixture
def trackers(monkeypatch: pytest.MonkeyPatch, no_pictures: None) -> Callable[..., list[Memory]]:
    """Puts a tracker in the place of TensorBoard's; the list of those that were begun."""

    def install(*fails: str) -> list[Memory]:
        begun: list[Memory] = []
        module = ModuleType("fedloom.trackers.tensorboard")

        def tensorboard(card: Card) -> Memory:
            begun.append(made := Memory(card, fails))
            return made

        module.tensorboard = tensorboard  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "fedloom.trackers.tensorboard", module)
        monkeypatch.setattr("fedloom.trackers._is_installed", lambda name: True)
        return begun

    return install


class Watch(Observer):
    """Keeps the notes and stops at a row."""

    def __init__(self, at: tuple[int, int] | None = None):
        self.notes: list[str] = []
        self.at = at

    def note(self, text: str) -> None:
        self.notes.append(text)

    def round_done(self, row: Mapping[str, Any]) -> None:
        if (row["stage"], row["round"]) == self.at:
            raise Interrupted("stopped")


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_tracker_is_told_of_the_run_its_rows_and_its_end(tmp_path: Path, trackers: Any) -> None:
    begun = trackers()
    run = fedloom.run("quickstart", tracker="tensorboard", seed=3, out=tmp_path / "run", **SMALL)
    (tracker,) = begun
    card = tracker.card
    assert (card.title, card.folder, card.record) == ("fedavg, seed 3", tmp_path / "run", None)
    assert card.config["training"]["rounds"] == 2 and card.config["engine"]["device"] in ("cpu", "cuda")
    assert card.config_hash == json.loads((tmp_path / "run" / "env.json").read_text())["config_hash"]
    assert [step for step, _ in tracker.points] == [0, 1, 1, 2, 3, 3]
    assert [v["bytes_up"] for _, v in tracker.points if "bytes_up" in v] == [
        row["bytes_up"] for row in rows(tmp_path / "run") if "bytes_up" in row
    ]
    values, step, pictures, files = tracker.end
    assert values["summary/final_accuracy"] == run.summary["final_accuracy"] and step == 3
    assert (pictures, files) == ([], ["summary.json", "config.yaml"]) and tracker.closed == ["finished"]


@pytest.mark.parametrize("every", [1, 0])
def test_a_resumed_run_goes_on_with_its_record(tmp_path: Path, trackers: Any, every: int) -> None:
    begun, folder = trackers(), tmp_path / "run"
    with pytest.raises(Interrupted):
        fedloom.run(
            "quickstart",
            tracker="tensorboard",
            out=folder,
            observers=[Watch((1, 0))],
            checkpoint={"every": every},
            **SMALL,
        )
    api.resume(folder)
    first, second = begun
    assert second.card.record == "first" and (first.closed, second.closed) == (["stopped"], ["finished"])
    assert [step for step, _ in first.points] == [0, 1, 1]
    assert [step for step, _ in second.points] == [2, 3, 3]
    assert json.loads((folder / "tracker.json").read_text())["rows"] == len(rows(folder)) == 6


def test_the_end_is_at_the_last_step_however_many_rows_the_record_lacked(tmp_path: Path, trackers: Any) -> None:
    begun, folder = trackers(), tmp_path / "run"
    fedloom.run("quickstart", tracker="tensorboard", out=folder, **SMALL)
    state = json.loads((folder / "tracker.json").read_text())
    for known, told in ((6, []), (5, [3]), (2, [1, 2, 3, 3])):
        (folder / "tracker.json").write_text(json.dumps({**state, "rows": known}))
        (folder / "DONE").unlink()
        api.resume(folder)
        assert [step for step, _ in begun[-1].points] == told and begun[-1].end[1] == 3


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"see": 3}', "null"])
def test_without_a_sound_record_there_is_nothing_to_see(tmp_path: Path, text: str) -> None:
    assert how_to_see(tmp_path) is None
    (tmp_path / "tracker.json").write_text(text)
    assert how_to_see(tmp_path) is None


@pytest.mark.parametrize(("lasting", "rows"), [(True, [1, 2, 3, 4, 5, 6, 6]), (False, [0, 0, 0, 0, 0, 0, 6])])
def test_only_rows_that_last_are_counted(
    tmp_path: Path, trackers: Any, monkeypatch: pytest.MonkeyPatch, lasting: bool, rows: list[int]
) -> None:
    trackers()
    monkeypatch.setattr(Memory, "lasting", lasting)
    counts: list[int] = []

    class Count(Observer):
        def finished(self, summary: Mapping[str, Any]) -> None:
            self.read()

        def round_done(self, row: Mapping[str, Any]) -> None:
            self.read()

        stage_done = round_done

        def read(self) -> None:
            counts.append(json.loads((tmp_path / "run" / "tracker.json").read_text())["rows"])

    watch = Count()
    fedloom.run("quickstart", tracker="tensorboard", out=tmp_path / "run", observers=[watch], **SMALL)
    watch.read()
    assert counts[1:] == rows, "told before the tracker is, so one row behind"


def test_what_a_record_lacks_is_added_when_the_run_goes_on(tmp_path: Path, trackers: Any) -> None:
    """Its tracker had failed, was another one, or was lost with the process."""
    begun, folder = trackers(), tmp_path / "run"
    with pytest.raises(Interrupted):
        fedloom.run("quickstart", tracker="tensorboard", out=folder, observers=[Watch((1, 0))], **SMALL)
    state = json.loads((folder / "tracker.json").read_text())
    (folder / "tracker.json").write_text(json.dumps({**state, "rows": 1}))
    api.resume(folder)
    assert [step for step, _ in begun[1].points] == [1, 1, 2, 3, 3]
    (folder / "DONE").unlink()
    others = ({"tracker": {"name": "wandb"}}, {"rows": "1"}, {"rows": None}, {"record": 5})
    for left in ("damaged", "[]", '{"tracker": null}', *(json.dumps({**state, **other}) for other in others)):
        (folder / "tracker.json").write_text(left)
        api.resume(folder)
        assert begun[-1].card.record is None and [step for step, _ in begun[-1].points] == [0, 1, 1, 2, 3, 3]
        (folder / "DONE").unlink()


@pytest.mark.parametrize("where", ["begin", "log", "finish", "close"])
def test_a_failing_tracker_is_told_no_more_and_the_run_ends_well(tmp_path: Path, trackers: Any, where: str) -> None:
    begun, watch = trackers(where), Watch()
    fedloom.run("quickstart", tracker="tensorboard", out=tmp_path / "run", observers=[watch], **SMALL)
    assert watch.notes == [
        f"the tracker tensorboard failed and is told no more (OSError: no space for {where}); the run goes on, "
        "see log.txt"
    ]
    assert (tmp_path / "run" / "DONE").exists() and len(rows(tmp_path / "run")) == 6
    assert f"no space for {where}\nand a second line" in (tmp_path / "run" / "log.txt").read_text()
    assert [len(tracker.points) for tracker in begun] == {"begin": [], "log": [1]}.get(where, [6])
    assert all((tracker.end is None) == (where != "close") for tracker in begun)


def test_a_run_that_fails_closes_the_record_as_failed(
    tmp_path: Path, trackers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = trackers()
    monkeypatch.setattr("fedloom.lifecycle._finish", lambda *args: 1 / 0)
    with pytest.raises(fedloom.core.errors.RunError):
        fedloom.run("quickstart", tracker="tensorboard", out=tmp_path / "run", **SMALL)
    assert begun[0].closed == ["failed"] and begun[0].end is None


def test_every_run_of_a_comparison_has_a_record_of_its_own(tmp_path: Path, trackers: Any) -> None:
    begun = trackers()
    small = {key: value for key, value in SMALL.items() if key != "method"}
    found = fedloom.compare("quickstart", ["fedavg"], [0, 1], tracker="tensorboard", out=tmp_path / "c", **small)
    assert [tracker.card.title for tracker in begun] == ["fedavg, seed 0", "fedavg, seed 1"]
    assert {tracker.card.folder.parent for tracker in begun} == {found.folder / "runs"}


@pytest.mark.parametrize("engine", ["serial", "flower"])
def test_only_the_servers_process_tells_the_tracker(tmp_path: Path, trackers: Any, engine: str) -> None:
    if engine == "flower":
        pytest.importorskip("flwr", reason="needs the extra 'flower'")
    begun = trackers()
    workers = {"workers": 2} if engine == "serial" else {}
    fedloom.run("quickstart", tracker="tensorboard", out=tmp_path / "run", engine={"name": engine, **workers}, **SMALL)
    assert [[step for step, _ in tracker.points] for tracker in begun] == [[0, 1, 1, 2, 3, 3]]
