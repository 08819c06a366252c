"""Merging different parts of a tree in different ways."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from fedloom.core.errors import ConfigError
from fedloom.core.tree import Tensors


class Merge(Protocol):
    """(trees, weights, old) -> the names of old; who: client ids for messages. `weighted_mean` is one."""

    def __call__(
        self, trees: Sequence[Tensors], weights: Sequence[float], old: Tensors, *, who: Sequence[object] | None = None
    ) -> Mapping[str, Tensor]:
        """Merge the trees."""
        ...


class Selected(Mapping[str, Tensor]):
    """The tree cut to some of its names; tensors are still read only when asked for."""

    def __init__(self, tree: Tensors, names: Collection[str]):
        self._tree, self._names = tree, frozenset(names)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._tree[name]

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._tree if name in self._names)

    def __len__(self) -> int:
        return sum(1 for _ in self)


@dataclass(frozen=True)
class ByPrefix:
    """A merge made of merges: each name goes to the longest prefix that it starts with.

    parts: (prefix, merge) pairs; the prefix "" catches the rest. Raises `ConfigError` for a name of the server's
    tree without a prefix.
    """

    parts: tuple[tuple[str, Merge], ...]

    def __post_init__(self) -> None:
        prefixes = [prefix for prefix, _ in self.parts]
        if len(set(prefixes)) != len(prefixes):
            raise ConfigError(f"merge prefixes must differ, got {prefixes}")

    def __call__(
        self, trees: Sequence[Tensors], weights: Sequence[float], old: Tensors, *, who: Sequence[object] | None = None
    ) -> dict[str, Tensor]:
        """Merge each part with its own merge; the result has the names of `old` in their order."""
        merged: dict[str, Tensor] = {}
        for prefix, merge in self.parts:
            # names that the server lacks are kept in the cut, so that the merge refuses them
            mine = [Selected(tree, [name for name in tree if self._prefix(name) == prefix]) for tree in trees]
            merged.update(merge(mine, weights, {n: old[n] for n in old if self._prefix(n) == prefix}, who=who))
        return {name: merged[name] for name in old}

    def _prefix(self, name: str) -> str:
        found = [prefix for prefix, _ in self.parts if name.startswith(prefix)]
        if not found:
            raise ConfigError(f"no merge for '{name}': add the prefix '' for the rest")
        return max(found, key=len)
