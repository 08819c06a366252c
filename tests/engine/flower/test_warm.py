"""Forks of a warm process stand in for console scripts."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from fedloom.engine.flower import standin, warm
from fedloom.engine.flower.processes import write_stand_ins

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="warm processes are for Linux")
SERVER = """
import os, random, subprocess, sys, time
import numpy
draw = numpy.random.random
from fedloom.engine.flower.warm import Server

def told():
    print(sys.argv, os.getcwd(), os.environ["COLOUR"], os.environ.get("ONLY_HERE"), os.getppid() == server, flush=True)
    raise SystemExit(int(sys.stdin.read()))

def fails():
    raise ValueError("no")

def draws():
    print(random.random(), draw())

def killed():
    os.kill(os.getpid(), 9)

def leaves():
    far = subprocess.Popen(["sleep", "600"])
    with open("pids", "w") as file:
        file.write(f"{os.getpid()} {far.pid}\\n")

def sleeps():
    leaves()
    time.sleep(600)

server = os.getpid()
scripts = {job.__name__: job for job in (told, fails, draws, killed, leaves, sleeps)}
sys.exit(Server(sys.argv[1], scripts).serve()())
"""


def until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not happened():
        assert time.monotonic() < deadline, "it has not happened"
        time.sleep(0.01)


def alive(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    return False


@pytest.fixture
def line(tmp_path: Path) -> Iterator[str]:
    """The socket of a warm process that is serving."""
    folder = tmp_path / "run"
    folder.mkdir()
    environment = {**os.environ, "ONLY_HERE": "1"}
    command = [sys.executable, "-c", SERVER, str(folder / "socket")]
    with subprocess.Popen(command, env=environment) as process:
        until((folder / "socket").exists)
        yield str(folder / "socket")
        process.terminate()
    assert not folder.exists()


def ask(line: str, name: str, folder: Path, out: Path, given: str = "") -> int | None:
    (folder / "given").write_text(given)
    request = standin.errand(f"/scripts/{name}", ["a b", "ü"], {"COLOUR": "blue"}, str(folder))
    with (folder / "given").open() as inward, out.open("w") as outward:
        return standin.ask(line, request, (inward.fileno(), outward.fileno(), outward.fileno()), 20)


def test_a_fork_has_the_askers_arguments_folder_environment_and_files(line: str, tmp_path: Path) -> None:
    assert ask(line, "told", tmp_path, tmp_path / "out", "3") == 3
    assert (tmp_path / "out").read_text() == f"['/scripts/told', 'a b', 'ü'] {tmp_path} blue None True\n"


def test_a_fork_that_raises_and_one_that_is_killed(line: str, tmp_path: Path) -> None:
    assert ask(line, "fails", tmp_path, tmp_path / "out") == 1
    assert "ValueError: no" in (tmp_path / "out").read_text()
    assert ask(line, "killed", tmp_path, tmp_path / "out") == 128 + 9
    assert ask(line, "told", tmp_path, tmp_path / "out", "0") == 0


def test_forks_draw_different_numbers(line: str, tmp_path: Path) -> None:
    drawn: list[str] = []
    for k in range(3):
        assert ask(line, "draws", tmp_path, tmp_path / f"{k}") == 0
        drawn += (tmp_path / f"{k}").read_text().split()
    assert len(set(drawn)) == 6


def test_a_fork_that_ends_leaves_no_children(line: str, tmp_path: Path) -> None:
    assert ask(line, "leaves", tmp_path, tmp_path / "out") == 0
    fork, far = map(int, (tmp_path / "pids").read_text().split())
    assert not alive(fork)
    until(lambda: not alive(far))


@pytest.mark.parametrize("settled", [True, False])
def test_who_goes_away_takes_the_fork_and_its_children_along(settled: bool, line: str, tmp_path: Path) -> None:
    command = [sys.executable, "-I", "-S", standin.__file__, line, "/scripts/sleeps"]
    with subprocess.Popen(command, cwd=tmp_path) as asker:
        until(lambda: (tmp_path / "pids").exists() and (tmp_path / "pids").read_text().endswith("\n"))
        fork, far = map(int, (tmp_path / "pids").read_text().split())
        assert alive(fork)
        assert alive(far)
        asker.kill()
    if settled:
        standin.settle(line)
        assert not alive(fork)
    until(lambda: not alive(fork) and not alive(far))


def test_patience_ends(line: str, tmp_path: Path) -> None:
    request = standin.errand("/scripts/sleeps", [], {}, str(tmp_path))
    with pytest.raises(TimeoutError):
        standin.ask(line, request, (0, 1, 2), 0.3)


def test_without_a_warm_process_the_real_command_runs(tmp_path: Path) -> None:
    real = tmp_path / "real dir"
    real.mkdir()
    (real / "flwr-x").write_text('#!/bin/sh\necho "real $1 $2"\nexit 4\n')
    (real / "flwr-x").chmod(0o755)
    write_stand_ins(tmp_path / "stand ins", str(tmp_path / "nobody"), real, ["flwr-x"])
    command = [str(tmp_path / "stand ins" / "flwr-x"), "a b", "$HOME"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    assert (done.stdout, done.returncode) == ("real a b $HOME\n", 4)


@pytest.mark.parametrize("said", [b"", b"?"])
def test_who_cannot_begin_leaves_it_to_the_asker(said: bytes, tmp_path: Path) -> None:
    path = str(tmp_path / "socket")

    def refuse(door: socket.socket) -> None:
        line = door.accept()[0]
        with line:
            line.recv(4096)
            line.sendall(said)

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
        door.bind(path)
        door.listen()
        thread = threading.Thread(target=refuse, args=(door,))
        thread.start()
        assert standin.ask(path, {"command": ["x"]}) is None
        thread.join()


def test_a_request_that_does_not_arrive_stops_nobody(line: str, tmp_path: Path) -> None:
    for sent in (b"", b"\x05", (3).to_bytes(8, "little") + b"{x}"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
            other.connect(line)
            other.sendall(sent)
    assert ask(line, "told", tmp_path, tmp_path / "out", "7") == 7


def test_stand_ins_reach_the_warm_process(line: str, tmp_path: Path) -> None:
    write_stand_ins(tmp_path / "stand ins", line, Path("/nowhere"), ["told"])
    command = [str(tmp_path / "stand ins" / "told"), "x"]
    environment = {**os.environ, "COLOUR": "red"}
    done = subprocess.run(command, env=environment, input="6", capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 6
    assert done.stdout.startswith("['/nowhere/told', 'x']")


def test_what_cannot_be_imported_is_told_and_the_rest_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    scripts = warm.load(["pytest", "no-such-script"], ["no_such_module", "json"])
    assert list(scripts) == ["pytest"]
    assert "No module named 'no_such_module'" in capsys.readouterr().err
