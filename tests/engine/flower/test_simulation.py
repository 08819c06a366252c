"""Flower's own simulation on Ray: the same bits, true exit codes, and nothing left behind."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedloom.cli import app
from fedloom.core import ConfigError, Interrupted, RunError
from fedloom.engine.experiment import Experiment, Observer, Options
from fedloom.engine.flower import compat
from fedloom.engine.folder import RunFolder
from fedloom.engine.start import carry_out
from toys.faults import Fault
from toys.federation import experiment
from toys.running import Notes, rows, start

pytest.importorskip("flwr")
FEDAVG, TALLY, FAULTY = "fedloom.methods.fedavg:fedavg", "toys.tally:tally", "toys.faults:faulty"
QUICK = ["--method", "fedavg", "-s", "training.rounds=2", "-s", "training.local_epochs=1", "-s", "stream.tasks=2"]
SIMULATED = ["--engine", "flower", "-s", "engine.runtime=simulation", "--workers", "2"]
CHILD = """
import pickle, sys
def say(value):
    data = pickle.dumps(value)
    sys.stdout.buffer.write(len(data).to_bytes(8, "little") + data)
    sys.stdout.buffer.flush()
def hear():
    return pickle.loads(sys.stdin.buffer.read(int.from_bytes(sys.stdin.buffer.read(8), "little")))
settings = hear()
"""


def simulate(
    path: Path, whole: Experiment, observers: tuple[Observer, ...] = (), *, again: bool = False, **options: Any
) -> dict[str, Any]:
    """A run in the simulation, or with `again` its continuation."""
    given = {"engine": "flower", "runtime": "simulation", "workers": 2, **options}
    with RunFolder.open(path) if again else RunFolder.create(path, {"toy": True}, {}) as folder:
        return carry_out(whole, Options(**given), folder, observers, {"config": {}, "model": {}})


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compat, "_installed", {"flwr": "1.42.0"}.get)
    with pytest.raises(ConfigError, match="simulation needs Ray; install the extra") as caught:
        simulate(tmp_path / "run", experiment(FEDAVG))
    assert caught.value.exit_code == 2
    result = CliRunner().invoke(app, ["run", *QUICK, *SIMULATED, "--out", str(tmp_path / "other")])
    assert result.exit_code == 2 and "pip install 'fedloom[flower-sim]'" in result.output
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("rebuild", "sentence"),
    [
        (None, "runtime is simulation, but it was not built from a configuration; set engine.runtime to grid"),
        (lambda: None, r"sent to other processes \(.*lambda.*\); set engine.runtime to grid, or pass module-level"),
    ],
)
def test_an_experiment_that_stays_here_is_refused(
    rebuild: Any, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "_installed", {"flwr": "1.42.0", "ray": "2.55.1"}.get)
    with pytest.raises(ConfigError, match=sentence):
        simulate(tmp_path / "run", dataclasses.replace(experiment(FEDAVG), rebuild=rebuild))
    assert not (tmp_path / "run" / "flower.log").exists(), "a process was started"


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Makes a `Simulation` whose process does what a script says."""
    from fedloom.engine.flower import simulation

    def make(script: str) -> Any:
        def popen(command: list[str], **more: Any) -> Any:
            return real([sys.executable, "-c", CHILD + script], **more)

        real = subprocess.Popen
        monkeypatch.setattr(subprocess, "Popen", popen)
        return simulation.Simulation(tmp_path, b"recipe", {"log": str(tmp_path / "flower.log")}, 1)

    return make


def test_questions_reach_the_grid_and_pings_do_not(stand_in: Callable[[str], Any]) -> None:
    from flwr.app import Message

    from fedloom.engine.flower.wire import message

    script = "say('')\nwhile True: what, given = hear(); say((False, [what, *given]))"
    with stand_in(script) as simulation:
        assert simulation.get_node_ids() == ["get_node_ids"]
        letters = [Message(message({"ask": ask}, {}), 7, "query") for ask in ("hello", "ping")]
        what, given = simulation.push_messages(letters)
        assert what == "push_messages" and [(node, kind) for _, node, kind in given] == [(7, "query")]
        assert not simulation.lost and not simulation.refused


