"""The keeper: exit codes, and nothing left of a process tree, however its end comes about."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from fedloom.engine.flower import keeper

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux hands orphans to a keeper")
# Starts a process in a session of its own, as a SuperLink does, tells its number and sleeps.
NESTED = """
import subprocess, sys, time
far = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"], start_new_session=True)
open(sys.argv[1], "w").write(str(far.pid) + "\\n")
{rest}
"""


def kept(code: str, *arguments: str, grace: float = 5.0) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-S", "-c", code, *arguments]
    return subprocess.Popen(
        [sys.executable, "-I", "-S", keeper.__file__, str(grace), *command],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that are ended after the test, whatever happened."""
    found: list[subprocess.Popen[bytes]] = []
    yield found
    for process in found:
        with process:
            process.stdin.close()
            try:
                process.wait(20)
            finally:
                process.kill()


def until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not happened():
        assert time.monotonic() < deadline, "it has not happened"
        time.sleep(0.01)


def alive(pid: int) -> bool:
    with suppress(OSError):
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    return False


def number(path: Path) -> int:
    until(lambda: path.exists() and path.read_text().endswith("\n"))
    return int(path.read_text())


@pytest.mark.parametrize(
    ("code", "expected"),
    [("pass", 0), ("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 15)", 128 + 15)],
)
def test_the_exit_code_is_that_of_the_command(code: str, expected: int, started: list) -> None:
    started.append(kept(code))
    assert started[0].wait(20) == expected


def test_a_command_that_cannot_be_started(started: list) -> None:
    command = [sys.executable, "-I", "-S", keeper.__file__, "1", "/no/such/command"]
    started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE))
    assert started[0].wait(20) == 127
    assert b"cannot start /no/such/command: No such file or directory" in started[0].stderr.read()


ORDERLY = """
import signal, sys, time
def end(*_):
    open(sys.argv[1] + ".end", "w").write("orderly")
    raise SystemExit(5)
signal.signal(signal.SIGTERM, end)
open(sys.argv[1], "w").write("0\\n")
time.sleep(600)
"""


@pytest.mark.parametrize("order", [b"s", b""])
def test_an_orderly_end_when_told_and_when_nobody_is_left_to_tell(order: bytes, tmp_path: Path, started: list) -> None:
    process = kept(ORDERLY, str(tmp_path / "pid"))
    started.append(process)
    number(tmp_path / "pid")
    if order:
        process.stdin.write(order)
        process.stdin.flush()
    else:
        process.stdin.close()
    assert process.wait(20) == 5
    assert (tmp_path / "pid.end").read_text() == "orderly"


def test_a_signal_to_the_keeper_ends_the_command_orderly(tmp_path: Path, started: list) -> None:
    started.append(kept(ORDERLY, str(tmp_path / "pid")))
    number(tmp_path / "pid")
    started[0].terminate()
    assert started[0].wait(20) == 5


def test_who_does_not_end_within_the_grace_is_killed(tmp_path: Path, started: list) -> None:
    deaf = "import signal, sys, time; signal.signal(15, signal.SIG_IGN); open(sys.argv[1], 'w').write('0\\n')"
    started.append(kept(f"{deaf}; time.sleep(600)", str(tmp_path / "pid"), grace=0.1))
    number(tmp_path / "pid")
    started[0].stdin.close()
    assert started[0].wait(20) == 128 + 9


@linux
def test_an_immediate_end_takes_those_in_other_sessions_along(tmp_path: Path, started: list) -> None:
    started.append(kept(NESTED.format(rest="time.sleep(600)"), str(tmp_path / "far")))
    far = number(tmp_path / "far")
    assert alive(far)
    started[0].stdin.write(b"k")
    started[0].stdin.flush()
    assert started[0].wait(20) == 128 + 9
    assert not alive(far)


@linux
def test_a_command_that_ends_by_itself_leaves_nobody_behind(tmp_path: Path, started: list) -> None:
    started.append(kept(NESTED.format(rest="raise SystemExit(3)"), str(tmp_path / "far")))
    assert started[0].wait(20) == 3
    assert not alive(number(tmp_path / "far"))


@linux
def test_a_killed_parent_takes_everything_along(tmp_path: Path) -> None:
    code = NESTED.format(rest="time.sleep(600)")
    parent = f"""
import subprocess, sys, time
command = [sys.executable, "-S", "-c", {code!r}, sys.argv[1]]
subprocess.Popen([sys.executable, "-I", "-S", {keeper.__file__!r}, "0.2", *command], stdin=subprocess.PIPE)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-S", "-c", parent, str(tmp_path / "far")]) as process:
        far = number(tmp_path / "far")
        process.kill()
    until(lambda: not alive(far))


@linux
def test_a_killed_parent_is_noticed_though_another_holds_its_pipe(tmp_path: Path) -> None:
    code = NESTED.format(rest="time.sleep(600)")
    parent = f"""
import os, subprocess, sys, time
command = [sys.executable, "-S", "-c", {code!r}, sys.argv[1]]
held = subprocess.Popen([sys.executable, "-I", "-S", {keeper.__file__!r}, "0.2", *command], stdin=subprocess.PIPE)
if not os.fork():
    sys.stdin.read()
    os._exit(0)
time.sleep(600)
"""
    command = [sys.executable, "-S", "-c", parent, str(tmp_path / "far")]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        far = number(tmp_path / "far")
        process.kill()
        until(lambda: not alive(far))


@linux
def test_a_killed_keeper_takes_the_command_along(tmp_path: Path, started: list) -> None:
    code = "import os, sys, time; open(sys.argv[1], 'w').write(f'{os.getpid()}\\n'); time.sleep(600)"
    started.append(kept(code, str(tmp_path / "near")))
    near = number(tmp_path / "near")
    started[0].kill()
    until(lambda: not alive(near))


def test_descendants_are_those_of_one_process_alone(tmp_path: Path) -> None:
    code = NESTED.format(rest="sys.stdin.read()")
    command = [sys.executable, "-S", "-c", code, str(tmp_path / "far")]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as near, subprocess.Popen(["sleep", "600"]) as other:
        far = number(tmp_path / "far")
        assert set(keeper.descendants(near.pid)) == {far}
        assert {near.pid, far, other.pid} <= set(keeper.descendants(os.getpid()))
        os.kill(far, signal.SIGKILL)
        other.kill()
