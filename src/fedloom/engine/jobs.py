"""Jobs: whole pieces of work, each in a process of its own, several at a time.

A process is asked to stop by closing its standard input, which is also what it sees when its parent dies. It then gets
the signal of Ctrl-C, so that a run ends after the current client with a checkpoint. Messages are pickled between our
own processes.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from fedloom.engine.serial import receive, send

Tell = Callable[[str], None]
Job = Callable[[Tell], Any]


class Message(NamedTuple):
    """What a job says. kind: `note` with a text, or last of all `ended` with its result or `died` with a reason."""

    name: str
    kind: str
    value: Any


class Jobs:
    """Processes at work, by name. Use as a context manager: leaving it asks those that still work to stop and waits.

    Ctrl-C while it waits kills them.
    """

    def __init__(self) -> None:
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self._threads: dict[str, threading.Thread] = {}
        self._said: queue.Queue[Message] = queue.Queue()

    def __enter__(self) -> Jobs:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start(self, name: str, job: bytes) -> None:
        """Begin a job, pickled: a function of `tell` that can be imported."""
        # A group of its own: Ctrl-C in a terminal reaches every process of the group, and the parent decides.
        group: dict[str, Any] = {"process_group": 0} if os.name == "posix" else {}
        command = [sys.executable, "-m", "fedloom.engine.jobs"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **group)
        self.running[name] = process
        self._threads[name] = threading.Thread(target=self._listen, args=(name, process, job), daemon=True)
        self._threads[name].start()

    def wait(self) -> Message:
        """The next message of any job; one that has ended or died is no longer running."""
        message = self._said.get()
        if message.kind != "note":
            self._end(message.name)
        return message

    def stop(self) -> None:
        """Ask all to stop and wait for them."""
        for process in self.running.values():
            _close(process.stdin)
        try:
            for process in self.running.values():
                process.wait()
        finally:
            for name, process in list(self.running.items()):
                process.kill()
                self._end(name)

    def _listen(self, name: str, process: subprocess.Popen[bytes], job: bytes) -> None:
        assert process.stdin is not None and process.stdout is not None
        kind, value = "note", None
        try:
            send(process.stdin, (sys.path, job))
            while kind == "note":
                kind, value = receive(process.stdout)
                self._said.put(Message(name, kind, value))
        except (EOFError, OSError):
            self._said.put(Message(name, "died", "its process died"))
        except BaseException as error:  # code of the user's, which pickle calls to make an answer
            self._said.put(Message(name, "died", f"its answer cannot be read ({type(error).__name__}: {error})"))

    def _end(self, name: str) -> None:
        process = self.running.pop(name)
        _close(process.stdin)
        process.wait()
        self._threads.pop(name).join(timeout=5)
        _close(process.stdout)


def _close(pipe: Any) -> None:
    if pipe is not None:
        with suppress(OSError, ValueError):  # the other end is gone, and so is what was buffered for it
            pipe.close()


def main() -> None:
    """Do the job that comes over stdin and answer over stdout; what user code prints goes to stderr."""
    outward = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background work is begun with it ignored
    sys.path[:], job = receive(sys.stdin.buffer)
    threading.Thread(target=_stop_with, args=(sys.stdin.fileno(),), daemon=True).start()
    try:
        answer = ("ended", pickle.loads(job)(lambda text: send(outward, ("note", text))))
    except KeyboardInterrupt:
        return
    except BaseException as error:
        answer = ("died", f"{type(error).__name__}: {error}")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # nothing is left to stop
    send(outward, answer)


def _stop_with(inward: int) -> None:
    """Wait for the end of the pipe, then do as Ctrl-C does. Unbuffered, for a buffer's lock would outlive the job."""
    with suppress(OSError):
        while os.read(inward, 1):
            pass
    os.kill(os.getpid(), signal.SIGINT)


if __name__ == "__main__":
    try:
        main()
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        os._exit(0)
