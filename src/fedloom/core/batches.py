"""A client's data as a plan of batches, drawn outside the method.

The order of examples and the augmentation are functions of `(seed, stage, round, client, purpose, epoch)`, so
every engine, and every repetition of a client's work, sees the same batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from fedloom.core.errors import ConfigError
from fedloom.core.seeds import Key, generator

Inputs = Tensor | Mapping[str, Tensor]
Prepare = Callable[[Inputs, torch.Generator | None], Inputs]


class Batch(NamedTuple):
    """x: inputs [batch, ...] or a mapping; y: int64 class ids [batch]; index: positions in the client's data."""

    x: Inputs
    y: Tensor
    index: Tensor  # type: ignore[assignment]  # hides tuple.index, which nobody needs here


def take(x: Inputs, index: Tensor) -> Inputs:
    """Select rows of a tensor or of every tensor of a mapping."""
    if isinstance(x, Tensor):
        return x.index_select(0, index)
    return {name: tensor.index_select(0, index) for name, tensor in x.items()}


class Batches:
    """The examples of one client (or of one test set) at one stage and round.

    x: stored inputs of the whole source, indexable by rows; y: int64 class ids of the whole source.
    indices: which rows belong here. key: prefix of the random streams.
    prepare: stored inputs -> model inputs; its second argument is a generator when augmentation may be drawn,
    None for evaluation.
    """

    def __init__(self, x: Inputs, y: Tensor, indices: Tensor, *, key: tuple[Key, ...], prepare: Prepare):
        self._x, self._y, self._indices = x, y, indices
        self._key, self._prepare = key, prepare

    def __len__(self) -> int:
        return len(self._indices)

    @property
    def num_examples(self) -> int:
        """Number of examples."""
        return len(self._indices)

    @property
    def labels(self) -> Tensor:
        """Class id of every example, int64 [num_examples]."""
        return self._y[self._indices]

    @property
    def classes(self) -> tuple[int, ...]:
        """Class ids that occur here, ascending."""
        return tuple(int(c) for c in torch.unique(self.labels))

    def part(self, start: int, stop: int) -> Batches:
        """The examples from `start` up to `stop`, in their stored order."""
        return Batches(self._x, self._y, self._indices[start:stop], key=self._key, prepare=self._prepare)

    def steps(self, batch_size: int) -> int:
        """Number of batches in one epoch."""
        return len(_bounds(len(self), batch_size))

    def epoch(
        self, epoch: int = 0, batch_size: int = 32, *, purpose: str = "train", shuffle: bool = True
    ) -> Iterator[Batch]:
        """Yield the batches of one epoch; the last may be smaller.

        A last batch of a single example is joined to the one before it: batch normalisation has no variance
        over one value. `purpose` names the random stream, so that a second pass over the data (a Fisher pass,
        say) does not change what training sees. Augmentation is drawn only for purposes that shuffle.
        """
        if batch_size < 1:
            raise ConfigError(f"batch_size must be at least 1, got {batch_size}")
        rng = generator(*self._key, purpose, epoch) if shuffle else None
        order = torch.randperm(len(self), generator=rng) if shuffle else torch.arange(len(self))
        for start, stop in _bounds(len(self), batch_size):
            index = order[start:stop]
            rows = self._indices[index]
            yield Batch(self._prepare(take(self._x, rows), rng), self._y[rows], index)


def _bounds(count: int, batch_size: int) -> list[tuple[int, int]]:
    bounds = [(start, min(start + batch_size, count)) for start in range(0, count, batch_size)]
    if len(bounds) > 1 and batch_size > 1 and bounds[-1][1] - bounds[-1][0] == 1:
        bounds[-2:] = [(bounds[-2][0], count)]
    return bounds
