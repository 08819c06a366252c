"""A loopback federation with TLS and node authentication gives the bits of one process, whatever dies on the way."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fedloom
from fedloom import lifecycle
from fedloom.core import CheckpointError, ConfigError, RunError
from fedloom.deploy import demo
from fedloom.deploy.demo import run_demo
from toys.running import Notes

pytest.importorskip("flwr")

SMALL = {"stream": {"kind": "class_incremental", "tasks": 2}, "training": {"rounds": 2}}
TALLY = "toys.tally:tally"
BROKEN = """
from dataclasses import dataclass
from fedloom.methods.fedavg import FedAvg

@dataclass(frozen=True)
class Broken(FedAvg):
    def client_update(self, down, state, data, ctx):
        if ctx.client == 3:
            raise ValueError("broken on purpose")
        return super().client_update(down, state, data, ctx)

def broken(*, local):
    return Broken(local)
"""


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures take a second; other processes find the toys."""
    monkeypatch.setattr(lifecycle, "_pictures", lambda *args: None)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))


class Meddling(Notes):
    """Does something to the federation at the end of a round."""

    def __init__(self, at: int, deed: Callable[[Any], None]):
        super().__init__()
        self.at, self.deed, self.federation, self.rounds = at, deed, None, 0

    def round_done(self, row: Any) -> None:
        self.rounds += row["round"] is not None
        if self.rounds == self.at and self.federation is not None:
            federation, self.federation = self.federation, None
            self.deed(federation)


@pytest.fixture
def meddle(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Meddling]:
    from fedloom.engine.flower import federation

    def make(at: int, deed: Callable[[Any], None]) -> Meddling:
        watch = Meddling(at, deed)

        class Watched(federation.Federation):
            def __enter__(self) -> Any:
                watch.federation = super().__enter__()
                return watch.federation

        monkeypatch.setattr(federation, "Federation", Watched)
        return watch

    return make


def serial(tmp_path: Path, method: str) -> Any:
    return fedloom.run("quickstart", method=method, out=tmp_path / "serial", verbose=False, **SMALL).summary


def of(method: str) -> dict[str, Any]:
    return {**SMALL, "method": {"name": method}}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "fedprox", "fedfmx", TALLY])
def test_a_federation_gives_the_bits_of_one_process(method: str, tmp_path: Path) -> None:
    want = serial(tmp_path, method)
    found = fedloom.load_run(run_demo("quickstart", of(method), out=str(tmp_path / "run"))).summary
    for key in ("state_sha256", "params_sha256", "accuracy_matrix", "per_client_accuracy_mean", "bytes_up"):
        assert found[key] == want[key], key
    assert found["failed_clients"] == found["rejected_updates"] == 0
    assert not (tmp_path / "run" / "logs").exists()


@pytest.mark.slow
def test_a_node_that_is_killed_is_left_out(tmp_path: Path, meddle: Callable[..., Meddling]) -> None:
    watch = meddle(1, lambda federation: federation.kill_node(1))
    layer = {**of("fedavg"), "engine": {"deadline": 30.0, "on_client_failure": "skip"}}
    done = fedloom.load_run(run_demo("quickstart", layer, out=str(tmp_path / "run"), observers=[watch]))
    assert done.summary["failed_clients"] == 3 * 5 and done.summary["rounds"] == 4
    assert all(any(f"client {k} (" in note for note in watch.notes) for k in range(5, 10)), watch.notes
    assert done.summary["final_accuracy"] > 0


@pytest.mark.slow
def test_a_superlink_that_is_killed_loses_nothing(tmp_path: Path, meddle: Callable[..., Meddling]) -> None:
    want = serial(tmp_path, TALLY)
    watch = meddle(3, lambda federation: federation.kill_link())
    with pytest.raises(RunError):
        run_demo("quickstart", of(TALLY), out=str(tmp_path / "run"), observers=[watch])
    assert (tmp_path / "run" / "logs" / "superlink.log").exists()
    run_demo("quickstart", of(TALLY), out=str(tmp_path / "run"), resume=True)
    assert fedloom.load_run(tmp_path / "run").summary["state_sha256"] == want["state_sha256"]


