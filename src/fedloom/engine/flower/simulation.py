"""`engine.runtime: simulation`: Flower's own simulation, whose nodes are worked by Ray's processes.

Flower and Ray run in a process of their own (see `simulator`), so that their threads, signals and words do not get
into the run: the loop stays here, and what they print is in `flower.log` of the run folder.
"""

from __future__ import annotations

import functools
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from flwr.app import Message

from fedloom.core import ConfigError, PayloadError, RunError
from fedloom.engine.experiment import Experiment, Observer, Options
from fedloom.engine.flower.compat import identify
from fedloom.engine.flower.hosting import spread
from fedloom.engine.flower.post import content_of
from fedloom.engine.flower.server import hire
from fedloom.engine.flower.wire import header
from fedloom.engine.folder import RunFolder
from fedloom.engine.loop import run as train
from fedloom.engine.serial import receive, send, sendable

MEND = "set engine.runtime to grid"
SHARE = 4  # nodes per worker, so that workers stay busy although nodes hold unequally much
LONGEST = 30  # characters of a folder for temporary files that leave room for the names of Ray's sockets
PATIENCE = 20.0  # seconds for Ray to stop before it is killed


def run(
    experiment: Experiment,
    options: Options,
    folder: RunFolder,
    observers: Sequence[Observer],
    card: Mapping[str, Any],
) -> dict[str, Any]:
    """Carry out a run in Flower's simulation; client states lie in `nodes/` of the run folder.

    `options.workers` processes work at a time; results do not depend on their number. Raises `ConfigError` when the
    experiment cannot be sent to them or Ray cannot start, `RunError` when the simulation ends before the run does.
    """
    recipe, total = sendable(experiment, "engine.runtime", "simulation", MEND), experiment.plan.num_clients
    blocks = spread(total, min(total, SHARE * options.workers))
    log, root = folder.path / "flower.log", folder.path / "nodes" / "all"
    settings = {"blocks": blocks, "actors": min(len(blocks), options.workers), "root": str(root), "log": str(log)}
    with _temporary() as temporary, Simulation(temporary, recipe, settings, experiment.threads) as simulation:
        try:
            return train(experiment, options, folder, observers, functools.partial(hire, simulation, card))
        except RunError as error:
            if simulation.refused:
                raise ConfigError(f"{simulation.refused}; mend that, or {MEND}") from error
            if simulation.lost:
                raise RunError(f"Flower's simulation ended before the run did; see '{log}', and resume it") from error
            raise


@contextmanager
def _temporary() -> Iterator[Path]:
    """A folder for what Ray and Flower leave behind."""
    home = tempfile.gettempdir()
    with tempfile.TemporaryDirectory(
        prefix="fl-", dir=home if len(home) <= LONGEST else "/tmp", ignore_cleanup_errors=True
    ) as path:
        yield Path(path)


class Simulation:
    """The process of Flower's simulation, as far as a `Post` needs a `Grid`. Use as a context manager.

    settings: what `simulator.main` is told. lost: it has ended by itself. refused: why the run could not start in it.
    """

    def __init__(self, temporary: Path, recipe: bytes, settings: Mapping[str, Any], threads: int):
        self.lost, self.refused = False, ""
        self._ready = self._begun = False
        (temporary / "recipe").write_bytes(recipe)
        command = [sys.executable, "-m", "fedloom.engine.flower.simulator", str(temporary)]
        # A group of its own: Ctrl-C in a terminal reaches every process of the group, and the loop decides.
        group = {"process_group": 0} if os.name == "posix" else {}
        environment = _environment(temporary, threads)
        with open(settings["log"], "ab") as file:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, env=environment, **group
            )
        with suppress(OSError):  # that it has ended already is noticed when it is asked
            send(self._process.stdin, dict(settings))
        identify(1, 0)

    def __enter__(self) -> Simulation:
        return self

    def __exit__(self, *error: object) -> None:
        """End the process, which ends Ray's processes first."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        try:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(PATIENCE if self._ready else 0)
        finally:
            self._kill()

    def _kill(self) -> None:
        """End whatever has not ended by itself."""
        if os.name == "posix":
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # Ray's processes are of the same group
        self._process.kill()
        self._process.wait()

    def get_node_ids(self) -> list[int]:
        """Every node."""
        return self._ask("get_node_ids")

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Send messages; their numbers.

        Whether a node is still at work is never asked: nodes here lose nothing unnoticed, and the question would
        wait behind the work.
        """
        letters = [message for message in messages if not _ping(message)]
        self._begun |= any(letter.metadata.message_type != "query" for letter in letters)
        return self._ask(
            "push_messages", [(m.content, m.metadata.dst_node_id, m.metadata.message_type) for m in letters]
        )

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Replies that have come; `RunError` for a node that cannot even say who it is, as no other will."""
        replies: list[Message] = self._ask("pull_messages", list(message_ids))
        for content in () if self._begun else map(content_of, replies):
            if reason := content if isinstance(content, str) else header(content).get("refused"):
                self.refused = f"Ray's processes cannot make the experiment ({reason})"
                raise RunError(self.refused)
        return replies

    def _ask(self, what: str, *arguments: Any) -> Any:
        try:
            if not self._ready:
                if reason := receive(self._process.stdout):
                    self.refused = f"Flower's simulation cannot start ({reason})"
                    raise RunError(self.refused)
                self._ready = True
            send(self._process.stdin, (what, arguments))
            failed, answer = receive(self._process.stdout)
        except (EOFError, OSError) as error:
            self.lost = True
            raise RunError("it has ended") from error
        if failed:
            raise RunError(answer)
        return answer


def _ping(message: Message) -> bool:
    try:
        return header(message.content).get("ask") == "ping"
    except PayloadError:
        return False


def _environment(temporary: Path, threads: int) -> dict[str, str]:
    """Ray's processes find the same modules and devices as this one, and answer nobody else."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        "OMP_NUM_THREADS": str(threads),
        "FLWR_HOME": str(temporary),
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
        "RAY_ENABLE_AUTO_CONNECT": "0",
        "RAY_DEDUP_LOGS": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }
