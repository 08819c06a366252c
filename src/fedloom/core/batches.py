"""A client's data as a plan of batches, drawn outside the method.

The order of examples and the augmentation are functions of `(seed, stage, round, client, purpose, epoch)`, so
every engine, and every repetition of a client's work, sees the same batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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


class Visits:
    """How many examples were handed out: `count` to train on, `passes` to look at (a Fisher, features, class means).

    Training shuffles, passes do not.
    """

    def __init__(self) -> None:
        self.count = self.passes = 0

    def add(self, examples: int, *, training: bool) -> None:
        """Count some more."""
        if training:
            self.count += examples
        else:
            self.passes += examples


class Batches:
    """The examples of one client (or of one test set) at one stage and round.

    x: stored inputs of the whole source, indexable by rows; y: int64 class ids of the whole source.
    indices: which rows belong here. key: prefix of the random streams.
    prepare: stored inputs -> model inputs; its second argument is a generator when augmentation may be drawn,
    None for evaluation. quota: examples of a shuffled epoch, None for every one once; epochs then go on through pass
    after pass over all examples, each shuffled anew. visits: counts what is handed out; parts of a whole share one.
    domains: int64 domain ids of the whole source, None where the data have no domains.
    """

    def __init__(
        self,
        x: Inputs,
        y: Tensor,
        indices: Tensor,
        *,
        key: tuple[Key, ...],
        prepare: Prepare,
        quota: int | None = None,
        visits: Visits | None = None,
        domains: Tensor | None = None,
    ):
        if quota is not None and quota < 0:
            raise ConfigError(f"quota must be at least 0 examples, got {quota}")
        self._x, self._y, self._indices = x, y, indices
        self._key, self._prepare, self._quota = key, prepare, quota
        self._domains = domains
        self.visits = visits or Visits()

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

    @property
    def domains(self) -> Tensor | None:
        """Domain id of every example, int64 [num_examples]; None where the data have no domains."""
        return None if self._domains is None else self._domains[self._indices]

    def part(self, start: int, stop: int) -> Batches:
        """The examples from `start` up to `stop`, in their stored order."""
        return self.subset(torch.arange(len(self))[start:stop])

    def subset(self, index: Tensor) -> Batches:
        """The examples at some positions (int64), in that order."""
        return self._like(self._x, self._y, self._indices[index], domains=self._domains)

    def by_domain(self) -> dict[int, Batches]:
        """Domain id -> the examples of that domain, for the domains that occur here, ascending.

        Raises `ConfigError` where the data have no domains.
        """
        if self._domains is None:
            raise ConfigError("the data have no domain labels; name their column with data.domain")
        ids = self._domains[self._indices]
        return {k: self.subset((ids == k).nonzero().flatten()) for k in sorted(set(ids.tolist()))}

    def stored(self, index: Tensor) -> tuple[Inputs, Tensor]:
        """Inputs as they are stored (8-bit images stay 8-bit) and labels of some positions, to be kept."""
        rows = self._indices[index]
        return take(self._x, rows), self._y[rows]

    def with_quota(self, quota: int | None) -> Batches:
        """The same examples, `quota` of them in a shuffled epoch; `ConfigError` for less than 0."""
        return self._like(self._x, self._y, self._indices, quota, self._domains)

    def keyed(self, *key: Key) -> Batches:
        """The same examples with other random streams, told apart by `key`, and visits counted from 0."""
        key = (*self._key, *key)
        return Batches(self._x, self._y, self._indices, key=key, prepare=self._prepare, domains=self._domains)

    def joined(self, x: Inputs, y: Tensor, quota: int | None = None) -> Batches:
        """These examples followed by others; `quota` of all of them in a shuffled epoch, None for every one.

        x, y: as `stored` gives them; `ConfigError` for inputs of another kind, such as prepared ones. The domains of
        the others are not known, so the result has none.
        """
        own_x, own_y = self.stored(torch.arange(len(self)))
        labels = torch.cat([own_y, y])
        return self._like(_concatenated(own_x, x), labels, torch.arange(len(labels)), quota)

    def _like(
        self, x: Inputs, y: Tensor, indices: Tensor, quota: int | None = None, domains: Tensor | None = None
    ) -> Batches:
        return Batches(
            x, y, indices, key=self._key, prepare=self._prepare, quota=quota, visits=self.visits, domains=domains
        )

    def steps(self, batch_size: int) -> int:
        """Number of batches in one shuffled epoch."""
        return len(_bounds(self._per_epoch, batch_size))

    @property
    def _per_epoch(self) -> int:
        return len(self) if self._quota is None or not len(self) else self._quota

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
        order = self._order(epoch, purpose, rng)
        for start, stop in _bounds(len(order), batch_size):
            index = order[start:stop]
            rows = self._indices[index]
            self.visits.add(len(index), training=shuffle)
            yield Batch(self._prepare(take(self._x, rows), rng), self._y[rows], index)

    def _order(self, epoch: int, purpose: str, rng: torch.Generator | None) -> Tensor:
        if rng is None:
            return torch.arange(len(self))
        if self._quota is None or not len(self):
            return torch.randperm(len(self), generator=rng)
        start, parts = epoch * self._quota, []
        for number in range(start // len(self), -(-(start + self._quota) // len(self))):
            shuffled = generator(*self._key, purpose, "pass", number)
            parts.append(torch.randperm(len(self), generator=shuffled))
        skipped = start % len(self)
        return torch.cat(parts or [torch.arange(0)])[skipped : skipped + self._quota]


def pooled(parts: Sequence[Batches]) -> Batches:
    """The examples of several clients of one source as one client's; an example that several hold counts once.

    Raises `ConfigError` where they are not rows of one data set. The random streams are those of the first.
    """
    first = parts[0]
    if any(part._x is not first._x or part._y is not first._y for part in parts):
        raise ConfigError("clients' data can be pooled only where they are rows of one data set")
    rows = torch.unique(torch.cat([part._indices for part in parts]))
    return Batches(first._x, first._y, rows, key=first._key, prepare=first._prepare, domains=first._domains)


def _concatenated(first: Inputs, second: Inputs) -> Inputs:
    if isinstance(first, Tensor) and isinstance(second, Tensor) and first.dtype == second.dtype:
        return torch.cat([first, second])
    if isinstance(first, Mapping) and isinstance(second, Mapping) and first.keys() == second.keys():
        return {name: torch.cat([first[name], second[name]]) for name in first}
    raise ConfigError(f"examples are joined as they are stored ({_kind(first)}), got {_kind(second)}; keep those")


def _kind(x: Inputs) -> str:
    return str(x.dtype) if isinstance(x, Tensor) else f"a mapping of {sorted(x)}"


def _bounds(count: int, batch_size: int) -> list[tuple[int, int]]:
    bounds = [(start, min(start + batch_size, count)) for start in range(0, count, batch_size)]
    if len(bounds) > 1 and batch_size > 1 and bounds[-1][1] - bounds[-1][0] == 1:
        bounds[-2:] = [(bounds[-2][0], count)]
    return bounds
