"""Nodes that die, leave, come back, fall silent or lose what they had: the run goes on, with the right bits."""

from __future__ import annotations

import dataclasses
import functools
import signal
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from flwr.app import Message

from fedloom.core import ConfigError, Interrupted, RunError
from fedloom.engine.files import write_json
from fedloom.engine.flower import dispatch, post
from fedloom.engine.flower.node import Node
from fedloom.engine.folder import RunFolder
from toys import grids
from toys.faults import Fault
from toys.federation import experiment
from toys.grids import Tapped, at
from toys.running import Notes, rows
from toys.running import start as start_serial

PLAN = {"num_stages": 2, "cohort": 1.0}
SECOND = (2, 3)  # the clients of node 2, of two


def faulty(*faults: Fault):
    return experiment("toys.faults:faulty", options={"faults": faults}, **PLAN)


@functools.cache
def serial(*faults: Fault) -> dict[str, Any]:
    """What a serial run with these faults gives."""
    with tempfile.TemporaryDirectory() as folder:
        return start_serial(Path(folder) / "run", faulty(*faults), checkpoint_every=0)


def without(*places: tuple[int, int], clients: tuple[int, ...] = SECOND) -> str:
    """State of a serial run in which clients fail at some (stage, round)."""
    return serial(*(Fault("raise", c, stage, round) for stage, round in places for c in clients))["state_sha256"]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dispatch, "LOOK", 0.0)
    monkeypatch.setattr(dispatch, "PING", 1e6)
    monkeypatch.setattr(post, "NAPS", (0.001, 0.01))


class Scene(Tapped):
    """A grid that does something when node 2 is sent its training of stage 1, round 0, for the first time."""

    def __init__(self, apps: Any, then: Callable[[Scene], None], hold: Callable[[Scene], bool] = lambda grid: False):
        super().__init__(apps)
        self.then, self.hold, self.due, self.pings = then, hold, 1, 0

    def sent(self, node: int, asked: Mapping[str, Any], message: Message) -> None:
        if node == 2 and at(asked, 1, 0) and self.due:
            self.due -= 1
            self.then(self)

    def held(self, node: int, asked: Mapping[str, Any]) -> bool:
        self.pings += asked["ask"] == "ping"
        return node == 2 and at(asked, 1, 0) and self.hold(self)


def play(path: Path, notes: Notes | None = None, *, whole: Any = None, kind: Any = Scene, nodes: int = 2, **given: Any):
    """A run over a grid with a scene; `options` are those of the run."""
    whole, options = whole or faulty(), {"checkpoint_every": 0, **given.pop("options", {})}
    grid = grids.grid(path, whole, nodes=nodes, kind=kind, **given)
    return grids.start(path, whole, grid, [notes] if notes else [], **options)


def failed(path: Path) -> dict[tuple[int, int | None], int]:
    """Failures by stage and round of the training, where there were any."""
    return {(row["stage"], row["round"]): row["failed"] for row in rows(path) if row["failed"]}


def test_a_client_that_raises_is_named_and_its_neighbours_go_on(tmp_path: Path):
    notes, fault = Notes(), Fault("raise", 1, 1, 0)
    path = tmp_path / "run"
    found = grids.start(path, faulty(fault), grids.grid(path, faulty(fault)), [notes])
    assert found["state_sha256"] == serial(fault)["state_sha256"] and found["failed_clients"] == 1
    (note,) = [note for note in notes.notes if "client 1" in note]
    assert note.startswith("client 1 (stage 1, round 0, exchange 'train') failed: ValueError: broken on purpose")
    log = Path(note.rpartition("traceback in ")[2].rstrip(")"))
    assert log.parents[2] == path / "nodes" and "ValueError: broken on purpose" in log.read_text()
    assert "ValueError: broken on purpose" in (path / "log.txt").read_text(), "the server keeps the traceback as well"


def test_a_client_whose_state_is_spoilt_is_rejected_as_in_one_process(tmp_path: Path):
    notes, fault, path = Notes(), Fault("nan_state", 1, 1, 0), tmp_path / "run"
    found = grids.start(path, faulty(fault), grids.grid(path, faulty(fault)), [notes])
    assert found["state_sha256"] == serial(fault)["state_sha256"]
    assert (found["rejected_updates"], found["failed_clients"]) == (1, 0)
    (note,) = [note for note in notes.notes if "client 1" in note]
    assert note.endswith("rejected: 'memory/body.layers.0.bias' of the client's state holds NaN or infinite values")


