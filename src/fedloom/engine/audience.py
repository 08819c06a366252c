"""Who watches a run: the log and the observers. What an observer does wrong never ends a run.

An observer that wants the run to stop raises `Interrupted`; what was committed is then checkpointed.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import Any

from fedloom.core import Interrupted
from fedloom.engine.experiment import Observer
from fedloom.engine.folder import RunFolder


class Audience:
    """Passes events on; an observer that raises is told no more, and its traceback is logged."""

    def __init__(self, folder: RunFolder, observers: Sequence[Observer]):
        self.folder, self.observers = folder, list(observers)

    def note(self, text: str) -> None:
        """Tell the log and the observers."""
        self.folder.log(text)
        self.tell("note", text)

    def tell(self, event: str, *arguments: Any) -> None:
        """Call a method of every observer."""
        for observer in tuple(self.observers):
            try:
                getattr(observer, event)(*arguments)
            except Interrupted:
                raise
            except Exception:  # a closed terminal, a full disk behind a tracker
                self.observers.remove(observer)
                self.folder.log(f"an observer failed and is told no more:\n{traceback.format_exc()}")
