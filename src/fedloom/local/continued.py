"""Data of a client that trains several times within one piece of work."""

from __future__ import annotations

from collections.abc import Iterator

from fedloom.core.batches import Batch, Batches


class Continued(Batches):
    """The same examples, with epochs counted on from `start`: training that begins anew sees orders of its own.

    Visits are counted with those of `data`.
    """

    def __init__(self, data: Batches, start: int):
        vars(self).update(vars(data))
        self._start = start

    def epoch(
        self, epoch: int = 0, batch_size: int = 32, *, purpose: str = "train", shuffle: bool = True
    ) -> Iterator[Batch]:
        """Epoch `start` + `epoch` of the data."""
        return super().epoch(self._start + epoch, batch_size, purpose=purpose, shuffle=shuffle)
