"""Keep one process and all that it starts, and leave nothing of them when the parent ends, however it ends.

Run as `python -I -S keeper.py GRACE COMMAND...` with a pipe as stdin: `s` on it, or its end, asks for an orderly end
within GRACE seconds, `k` for an immediate one. Flower's processes start others in sessions of their own, so a signal
to the group does not reach them all; on Linux the keeper inherits every orphan instead. Starts in milliseconds: it
imports nothing outside the standard library.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
DEATH_SIGNAL, SUBREAPER = 1, 36  # of prctl(2)
PATIENCE = 10.0  # seconds until killed processes must be gone


def keep(grace: float, command: Sequence[str]) -> int:
    """Run a command to its end, or until told to end it; returns its exit code, 128 + N for signal N."""
    parent, bell = os.getppid(), bell_for(signal.SIGCHLD, *ENDING)
    _prctl(SUBREAPER, 1)
    child = _start(command)
    heard, deadline = [0, bell], None
    while (code := _reap(child)) is None and (deadline is None or time.monotonic() < deadline):
        ready = select.select(heard, [], [], 0.5)[0]
        orders = os.read(0, 64) if 0 in ready else None
        signals = os.read(bell, 64) if bell in ready else b""
        if orders and b"k" in orders:
            break
        if orders == b"":
            heard.remove(0)
        told = orders is not None or os.getppid() != parent or any(number in ENDING for number in signals)
        if told and deadline is None:
            deadline = time.monotonic() + grace
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGTERM)
    left = slay(os.getpid())
    return left.get(child, 128 + signal.SIGKILL) if code is None else code


def slay(root: int) -> dict[int, int]:
    """Kill every descendant of a process, also those that begin meanwhile; returns the exit codes of own children."""
    codes: dict[int, int] = {}
    deadline = time.monotonic() + PATIENCE
    while (found := descendants(root)) and time.monotonic() < deadline:
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        codes.update(reaped())
        time.sleep(0.005)
    codes.update(reaped())
    return codes


def reaped() -> dict[int, int]:
    """Exit codes of children that have ended since it was asked last, by process id."""
    codes: dict[int, int] = {}
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            code = os.waitstatus_to_exitcode(ended[1])
            codes[ended[0]] = 128 - code if code < 0 else code
    return codes


def descendants(root: int) -> list[int]:
    """Process ids of all that a process has started, directly or not, until they are reaped.

    A zombie counts: threads of it may still be running.
    """
    children: dict[int, list[int]] = {}
    for pid, parent in _parents():
        children.setdefault(parent, []).append(pid)
    found, todo = [], [root]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def bell_for(*signals: signal.Signals) -> int:
    """A pipe that can be read as soon as one of the signals has come; it yields their numbers."""
    bell, rope = os.pipe()
    for end in (bell, rope):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(rope, warn_on_full_buffer=False)
    for number in signals:
        signal.signal(number, lambda *_: None)
    return bell


def _parents() -> list[tuple[int, int]]:
    """Every process and its parent."""
    if not sys.platform.startswith("linux"):
        table = subprocess.run(["ps", "-Ao", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
        return [(int(pid), int(parent)) for pid, parent in map(str.split, table.splitlines())]
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):  # it has ended since the folder was read
            with open(f"/proc/{entry}/stat", "rb") as file:
                parent = file.read().rpartition(b")")[2].split()[1]
            found.append((int(entry), int(parent)))
    return found


def _start(command: Sequence[str]) -> int:
    keeper = os.getpid()
    child = os.fork()
    if child:
        return child
    try:
        _prctl(DEATH_SIGNAL, signal.SIGKILL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and what is ignored stays so
        if os.getppid() == keeper:
            os.execvp(command[0], list(command))
    except OSError as error:
        os.write(2, f"cannot start {command[0]}: {error.strerror}\n".encode())
    os._exit(127)


def _reap(child: int) -> int | None:
    return reaped().get(child)


def _prctl(option: int, value: int) -> None:
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(keep(float(sys.argv[1]), sys.argv[2:]))
