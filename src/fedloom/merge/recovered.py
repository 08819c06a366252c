"""Parts of a model completed by the server's values, for means in which every client has every entry."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from fedloom.core.errors import PayloadError
from fedloom.core.tree import Tensors

Positions = Sequence[Tensor | None]


@dataclass(frozen=True, eq=False)
class Recovered(Mapping[str, Tensor]):
    """w * M + W * (1 - M), one tensor at a time: the client's part w in the server's tensor W.

    part: the client's tensors. index: name -> the positions along each dimension that the part holds, None for all of
    them, fewer than there are dimensions leaving the others whole; None for a tensor that is sent whole. old: W. who:
    the client, for messages. Reading a tensor makes it anew; `PayloadError` where shapes do not fit.
    """

    part: Tensors
    index: Callable[[str], Positions | None]
    old: Tensors
    who: object

    def __getitem__(self, name: str) -> Tensor:
        value, old = self.part[name].detach(), self.old[name]
        positions = tuple(self.index(name) or ())
        positions += (None,) * (old.dim() - len(positions))
        shape = tuple(n if at is None else len(at) for n, at in zip(old.shape, positions, strict=True))
        if tuple(value.shape) != shape or value.dtype != old.dtype:
            raise PayloadError(
                f"client {self.who}: '{name}' is {value.dtype} {tuple(value.shape)}, and what it has kept of the "
                f"server's is {old.dtype} {shape}"
            )
        return _put(old, positions, value)

    def __iter__(self) -> Iterator[str]:
        return iter(self.part)

    def __len__(self) -> int:
        return len(self.part)


def _put(old: Tensor, positions: Positions, value: Tensor) -> Tensor:
    """A copy of `old` with the outer product of the positions replaced."""
    named = [dim for dim, at in enumerate(positions) if at is not None]
    if not named:
        return value
    first = named[0]
    at = positions[first]
    assert at is not None
    rest = tuple(None if dim <= first else p for dim, p in enumerate(positions))
    return old.index_copy(first, at, _put(old.index_select(first, at), rest, value))