def test_a_node_that_raises_fails_its_own_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def broken(self: Node, asked: Any, content: Any) -> Any:
        if self.name == "node 2" and at(asked, 1, 0):
            raise OSError("no such disk")
        return whole(self, asked, content)

    whole, notes = Node._work, Notes()
    monkeypatch.setattr(Node, "_work", broken)
    found = play(tmp_path / "run", notes, kind=Tapped)
    assert found["state_sha256"] == without((1, 0)) and failed(tmp_path / "run") == {(1, 0): 2}
    for client in SECOND:
        words = (
            f"client {client} (stage 1, round 0, exchange 'train') failed: its node 'node 2' refused: OSError: no such"
        )
        assert any(note.startswith(words) for note in notes.notes)


def test_a_node_that_dies_in_the_middle_is_done_without(tmp_path: Path):
    notes = Notes()
    found = play(tmp_path / "run", notes, then=lambda grid: grid.offline.add(2))
    assert found["state_sha256"] == without((1, 0), (1, 1)) and found["failed_clients"] == 4
    for client in SECOND:
        where = f"client {client} (stage 1, round"
        assert f"{where} 0, exchange 'train') failed: its node 'node 2' went offline" in notes.notes
        assert f"{where} 1, exchange 'train') failed: no node that hosts it is online" in notes.notes
        view = f"evaluation of the view of client {client} at stage 1 failed: no node that hosts it is online"
        assert view in notes.notes
        assert f"the model of client {client} was not left with it: no node that hosts it is online" in notes.notes
    assert [row["accuracy/clients"] for row in rows(tmp_path / "run", "stage")] == [4, 2]


def test_with_fail_a_node_that_dies_ends_the_run(tmp_path: Path):
    with pytest.raises(RunError, match=r"client 2 \(stage 1, round 0.*'node 2' went offline.*on_client_failure"):
        play(tmp_path / "run", then=lambda grid: grid.offline.add(2), options={"on_client_failure": "fail"})


def test_too_few_nodes_left_end_the_run(tmp_path: Path):
    with pytest.raises(RunError, match=r"2 of 4 clients replied, engine.min_replies is 3; first cause: its node"):
        play(tmp_path / "run", then=lambda grid: grid.offline.add(2), options={"min_replies": 3})


def test_a_flicker_is_no_death(tmp_path: Path):
    """A node that is missing once, and there again at the next look, keeps its letter."""

    class Flickering(Scene):
        looks = 0

        def get_node_ids(self) -> list[int]:
            self.looks += self.due == 0
            return [node for node in super().get_node_ids() if node != 2 or self.looks != 1]

    held = lambda grid: grid.looks < 4  # noqa: E731
    found = play(tmp_path / "run", kind=Flickering, then=lambda grid: None, hold=held)
    assert found["state_sha256"] == without() and found["failed_clients"] == 0


def test_a_node_that_comes_back_under_another_number_is_the_same_node(tmp_path: Path):
    """Its clients lose the round and go on from the states that they had before.

    The old number still counts as online, as it does until Flower has missed it for long enough.
    """
    path, whole, notes = tmp_path / "run", faulty(), Notes()

    def restart(grid: Scene) -> None:
        grid.join(7, grids.app(grids.node(path, whole, 2, "2-3")))

    found = play(path, notes, whole=whole, then=restart, hold=lambda grid: True)
    assert found["state_sha256"] == without((1, 0)) and failed(path) == {(1, 0): 2}
    assert "client 2 (stage 1, round 0, exchange 'train') failed: its node 'node 2' went offline" in notes.notes
    assert [row["accuracy/clients"] for row in rows(path, "stage")] == [4, 4]


def test_a_node_that_was_restarted_and_lost_its_letter_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dispatch, "PING", 0.0)
    notes = Notes()
    found = play(tmp_path / "run", notes, then=lambda grid: None, hold=lambda grid: True)
    assert found["state_sha256"] == without((1, 0)) and failed(tmp_path / "run") == {(1, 0): 2}
    words = "failed: its node 'node 2' was started again and has lost its work"
    assert f"client 2 (stage 1, round 0, exchange 'train') {words}" in notes.notes