@pytest.mark.parametrize(
    ("script", "refused", "lost"),
    [
        ("say('OSError: no room')", "Flower's simulation cannot start (OSError: no room)", False),
        ("say('')\nhear()", "", True),
        ("", "", True),
        ("say('')\nhear()\nsay((True, 'KeyError: 3'))\nhear()", "", False),
    ],
)
def test_a_process_that_does_not_do_its_work(
    script: str, refused: str, lost: bool, stand_in: Callable[[str], Any]
) -> None:
    with stand_in(script) as simulation:
        with pytest.raises(RunError):
            simulation.get_node_ids()
        assert (simulation.refused, simulation.lost) == (refused, lost)


def test_a_process_that_does_not_end_is_killed(stand_in: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedloom.engine.flower.simulation.PATIENCE", 0.1)
    with stand_in("say('')\nhear()\nsay((False, []))\nimport time\ntime.sleep(600)") as simulation:
        assert simulation.get_node_ids() == []
    assert simulation._process.returncode == -signal.SIGKILL


def test_every_node_of_a_process_has_its_own_clients_and_the_same_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pickle

    from flwr.app import Context, RecordDict

    from fedloom.engine.flower import simulator

    taken: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "dup2", lambda source, target: taken.append((source, target)))
    (tmp_path / "recipe").write_bytes(pickle.dumps(experiment(FEDAVG).rebuild))

    def node(k: int) -> Any:
        context = Context(1, k, {"partition-id": k, "num-partitions": 2}, RecordDict(), {})
        given = str(tmp_path / "recipe"), str(tmp_path / "nodes"), str(tmp_path / "log")
        return simulator.node_of(*given, ["0-2", "3"], context)

    assert (node(0).hosted, node(1).hosted) == ((0, 1, 2), (3,))
    assert (node(0).name, node(1).name) == ("node 0 (clients 0-2)", "node 1 (clients 3)")
    assert node(0) is node(0) is not node(1) and node(0).root == node(1).root == tmp_path / "nodes"
    assert node(0).experiment.net() is node(1).experiment.net()
    assert [target for _, target in taken] == [1, 2]
    assert node(0).experiment.plan.fingerprint() == experiment(FEDAVG).plan.fingerprint()


WITH_RAY = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray"),
    pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc"),
]


def ray(test: Any) -> Any:
    """Marks of a test that starts Ray."""
    for mark in WITH_RAY:
        test = mark(test)
    return pytest.mark.usefixtures("nothing_left")(test)


def alive(groups: list[int]) -> list[str]:
    """Processes of the groups that have not ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = path.read_text()
        except OSError:
            continue
        state, _, group = text.rpartition(")")[2].split()[:3]
        if int(group) in groups and state not in "ZX":
            found.append(text[:40])
    return found


@pytest.fixture
def nothing_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No process of a simulation, no temporary folder and no shared memory outlive the test."""
    groups: list[int] = []
    real = subprocess.Popen

    def popen(command: Any, *more: Any, **options: Any) -> Any:
        process = real(command, *more, **options)
        groups.extend([process.pid] if "fedloom.engine.flower.simulator" in command else [])
        return process

    places = Path(tempfile.gettempdir()), Path("/dev/shm")
    before = {path for place in places for path in place.glob("fl-*" if place == places[0] else "plasma*")}
    monkeypatch.setattr(subprocess, "Popen", popen)
    yield
    until = time.monotonic() + 10
    while alive(groups) and time.monotonic() < until:
        time.sleep(0.05)
    assert groups and not alive(groups)
    assert {path for place in places for path in place.glob("fl-*" if place == places[0] else "plasma*")} <= before