@pytest.mark.slow
def test_a_run_that_fails_is_no_success(tmp_path: Path) -> None:
    """The command's exit code, and one sentence that names the client."""
    (tmp_path / "broken.py").write_text(BROKEN)
    command = ["deploy", "local-demo", "quickstart", "--method", "broken:broken", "--out", tmp_path / "run", "-q"]
    command += ["--set", "training.rounds=1", "--set", "engine.on_client_failure=fail"]
    done = subprocess.run(
        [sys.executable, "-m", "fedloom", *map(str, command)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("\n") == 1 and "client 3 (stage 0, round 0, exchange 'train') failed" in done.stderr
    assert (tmp_path / "run" / "FAILED").exists()


def test_what_cannot_run_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"training\.rounds must be at least 1, got 0"):
        run_demo("quickstart", {"training": {"rounds": 0}}, out=str(tmp_path / "run"))
    with pytest.raises(ConfigError, match=r"nodes must be in \[1, 10\] for 10 clients, got 11"):
        run_demo("quickstart", {}, nodes=11, out=str(tmp_path / "run"))
    with pytest.raises(ConfigError, match="--resume continues the run in --out"):
        run_demo("quickstart", {}, resume=True)
    assert not (tmp_path / "run").exists()


def deployed_run(folder: Path, nodes: int) -> None:
    """What a deployed run of two nodes that was broken off leaves of what is looked at before the next."""
    for k in range(nodes):
        (folder / "nodes" / str(k)).mkdir(parents=True)
        (folder / "nodes" / str(k) / "home.json").write_text("{}")
    (folder / "config.yaml").write_text("engine: {name: flower, runtime: deployment}\n")


def test_a_folder_that_cannot_be_continued_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    out = tmp_path / "run"
    deployed_run(out, nodes=2)
    with pytest.raises(ConfigError, match="holds a run; name another folder, or continue it with --resume"):
        run_demo("quickstart", {}, out=str(out))
    with pytest.raises(ConfigError, match=r"--nodes is 1, but .* states on 2; give --nodes 2"):
        run_demo("quickstart", {}, nodes=1, out=str(out), resume=True)
    (out / "DONE").touch()
    with pytest.raises(ConfigError, match="is done; nothing is left to continue"):
        run_demo("quickstart", {}, out=str(out), resume=True)
    (out / "DONE").unlink()
    (out / "config.yaml").write_text("engine: {name: serial}\n")
    with pytest.raises(ConfigError, match="continue it with `fedloom resume"):
        run_demo("quickstart", {}, out=str(out), resume=True)
    with pytest.raises(CheckpointError, match=r"no config\.yaml"):
        run_demo("quickstart", {}, out=str(tmp_path), resume=True)


@pytest.mark.parametrize("begun", [True, False])
def test_an_error_names_the_log_that_is_kept(begun: bool, tmp_path: Path) -> None:
    """The folder that the log was written to is gone when the user reads of it."""
    home, folder = tmp_path / "home", tmp_path / "run"
    for path in (home, folder) if begun else (home,):
        path.mkdir()
    (home / "superlink.log").write_text("killed\n")
    error = RunError(f"the SuperLink is not running; its log is {home / 'superlink.log'}")
    demo._keep_logs(home, folder, error)
    kept = Path(str(error).rpartition(" ")[2])
    assert kept.read_text() == "killed\n" and not kept.is_relative_to(home)
    assert kept.is_relative_to(folder) is begun


def test_logs_that_no_error_names_need_a_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "mkdtemp", lambda **_: pytest.fail("nobody would find it"))
    (tmp_path / "node-0.log").touch()
    demo._keep_logs(tmp_path, tmp_path / "run", ConfigError("refused"))
    assert not (tmp_path / "run").exists()