def test_a_node_that_is_still_at_work_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dispatch, "PING", 0.0)
    path = tmp_path / "run"

    class Working(Scene):
        def held(self, node: int, asked: Mapping[str, Any]) -> bool:
            held = super().held(node, asked)
            if held:
                mark = path / "nodes" / "2" / asked["run"] / "at-work-2.json"
                write_json(mark, {"pid": 1, "number": asked["number"]})
            return held

    found = play(path, kind=Working, then=lambda grid: None, hold=lambda grid: grid.pings < 3)
    assert found["state_sha256"] == without() and found["failed_clients"] == 0


def test_an_answer_that_came_while_the_node_was_asked_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dispatch, "PING", 0.0)
    found = play(tmp_path / "run", then=lambda grid: None, hold=lambda grid: grid.pings < 1)
    assert found["state_sha256"] == without() and found["failed_clients"] == 0


def test_answers_after_the_deadline_are_lost(tmp_path: Path):
    """Also when they come later: the next round has other messages and begins from the states before."""
    notes = Notes()

    class Late(Scene):
        def sent(self, node: int, asked: Mapping[str, Any], message: Message) -> None:
            super().sent(node, asked, message)
            if node == 2 and at(asked, 1, 1):
                self.hold = lambda grid: False

    hold = lambda grid: True  # noqa: E731
    found = play(tmp_path / "run", notes, kind=Late, then=lambda grid: None, hold=hold, options={"deadline": 1.0})
    assert found["state_sha256"] == without((1, 0)) and failed(tmp_path / "run") == {(1, 0): 2}
    assert "client 3 (stage 1, round 0, exchange 'train') failed: no answer before the deadline" in notes.notes


def test_a_retry_asks_again(tmp_path: Path):
    """A letter that does not leave at first; the answers of the others are kept."""

    class Once(Scene):
        def push_messages(self, messages: Any) -> list[str]:
            found = super().push_messages(messages)
            self.unreachable.clear()
            return found

    options = {"on_client_failure": "retry", "retries": 1}
    found = play(tmp_path / "run", kind=Once, then=lambda grid: grid.unreachable.add(2), options=options)
    assert found["state_sha256"] == without() and found["failed_clients"] == 0
    skipped, notes = play(tmp_path / "skip", notes := Notes(), kind=Once, then=lambda g: g.unreachable.add(2)), notes
    assert skipped["state_sha256"] == without((1, 0))
    assert "client 2 (stage 1, round 0, exchange 'train') failed: its node could not be reached" in notes.notes


def test_a_superlink_that_is_gone_ends_the_run_which_can_be_resumed(tmp_path: Path):
    path = tmp_path / "run"

    def gone(grid: Scene) -> None:
        grid.broken = ConnectionError("connection refused")

    words = r"the SuperLink does not answer \(ConnectionError: connection refused\); start it again and resume the run"
    with pytest.raises(RunError, match=words) as caught:
        play(path, then=gone, options={"checkpoint_every": 100})
    assert caught.value.exit_code == 1
    notes = Notes()
    again = grids.resume(path, faulty(), grids.grid(path, faulty()), [notes])
    assert notes.info["resumed_from"] == "stage 1, round 0"
    assert again["state_sha256"] == without() and again["failed_clients"] == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_while_answers_are_awaited(number: int, tmp_path: Path):
    path = tmp_path / "run"

    def hold(grid: Scene) -> bool:
        signal.raise_signal(number) if grid.due == 0 else None
        grid.due -= 1
        return True

    with pytest.raises(Interrupted):
        play(path, then=lambda grid: None, hold=hold, options={"checkpoint_every": 100})
    again = grids.resume(path, faulty(), grids.grid(path, faulty()))
    assert again["state_sha256"] == without()


@pytest.mark.parametrize("damage", ["missing", "changed"])
def test_a_state_that_a_node_has_lost_fails_its_client_until_it_is_restored(damage: str, tmp_path: Path):
    path, notes, kept = tmp_path / "run", Notes(), dict[str, Any]()

    def lose(grid: Scene) -> None:
        (kept["at"],) = (path / "nodes" / "2").glob("*/clients/3/*.safetensors")
        kept["bytes"] = kept["at"].read_bytes()
        kept["at"].unlink() if damage == "missing" else kept["at"].write_bytes(kept["bytes"][:-1] + b"!")

    class Restoring(Scene):
        def sent(self, node: int, asked: Mapping[str, Any], message: Message) -> None:
            super().sent(node, asked, message)
            if node == 2 and at(asked, 1, 1):
                kept["at"].write_bytes(kept["bytes"])

    found = play(path, notes, kind=Restoring, then=lose)
    assert found["state_sha256"] == without((1, 0), clients=(3,)) and failed(path) == {(1, 0): 1}
    words = "client 3 (stage 1, round 0, exchange 'train') failed: its state is missing on its node or has changed; "
    assert f"{words}restore '{kept['at']}'" in notes.notes