@ray
@pytest.mark.parametrize("name", [FEDAVG, TALLY])
def test_the_bits_of_the_serial_engine(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    serial, notes = start(tmp_path / "serial", experiment(name)), Notes()
    found = simulate(tmp_path / "ray", experiment(name), (notes,))
    same = ("state_sha256", "params_sha256", "accuracy_matrix", "personal", "bytes_up", "bytes_down")
    assert {key: found.get(key) for key in same} == {key: serial.get(key) for key in same}
    for scope in ("round", "stage"):
        assert rows(tmp_path / "ray", scope) == rows(tmp_path / "serial", scope)
    assert notes.notes == [] and notes.clients
    assert capfd.readouterr() == ("", "")
    assert "run_simulation" in (tmp_path / "ray" / "flower.log").read_text(), "Flower's words are kept"


@ray
def test_a_client_that_fails_is_skipped_and_named(tmp_path: Path) -> None:
    """One that raises, one that ends its process whenever it works, and one that does so once."""
    kill = Fault("kill", client=2, stage=1, round=1), Fault("kill", client=0, stage=2, once=str(tmp_path / "once"))
    whole = experiment(FAULTY, options={"faults": (Fault("raise", client=1, stage=1, round=0), *kill)}, cohort=1.0)
    notes = Notes()
    found = simulate(tmp_path / "ray", whole, (notes,))
    assert found["failed_clients"] == len(notes.notes) == 2
    assert "client 1 (stage 1, round 0, exchange 'train') failed: ValueError: broken on purpose" in notes.notes[0]
    assert "client 2 (stage 1, round 1, exchange 'train') failed: its node 'node 2 (clients 2)'" in notes.notes[1]
    assert (tmp_path / "once").exists(), "the client that ends its process once did not work"


@ray
def test_a_signal_leaves_a_run_that_can_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients take so long here that nodes on a network would be asked whether they are still at work."""
    from fedloom.engine.flower import dispatch

    class Stopping(Notes):
        def client_done(self, done: int, total: int) -> None:
            super().client_done(done, total)
            if len(self.clients) == 21:
                os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(dispatch, "LOOK", 0.01)
    monkeypatch.setattr(dispatch, "PING", 0.05)

    slow = {"options": {"faults": (Fault("sleep"),)}, "cohort": 1.0}
    with pytest.raises(Interrupted, match="stopped by the user"):
        simulate(tmp_path / "ray", experiment(FAULTY, **slow), (Stopping(),))
    assert len(rows(tmp_path / "ray")) < 12
    notes = Notes()
    found = simulate(tmp_path / "ray", experiment(FAULTY, **slow), (notes,), again=True, workers=1)
    assert notes.info["resumed_from"] is not None and notes.notes == []
    assert found["state_sha256"] == start(tmp_path / "serial", experiment(TALLY, cohort=1.0))["state_sha256"]


@ray
def test_a_simulation_that_dies_fails_the_run_which_can_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedloom.engine.flower import simulation

    made: list[Any] = []

    class Seen(simulation.Simulation):
        def __init__(self, *given: Any):
            super().__init__(*given)
            made.append(self)

    class Killing(Notes):
        def round_done(self, row: Any) -> None:
            if row["stage"] == 1:
                made[0]._process.kill()

    monkeypatch.setattr(simulation, "Simulation", Seen)
    with pytest.raises(RunError, match=r"Flower's simulation ended before the run did; see '.*flower.log'") as caught:
        simulate(tmp_path / "ray", experiment(TALLY), (Killing(),))
    assert caught.value.exit_code == 1
    found = simulate(tmp_path / "ray", experiment(TALLY), again=True)
    assert found["state_sha256"] == start(tmp_path / "serial", experiment(TALLY))["state_sha256"]


@ray
def test_an_experiment_that_fails_in_rays_processes_ends_with_2(tmp_path: Path) -> None:
    broken = functools.partial(experiment, "toys.nowhere:nothing")
    with pytest.raises(ConfigError, match=r"cannot make the experiment \(ModuleNotFoundError.*engine.runtime to grid"):
        simulate(tmp_path / "ray", dataclasses.replace(experiment(FEDAVG), rebuild=broken))


def command(*arguments: Any) -> subprocess.CompletedProcess[str]:
    given = [sys.executable, "-m", "fedloom", *map(str, arguments)]
    return subprocess.run(given, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray")
def test_the_quickstart_on_the_command_line(tmp_path: Path) -> None:
    serial = command("run", *QUICK, "--out", tmp_path / "serial", "--json")
    found = command("run", *QUICK, *SIMULATED, "--out", tmp_path / "ray", "--json")
    assert (found.returncode, found.stderr) == (0, "")
    assert json.loads(found.stdout)["state_sha256"] == json.loads(serial.stdout)["state_sha256"]
    assert (tmp_path / "ray" / "DONE").exists() and (tmp_path / "ray" / "report.html").exists()
    refused = command("run", *QUICK, *SIMULATED, "-s", "training.lr=1e9", "--out", tmp_path / "refused")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1) and "training.lr" in refused.stderr
    failed = command("run", *QUICK, *SIMULATED, "-s", "engine.deadline=0.001", "--out", tmp_path / "failed", "-q")
    assert failed.returncode == 1 and (tmp_path / "failed" / "FAILED").exists()
    assert "error: " in failed.stderr and "no answer before the deadline" in failed.stderr
