"""The serial engine: this process, and with `workers: N` N-1 more, share out a cohort.

Processes are started once per run. Whoever is free takes the next instruction, the largest client first, so the
machine stays full; answers are put back in client order, so results do not depend on the number of workers.
A process that is still starting up takes nothing and delays nothing; one that dies hands its work back.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from fedloom.core import ClientId, ConfigError, Interrupted, Payload
from fedloom.engine.experiment import Experiment, Options
from fedloom.engine.folder import RunFolder
from fedloom.engine.force import Down
from fedloom.engine.runtime import Answer, Failed, Instruction, Runtime, threads
from fedloom.engine.spool import Ref, Spool
from fedloom.engine.store import ClientStore


@contextmanager
def hire(
    experiment: Experiment, options: Options, folder: RunFolder, note: Callable[[str], None]
) -> Iterator[Workforce]:
    """The processes of a run, for as long as it lasts."""
    with threads(experiment.threads), Workforce(experiment, folder.path, options.workers, note) as force:
        yield force


class Workforce:
    """The processes that carry out instructions. Use as a context manager."""

    def __init__(self, experiment: Experiment, folder: Path, workers: int, note: Callable[[str], None]):
        sent = recipe(experiment, workers)
        self.states, self.spool = ClientStore(folder / "clients"), Spool(folder / ".spool" / "0.bin")
        try:
            self.runtime = Runtime(experiment, self.states, self.spool, folder / "log.txt")
        except BaseException:
            self.spool.close()
            raise
        self._note, self._folder = note, folder
        self._queue: deque[tuple[int, Instruction]] = deque()
        self._refs: dict[ClientId | None, Ref] = {}
        self._answers: dict[int, Answer] = {}
        self._busy = self._total = self._generation = 0
        self._progress: Callable[[int, int], None] = lambda done, total: None
        self._changed = threading.Condition()
        self._down_spool = Spool(folder / ".spool" / "down.bin") if workers > 1 else None
        self._children = [_Child(self, sent, folder, k) for k in range(1, workers)]

    def __enter__(self) -> Workforce:
        return self

    def __exit__(self, *error: object) -> None:
        """End the other processes and remove the spool files."""
        for child in self._children:
            child.stop()
        self.spool.close()
        if self._down_spool is not None:
            self._down_spool.close()
        for path in (self._folder / ".spool").glob("*.bin"):
            path.unlink(missing_ok=True)

    def carry_out(
        self,
        instructions: Sequence[Instruction],
        down: Down,
        *,
        stop: Callable[[], bool] = lambda: False,
        late: Callable[[], bool] = lambda: False,
        progress: Callable[[int, int], None] = lambda done, total: None,
        again: bool = False,
    ) -> list[Answer]:
        """See `Force.carry_out`. stop is asked between clients, late before each of them."""
        if not again:
            self._generation += 1
            self.spool.reset()
        refs = self._share(instructions, down) if self._children else {}
        order = sorted(range(len(instructions)), key=lambda k: (-instructions[k].size, k))
        with self._changed:
            self._refs, self._answers, self._progress = refs, {}, progress
            self._queue = deque((k, instructions[k]) for k in order)
            self._total = len(instructions)
            self._changed.notify_all()
        while True:
            if stop():
                self._abandon()
                raise Interrupted("stopped by the user")
            if late():
                self._expire()
            taken = self._take(wait=True)
            if taken is None:
                break
            k, instruction = taken
            self._finish(k, self.runtime.carry_out(instruction, down(instruction.client)))
        return [self._answers[k] for k in range(len(instructions))]

    def deliver(self, views: Iterable[Instruction], down: Down) -> None:
        """Nothing to do: states and views are on this disk."""

    def _share(self, instructions: Sequence[Instruction], down: Down) -> dict[ClientId | None, Ref]:
        assert self._down_spool is not None
        self._down_spool.reset()
        alive: list[Payload] = []  # identity is only meaningful while the tensors live
        refs: dict[ClientId | None, Ref] = {}
        for client in {instruction.client for instruction in instructions}:
            alive.append(down(client))
            refs[client] = self._down_spool.write(alive[-1], keep=True)
        return refs

    def _take(self, *, wait: bool) -> tuple[int, Instruction] | None:
        """The next instruction; None when nothing is left (and, with `wait`, nobody is still at work)."""
        with self._changed:
            while wait and not self._queue and self._busy:
                self._changed.wait()
            if not self._queue:
                return None
            self._busy += 1
            return self._queue.popleft()

    def _finish(self, k: int, answer: Answer) -> None:
        with self._changed:
            self._answers[k] = answer
            self._busy -= 1
            done, total = len(self._answers), self._total
            self._changed.notify_all()
        self._progress(done, total)

    def _hand_back(self, k: int, instruction: Instruction) -> None:
        with self._changed:
            self._queue.appendleft((k, instruction))
            self._busy -= 1
            self._changed.notify_all()

    def _abandon(self) -> None:
        with self._changed:
            self._queue.clear()
            while self._busy:
                self._changed.wait()

    def _expire(self) -> None:
        with self._changed:
            for k, instruction in self._queue:
                self._answers[k] = Failed(instruction.client or 0, "the deadline passed before its turn", "")
            self._queue.clear()


def recipe(experiment: Experiment, workers: int) -> bytes:
    """What another process needs to make the same experiment; empty when there is none.

    Raises `ConfigError` when several workers are asked for and the experiment cannot be sent to them.
    """
    return b"" if workers == 1 else sendable(experiment, "engine.workers", workers, "set engine.workers to 1")


def sendable(experiment: Experiment, field: str, value: object, mend: str) -> bytes:
    """The experiment's `rebuild` for another process; `ConfigError` naming the field that asks for one."""
    if experiment.rebuild is None:
        raise ConfigError(f"{field} is {value}, but {experiment.why_not}; {mend}")
    try:
        return pickle.dumps(experiment.rebuild)
    except Exception as error:  # pickle raises many kinds
        raise ConfigError(
            f"{field} {value} needs an experiment that can be sent to other processes ({error}); "
            f"{mend}, or pass module-level functions instead of lambdas"
        ) from error


