"""Start Flower's processes from one that has already imported what they need.

Flower starts `flwr-clientapp` anew for every message, and importing torch takes longer than most rounds. Here one
process imports once, for all nodes of a machine, and forks for each start. Flower finds us because a folder with
stand-ins of the same names comes first on its PATH.

`python -P -m fedloom.engine.flower.warm SOCKET SCRIPTS MODULES` serves; SCRIPTS are names of console scripts, MODULES
what else to import, both separated by commas.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from fedloom.engine.flower.keeper import bell_for, descendants
from fedloom.engine.flower.standin import BEGUN, HEAD

Job = Callable[[], Any]
PATIENCE = 10.0  # seconds for a request to arrive once it has begun


class Server:
    """Forks a process for every request; who asked and goes away takes its fork along."""

    def __init__(self, path: str, scripts: dict[str, Job]):
        self._scripts = scripts
        self._lines: dict[int, socket.socket] = {}  # to those who asked, by the process that serves them
        self._bell, self._path = bell_for(signal.SIGCHLD, signal.SIGTERM), Path(path)
        self._door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._door.bind(f"{path}.new")
        self._door.listen(64)
        os.rename(f"{path}.new", path)  # who finds the name can connect

    def serve(self) -> Job:
        """Serve until told to end; returns in every fork, with what it has to do."""
        while True:
            lines = {line: pid for pid, line in self._lines.items()}
            heard: list[Any] = [self._door, self._bell, *lines]
            ready = select.select(heard, [], [])[0]
            if self._bell in ready and signal.SIGTERM in os.read(self._bell, 512):
                self._path.unlink()
                self._path.parent.rmdir()
                sys.exit()
            self._end(lines[line] for line in ready if line in lines)
            self._tell()
            if self._door in ready and (job := self._admit()) is not None:
                return job

    def _admit(self) -> Job | None:
        line = self._door.accept()[0]
        try:
            request, files = _read(line)
        except (OSError, ValueError) as error:  # who asked sees to it by other means
            print(f"a request has not arrived: {type(error).__name__}: {error}", file=sys.stderr)
            line.close()
            return None
        if request:
            return self._fork(line, request, files)
        gone = select.select(list(self._lines.values()), [], [], 0)[0]
        self._end([pid for pid, line in self._lines.items() if line in gone])
        with line, suppress(ConnectionError):
            line.sendall(BEGUN + b"\0")
        return None

    def _fork(self, line: socket.socket, request: dict[str, Any], files: Sequence[int]) -> Job | None:
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid:
            for file in files:
                os.close(file)
            self._lines[pid] = line
            with suppress(ConnectionError):
                line.sendall(BEGUN)
            return None
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        for open_socket in (line, self._door, *self._lines.values()):
            open_socket.close()
        os.close(self._bell)
        _become(request, files)
        return self._scripts[Path(request["command"][0]).stem]

    def _end(self, pids: Iterable[int]) -> None:
        """Kill forks and what they have started, and return when they are gone."""
        for pid in list(pids):
            for member in (*descendants(pid), pid):
                with suppress(ProcessLookupError):
                    os.kill(member, signal.SIGKILL)
            os.waitpid(pid, 0)
            self._lines.pop(pid).close()

    def _tell(self) -> None:
        """Pass on the exit codes of forks that have ended, and kill what they have left behind."""
        while self._lines and (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            pid = ended.si_pid
            with suppress(ProcessLookupError):  # the dead leader still holds the group's number
                os.killpg(pid, signal.SIGKILL)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            with self._lines.pop(pid) as line, suppress(ConnectionError):
                line.sendall(bytes([128 - code if code < 0 else code]))


def _read(line: socket.socket) -> tuple[dict[str, Any], list[int]]:
    line.settimeout(PATIENCE)
    head, files, _, _ = socket.recv_fds(line, HEAD, 3)
    size, body = int.from_bytes(head, "little"), b""
    while len(body) < size:
        if not (part := line.recv(size - len(body))):
            raise ConnectionError
        body += part
    return json.loads(body or b"{}"), files


def _become(request: dict[str, Any], files: Sequence[int]) -> None:
    """Make a fork look like a process that was started with the request's command."""
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv[:] = request["command"]
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # siblings would draw the same numbers; `random` sees to it by itself


def load(scripts: Iterable[str], modules: Iterable[str]) -> dict[str, Job]:
    """Import what console scripts run and what their apps will need; what cannot be imported is told, not raised."""
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception:
            traceback.print_exc()
    return {name: entry.load() for name in scripts for entry in entry_points(group="console_scripts", name=name)}


def main(path: str, scripts: str, modules: str) -> Any:
    """Import, serve, and in every fork do the work."""
    loaded = load(filter(None, scripts.split(",")), filter(None, modules.split(",")))
    gc.collect()
    gc.freeze()  # a collection in a fork would copy every page that holds an object
    return Server(path, loaded).serve()()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
