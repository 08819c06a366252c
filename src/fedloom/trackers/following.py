"""The observer between a run and its tracker: every row once, also after a crash, and never an error for the run."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedloom.core.errors import FedloomError
from fedloom.engine.experiment import Observer
from fedloom.engine.files import write_json
from fedloom.trackers import Card, Tracker, begin
from fedloom.trackers.rows import scalars, step

RECORD = "tracker.json"


def how_to_see(folder: Path) -> str | None:
    """The command or the address that shows what a tracker has of the run in a folder; None without a tracker."""
    try:
        see = json.loads((folder / RECORD).read_text(encoding="utf-8"))["see"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return see if isinstance(see, str) else None


class Following(Observer):
    """Makes the tracker's record a copy of metrics.jsonl.

    `tracker.json` in the run folder names the record and counts the rows that it surely has. So a continued run adds to
    the record what it lacks and nothing twice, whatever was lost with the process before. A tracker that fails is told
    no more: `tell` gets one sentence, `log` the traceback. pictures, files: names in the run folder of what is kept at
    the end, where they exist.
    """

    def __init__(
        self,
        card: Card,
        *,
        tell: Callable[[str], None],
        log: Callable[[str], None],
        pictures: Sequence[str] = (),
        files: Sequence[str] = (),
    ):
        self.card, self.tell, self.log = card, tell, log
        self.pictures, self.files = pictures, files
        self.tracker: Tracker | None = None
        self.failed = False

    def open(self) -> None:
        """Begin or continue the record; before the run's clock starts, for a tracker may take its time."""
        self._try(self._open)

    def started(self, info: Mapping[str, Any]) -> None:
        """Add the rows of metrics.jsonl that the record lacks."""
        self._try(self._catch_up, info)

    def round_done(self, row: Mapping[str, Any]) -> None:
        """Add a row."""
        self._try(self._add, row)

    def stage_done(self, row: Mapping[str, Any]) -> None:
        """Add a row."""
        self._try(self._add, row)

    def finished(self, summary: Mapping[str, Any]) -> None:
        """Add the summary, the pictures and the files."""
        self._try(self._finish, summary)

    def close(self, how: str) -> None:
        """Close the record; see `Tracker.close`."""
        self._try(self._close, how)

    def _open(self) -> None:
        known = self._known()
        self.told = known.get("rows", 0)
        self.tracker = begin(self.card._replace(record=known.get("record")))
        self._keep()

    def _catch_up(self, info: Mapping[str, Any]) -> None:
        self.rounds, self.seen, self.last = info["rounds"], 0, 0
        path = self.card.folder / "metrics.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        for line in lines:
            self._add(json.loads(line))

    def _add(self, row: Mapping[str, Any]) -> None:
        self.seen, self.last = self.seen + 1, step(row, self.rounds, self.last)
        if self.tracker is None or self.seen <= self.told:
            return
        self.tracker.log(scalars(row), self.last)
        self.told = self.seen
        if self.tracker.lasting:
            self._keep()

    def _finish(self, summary: Mapping[str, Any]) -> None:
        if self.tracker is None:
            return
        values = {f"summary/{key}": value for key, value in scalars(summary).items()}
        self.tracker.finish(values, self.last, self._present(self.pictures), self._present(self.files))

    def _present(self, names: Sequence[str]) -> list[Path]:
        return [path for name in names if (path := self.card.folder / name).exists()]

    def _close(self, how: str) -> None:
        if self.tracker is not None:
            self.tracker.close(how)
            self._keep()

    def _known(self) -> Mapping[str, Any]:
        """What an earlier part of the run has kept with this tracker."""
        try:
            found = json.loads((self.card.folder / RECORD).read_text(encoding="utf-8"))
            sound = isinstance(found["record"], str) and type(found["rows"]) is int
            return found if sound and found["tracker"] == dict(self.card.options) else {}
        except (OSError, ValueError, LookupError, TypeError):
            return {}

    def _keep(self) -> None:
        assert self.tracker is not None
        known = {"tracker": dict(self.card.options), "record": self.tracker.record}
        found = {**known, "rows": self.told, "see": self.tracker.see}
        write_json(self.card.folder / RECORD, found, sync=False)

    def _try(self, work: Callable[..., None], *arguments: Any) -> None:
        """Do it, unless the tracker has failed; its first failure is told, and is the last that it is asked for."""
        if self.failed:
            return
        try:
            work(*arguments)
        except (Exception, SystemExit) as error:
            self.failed = True
            first = (str(error).splitlines() or [""])[0]
            name, what = self.card.options["name"], f"{type(error).__name__}: {first}"
            with suppress(FedloomError):  # a full disk, which takes no log either
                self.log(traceback.format_exc())
                self.tell(f"the tracker {name} failed and is told no more ({what}); the run goes on, see log.txt")
            self._abandon()

    def _abandon(self) -> None:
        """Close the record if that still can be done."""
        with suppress(Exception, SystemExit):
            self._close("failed")
        self.tracker = None