class _Child:
    """A worker process and the thread that feeds it. Messages are pickled between our own two processes."""

    def __init__(self, owner: Workforce, recipe: bytes, folder: Path, k: int):
        self.owner, self.stopping = owner, False
        command = [sys.executable, "-m", "fedloom.engine.worker", str(folder), str(k)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(owner.runtime.experiment.threads)}
        # A group of its own: Ctrl-C in a terminal reaches every process of the group, and the parent decides.
        group = {"process_group": 0} if os.name == "posix" else {}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, **group
        )
        self.thread = threading.Thread(target=self._feed, args=(recipe,), name=f"fedloom-worker-{k}", daemon=True)
        self.thread.start()

    def _feed(self, recipe: bytes) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            send(self.process.stdin, (recipe, sys.path))
            ready = receive(self.process.stdout)
        except (EOFError, OSError):
            ready = "it ended while starting"
        if ready is not None:
            if not self.stopping:
                self.owner._note(f"a worker process could not start ({ready}); its share is done by the others")
            return
        while self._wait_for_work():
            taken = self.owner._take(wait=False)
            if taken is None:
                continue
            k, instruction = taken
            try:
                send(self.process.stdin, (self.owner._generation, instruction, self.owner._refs[instruction.client]))
                answer = receive(self.process.stdout)
            except Exception as error:  # what is pickled may be of the user's making; a silent thread would never end
                self.owner._hand_back(k, instruction)
                if not self.stopping:
                    gone = isinstance(error, EOFError | OSError)
                    why = "died" if gone else f"could not be understood ({type(error).__name__}: {error})"
                    self.owner._note(f"a worker process {why}; its work is repeated by the others")
                return
            self.owner._finish(k, answer)

    def _wait_for_work(self) -> bool:
        with self.owner._changed:
            while not self.owner._queue and not self.stopping:
                self.owner._changed.wait()
            return not self.stopping

    def stop(self) -> None:
        """Close the pipe, which ends the process, and wait for it."""
        self.stopping = True
        with self.owner._changed:
            self.owner._changed.notify_all()
        self.process.kill()
        self.process.wait()
        self.thread.join(timeout=5)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(OSError):  # the other end is gone, and so is what was buffered for it
                    pipe.close()


def send(pipe: BinaryIO | Any, message: object) -> None:
    """Write one length-prefixed message."""
    data = pickle.dumps(message)
    pipe.write(len(data).to_bytes(8, "little") + data)
    pipe.flush()


def receive(pipe: BinaryIO | Any) -> Any:
    """Read one message; `EOFError` when the other process is gone."""
    head = pipe.read(8)
    if len(head) < 8:
        raise EOFError
    size = int.from_bytes(head, "little")
    data = pipe.read(size)
    if len(data) < size:
        raise EOFError
    return pickle.loads(data)
