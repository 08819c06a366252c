"""Between the loop and what carries out its instructions: this process and its workers, or a federation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from fedloom.core import ClientId, Payload
from fedloom.engine.experiment import Experiment, Options
from fedloom.engine.folder import RunFolder
from fedloom.engine.runtime import Answer, Instruction, Runtime
from fedloom.engine.store import Versions

Down = Callable[[ClientId | None], Payload]


class States(Protocol):
    """Where clients' states lie: on this disk, or on those of a federation's nodes."""

    def sha256(self, client: ClientId, version: str) -> str:
        """Hash of a state as it was stored."""
        ...

    def sound(self, client: ClientId, version: str, sha256: str) -> bool:
        """Whether a state is still what it was, as far as this process can tell."""
        ...

    def prune(self, kept: Collection[Versions]) -> None:
        """Remove every version that none of the indexes names."""
        ...

    def clear(self) -> None:
        """Remove everything, for a run that starts over."""
        ...


class Force(Protocol):
    """Carries out instructions. runtime: the one of the server's own process."""

    runtime: Runtime
    states: States

    def carry_out(
        self,
        instructions: Sequence[Instruction],
        down: Down,
        *,
        stop: Callable[[], bool] = ...,
        late: Callable[[], bool] = ...,
        progress: Callable[[int, int], None] = ...,
        again: bool = False,
    ) -> list[Answer]:
        """Do all instructions and return their answers in the order given.

        down: what a client receives (None: the global view). stop: True ends the exchange with `Interrupted`.
        late: True fails those that are not done. progress: told how many of how many are done.
        again: these belong to the exchange before (a retry), whose replies must stay readable.
        """
        ...

    def deliver(self, views: Iterable[Instruction], down: Down) -> None:
        """Leave the final view of every client where the client lives, so that it can predict with it."""
        ...


Hire = Callable[[Experiment, Options, RunFolder, Callable[[str], None]], AbstractContextManager[Force]]
