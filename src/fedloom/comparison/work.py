"""Making the runs that are missing, by hands that do one after the other; `fedloom.comparison.jobs` has more hands."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fedloom.api import Run
from fedloom.comparison.folders import mend
from fedloom.comparison.planned import Planned, Tell
from fedloom.comparison.results import Results
from fedloom.core.errors import ConfigError, FedloomError, Interrupted, RunError, origin

if TYPE_CHECKING:
    from fedloom.engine.experiment import Observer

Work = Callable[[Sequence["Observer"]], Run]
Watch = Callable[[Work], Run]


class Ended(NamedTuple):
    """How a try to make a run ended: well without an error. held: another process works on it."""

    error: FedloomError | None = None
    held: bool = False


Settle = Callable[[str, Ended], None]
Hands = Callable[["Board", Sequence[str], Settle], None]


class Board:
    """What is to be done for one comparison or several over the same folder of runs, and how far it is.

    also: called whenever the files of the comparisons have been written. begun: key -> a run that is being made, in
    words.
    """

    def __init__(self, plans: Sequence[Planned], also: Callable[[Board], None] | None = None):
        _prepare(plans)
        self.results = [Results(planned) for planned in plans]
        self.owners: dict[str, Results] = {}
        for found in self.results:
            for key in found.planned.runs:
                self.owners.setdefault(key, found)
        self.begun: dict[str, str] = {}
        self._also = also

    @property
    def folder(self) -> Path:
        """What holds the runs and the comparisons."""
        return self.results[0].planned.store.parent

    def settled(self, key: str) -> bool:
        """Whether a run is done or has failed."""
        return key in self.owners[key].done or key in self.owners[key].failed

    def where(self, key: str) -> str:
        """A run in words: setting, label, seed."""
        planned = self.owners[key].planned
        label, seed = planned.runs[key]
        return f"{planned.setting}{', ' * bool(planned.setting)}{label}, seed {seed}"

    def begin(self, key: str) -> str:
        """The run that is begun now, in words with its number."""
        number = sum(self.settled(other) or other in self.begun for other in self.owners) + 1
        self.begun[key] = f"run {number} of {len(self.owners)}: {self.where(key)}"
        return self.begun[key]

    def fail(self, key: str, error: FedloomError) -> None:
        """Keep why there is no such run."""
        for found in self.having(key):
            found.failed[key] = error

    def having(self, key: str) -> list[Results]:
        """The comparisons with that run."""
        return [found for found in self.results if key in found.planned.runs]

    def write(self, changed: Sequence[Results] | None = None) -> None:
        """Write the files of the comparisons that have changed, by default of all."""
        for found in self.results if changed is None else changed:
            found.write()
        if self._also is not None:
            self._also(self)


def make(plans: Sequence[Planned], hands: Hands, tell: Tell, also: Callable[[Board], None] | None = None) -> Board:
    """Make the runs that are missing, and write the comparisons after each.

    hands: who makes them. tell: told how it goes. also: see `Board`. Raises `Interrupted`; what fails stands in the
    results.
    """
    board = Board(plans, also)
    if done := sum(key in found.done for key, found in board.owners.items()):
        tell(f"already there: {done} of {len(board.owners)} runs")
    board.write()
    try:
        for last in (False, True):  # the second time those that another process held
            left = [key for key in board.owners if not board.settled(key)]
            hands(board, left, partial(_settle, board, tell, last))
        if any(found.failed for found in board.results):
            board.write()  # another process may have ended one since
    except (Interrupted, KeyboardInterrupt) as error:
        board.write()
        places = list(board.begun.values())
        more = f" and {len(places) - 1} more" if len(places) > 1 else ""
        raise Interrupted(
            f"interrupted{f' in {places[0]}{more}' if places else ''}; what is done stays in '{board.folder}', and the "
            "same command goes on there"
        ) from error
    for trouble in filter(None, (found.draw() for found in board.results)):
        tell(trouble)
    return board


def _settle(board: Board, tell: Tell, last: bool, key: str, ended: Ended) -> None:
    """Take in how a try ended. last: a run that another process holds is told as such instead of being put off."""
    planned = board.owners[key].planned
    if planned.state(key) != "done":
        if ended.held and not last:
            board.begun.pop(key, None)
            tell(f"put off, for another process works on it: {board.where(key)}")
            return
        error = ended.error
        if ended.held or error is None:
            error = ConfigError(
                f"'{planned.path(key)}' is in use by another run; when that has ended, call the same comparison again"
            )
        place = board.begun.get(key) or board.begin(key)
        board.fail(key, error)
        tell(f"{place} failed: {error}")
    board.begun.pop(key, None)
    board.write(board.having(key))


def in_turn(watch: Watch, tell: Tell, board: Board, keys: Sequence[str], settle: Settle) -> None:
    """Make runs in this process, one after the other. watch: calls what it is given with the observers of one run."""
    for key in keys:
        if board.settled(key):
            continue
        planned = board.owners[key].planned
        if planned.held(key):
            settle(key, Ended(held=True))
            continue
        tell(board.begin(key))
        settle(key, attempt(partial(watch, partial(planned.carry, key)), planned.path(key), partial(planned.held, key)))


def attempt(work: Callable[[], object], path: Path, held: Callable[[], bool]) -> Ended:
    """Try to make the run of a folder. Raises `Interrupted` and `KeyboardInterrupt` only."""
    try:
        work()
    except (Exception, SystemExit) as raised:  # a damaged folder, code of the user
        if isinstance(raised, Interrupted):
            raise
        if _is_stop(raised):
            raise KeyboardInterrupt from raised
        begun = held() or isinstance(raised.__cause__, BlockingIOError)  # there at this moment
        return Ended(_in_words(raised, path), begun)
    return Ended()


def _is_stop(error: BaseException | None) -> bool:
    """Whether Ctrl-C came in the middle of something that failed with an error of its own, such as an import."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _in_words(error: BaseException, path: Path) -> FedloomError:
    """An error of one run; one that nobody foresaw leaves the other runs alone too."""
    if isinstance(error, FedloomError):
        return error
    if isinstance(error, IsADirectoryError | NotADirectoryError | FileExistsError | PermissionError):
        return RunError(f"'{error.filename or path}' cannot be used ({error.strerror}); {mend(path)}")
    return RunError(f"the run failed with {type(error).__name__}: {error} ({origin(error)})")


def _prepare(plans: Sequence[Planned]) -> None:
    """Make the folders; `ConfigError` when one cannot be written."""
    for folder in dict.fromkeys(path for planned in plans for path in (planned.store, planned.folder)):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK):
                raise PermissionError(13, os.strerror(13))
        except OSError as error:
            raise ConfigError(
                f"out is '{plans[0].store.parent}', which cannot be written: {error.strerror}; name another folder"
            ) from error
