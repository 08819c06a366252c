"""Several runs at a time, each in a process of its own. Results are those of one after the other, bit for bit."""

from __future__ import annotations

import pickle
import pickletools
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fedloom.comparison.folders import keep_memory, own_memory
from fedloom.comparison.planned import Planned, Tell, carry, held
from fedloom.comparison.work import Board, Ended, Hands, Settle, Watch, attempt, in_turn
from fedloom.config.words import shown
from fedloom.core.errors import ConfigError, RunError
from fedloom.report.units import duration

MOST = 512  # jobs, more than which is a slip of the hand


@dataclass(frozen=True)
class Task:
    """A run as another process needs it: a job of `fedloom.engine.jobs`.

    tree: the resolved configuration. given: the user's own data and model, pickled.
    """

    path: Path
    key: str
    tree: Mapping[str, Any]
    given: bytes

    def __call__(self, tell: Tell) -> Ended:
        """Make the run; tell: gets the notes about it."""
        return attempt(partial(self._carry, tell), self.path, partial(held, self.path))

    def _carry(self, tell: Tell) -> None:
        from fedloom.config import resolve
        from fedloom.engine.experiment import Observer
        from fedloom.evaluate.cost import peak_rss_bytes

        class Notes(Observer):
            def note(self, text: str) -> None:
                tell(text)

        given = {**pickle.loads(self.given), "workers": self.tree["engine"]["workers"]}
        carry(self.path, self.key, resolve(self.tree), given, [Notes()])
        keep_memory(self.path, peak_rss_bytes())


def hands(wanted: Any, plans: Sequence[Planned], watch: Watch, tell: Tell) -> Hands:
    """Who makes the runs of comparisons: this process, or that many at a time.

    wanted: a number, or `auto` for as many as the machine has cores and memory for. Raises `ConfigError` for anything
    else, and for data or a network of the user's own that cannot be sent to another process.
    """
    number = checked(wanted)
    if number == 0:
        number, why = _fitting(plans)
        tell(f"jobs: {number} at a time, {why}")
    if number == 1:
        return partial(in_turn, watch, tell)
    return partial(_side_by_side, number, _sendable(plans, number), tell)


def checked(wanted: Any) -> int:
    """The number of jobs, 0 for auto. Raises `ConfigError` for anything else."""
    text = wanted.strip() if isinstance(wanted, str) else wanted
    if text == "auto":
        return 0
    if isinstance(text, str) and text.isascii() and text.isdecimal() and len(text) < 10:
        text = int(text)
    if isinstance(text, bool) or not isinstance(text, int) or not 1 <= text <= MOST:
        raise ConfigError(f"jobs must be auto or a whole number in [1, {MOST}], got {shown(wanted)}")
    return text


def _fitting(plans: Sequence[Planned]) -> tuple[int, str]:
    """How many runs the machine can make at a time, and what sets the limit.

    A run is taken to need as much memory as the largest that had a process to itself, or else as this process, which
    has read the data and made every network.
    """
    from fedloom.environment import cores
    from fedloom.evaluate.cost import peak_rss_bytes

    if any(run.device != "cpu" for planned in plans for runs in planned.checked.values() for run in runs.values()):
        return 1, "for they share a device"
    each = max(planned.threads * (planned.given["workers"] or 1) for planned in plans)
    missing = {key for planned in plans for key in planned.runs if planned.state(key) != "done"}
    limits = {"for no more are missing": max(1, len(missing)), "for that many cores": max(1, cores() // each)}
    known = [own_memory(planned.path(key)) for planned in plans for key in planned.runs]
    peaks = [peak for found in known for peak in found.values()]
    need, free = max(peaks) if peaks else peak_rss_bytes(), _free_memory()
    if need and free is not None:
        limits["for that much memory"] = max(1, free // need)
    why = min(limits, key=lambda reason: limits[reason])
    return limits[why], why


def _free_memory() -> int | None:
    """Bytes that processes could still take without swapping; None where the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return found[0] if found else None


def _sendable(plans: Sequence[Planned], number: int) -> dict[str, bytes]:
    """Run -> the user's own data and model for it, pickled; those that several plans share are held once.

    Raises `ConfigError` for a part of a run that another process cannot have.
    """
    pickled: dict[tuple[int, int], bytes] = {}
    found: dict[str, bytes] = {}
    for planned in plans:
        own = id(planned.given["data"]), id(planned.given["model"])
        if own not in pickled:
            pickled[own] = _pickled(planned, number)
        found = {**dict.fromkeys(planned.runs, pickled[own]), **found}  # the first plan with a run is its owner
    return found


def _pickled(planned: Planned, number: int) -> bytes:
    """The user's own data and model of a plan; see `_sendable`."""
    mend = "set jobs to 1"
    try:
        sent = pickle.dumps({key: planned.given[key] for key in ("data", "model")})
    except Exception as error:  # pickle raises many kinds
        raise ConfigError(
            f"jobs is {number}, but the data or the model cannot be sent to other processes ({error}); {mend}, or pass "
            "module-level functions and classes"
        ) from error
    named = [section["name"].partition(":")[0] for section in planned.methods.values()]
    if "__main__" in named or any(value == "__main__" for _, value, _ in pickletools.genops(sent)):
        raise ConfigError(
            f"jobs is {number}, but a part of the run is defined in the main program, where other processes cannot "
            f"import it; {mend}, or move it to a module of its own"
        )
    return sent


def _side_by_side(
    number: int, given: Mapping[str, bytes], tell: Tell, board: Board, keys: Sequence[str], settle: Settle
) -> None:
    """Make that many runs at a time. given: run -> what `Task` has."""
    from fedloom.engine.jobs import Jobs

    waiting = deque(keys)
    with Jobs() as jobs:
        try:
            while waiting or jobs.running:
                while waiting and len(jobs.running) < number:
                    key = waiting.popleft()
                    if board.settled(key):
                        continue
                    if board.owners[key].planned.held(key):
                        settle(key, Ended(held=True))
                        continue
                    tell(board.begin(key))
                    jobs.start(key, pickle.dumps(_task(board.owners[key].planned, key, given[key], number)))
                if jobs.running:
                    _hear(*jobs.wait(), tell, board, settle)
        except KeyboardInterrupt:
            tell("stopping after the current clients; Ctrl-C again stops at once")
            raise


def _task(planned: Planned, key: str, given: bytes, number: int) -> Task:
    """The run as a task; cores that `workers: auto` may use are shared between the jobs."""
    from fedloom.environment import cores

    tree = planned.resolved(*planned.runs[key])[1].as_dict()
    share = max(1, cores() // tree["engine"]["threads"] // number)
    workers = share if tree["engine"]["workers"] == "auto" else tree["engine"]["workers"]
    return Task(planned.path(key).absolute(), key, {**tree, "engine": {**tree["engine"], "workers": workers}}, given)


def _hear(key: str, kind: str, value: Any, tell: Tell, board: Board, settle: Settle) -> None:
    """Take in a message of a job."""
    place = board.begun[key]
    if kind == "note":
        tell(f"{place}: {value}")
        return
    settle(key, value if isinstance(value, Ended) else Ended(RunError(f"the run ended with its process: {value}")))
    if (run := board.owners[key].done.get(key)) is not None:
        accuracy = (
            "" if run.summary["final_accuracy"] is None else f", final accuracy {run.summary['final_accuracy']:.3f}"
        )
        tell(f"{place} done in {duration(run.summary.get('wall_seconds'))}{accuracy}")