def test_a_lost_state_leaves_its_client_out_of_the_accuracies(tmp_path: Path):
    path, notes = tmp_path / "run", Notes()

    class Losing(Tapped):
        def sent(self, node: int, asked: Mapping[str, Any], message: Message) -> None:
            if asked.get("todo") and asked["todo"][0]["kind"] == "probe" and asked["todo"][0]["stage"] == 1:
                for file in (path / "nodes" / "2").glob("*/clients/3/*"):
                    file.unlink()

    play(path, notes, kind=Losing)
    assert [row["accuracy/clients"] for row in rows(path, "stage")] == [4, 3]
    assert any("view of client 3 at stage 1 failed: its state is missing" in note for note in notes.notes)


def test_a_prediction_that_raises_on_a_node_ends_the_run_as_it_does_here(tmp_path: Path):
    whole = experiment("toys.faults:faulty", **PLAN)

    class Blind(type(whole.method)):
        def predict(self, down, state, x, ctx):
            if ctx.client == 3:
                raise IndexError("out of range")
            return super().predict(down, state, x, ctx)

    whole = dataclasses.replace(whole, method=Blind(whole.method.local))
    with pytest.raises(
        RunError, match="evaluation of the view of client 3 at stage 0 failed: IndexError: out of range"
    ):
        play(tmp_path / "run", whole=whole, kind=Tapped)


def test_a_client_that_nobody_hosts_fails_whenever_it_is_drawn(tmp_path: Path):
    whole, notes, path = faulty(), Notes(), tmp_path / "run"
    grid = Tapped({1: grids.app(grids.node(path, whole, 1, "0-2"))})
    found = grids.start(path, whole, grid, [notes], join=0.05)
    never = serial(Fault("raise", 3))
    assert found["params_sha256"] == never["params_sha256"]
    assert found["failed_clients"] == 6 == 2 + never["failed_clients"], "of the two censuses as well"
    assert "3 of 4 clients have no node and fail when they are drawn" in notes.notes[0]
    with pytest.raises(ConfigError, match=r"3 of 4 clients have no node \(engine.join is 0.05 s\)"):
        grids.start(tmp_path / "fail", whole, grid, join=0.05, on_client_failure="fail")


def test_a_node_that_joins_during_the_run_is_welcome(tmp_path: Path):
    path, whole = tmp_path / "run", faulty()

    class Growing(Tapped):
        def sent(self, node: int, asked: Mapping[str, Any], message: Message) -> None:
            if at(asked, 0, 1):
                self.join(2, grids.app(grids.node(path, whole, 2, "2-3")))

    grid = Growing({1: grids.app(grids.node(path, whole, 1, "0-1"))})
    found = grids.start(path, whole, grid, join=0.05)
    assert failed(path) == {(0, None): 2, (0, 0): 2, (0, 1): 2}
    assert [row["accuracy/clients"] for row in rows(path, "stage")] == [2, 4]
    absent = serial(*(Fault("raise", client, 0) for client in SECOND))
    assert found["params_sha256"] == absent["params_sha256"], "but the census of stage 0 has missed two clients"


def test_a_full_disk_of_the_server_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from fedloom.engine import spool

    def full(fd: int, data: memoryview, offset: int) -> int:
        raise OSError(28, "No space left on device")

    whole, path = faulty(), tmp_path / "run"
    grid = grids.grid(path, whole)
    monkeypatch.setattr(spool, "_write_all", full)
    with pytest.raises(RunError, match="no space left on device; free some space and resume the run"):
        grids.start(path, whole, grid)


def test_nothing_is_left_open_when_nobody_comes(tmp_path: Path):
    path = tmp_path / "run"
    with pytest.raises(ConfigError, match=r"no client at all has joined \(engine.join is 0.05 s\)") as caught:
        grids.start(path, faulty(), Tapped({}), join=0.05)
    assert caught.value.exit_code == 2 and not list((path / ".spool").iterdir())
    RunFolder.open(path).close()
