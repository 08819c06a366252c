"""Values that are computed once as long as what they depend on stays the same."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode

ROOM = 512 * 2**20  # bytes of activations that one network keeps
CHUNK = 8


class Memo:
    """The last few values of a function of tensors, told apart by the tensors' identities and versions.

    A tensor's version counts its in-place changes, so an optimiser's step or `Net.bind` makes a value stale without
    anybody saying so. What a value depends on is kept beside it, so that no other tensor can take its address.
    """

    def __init__(self, size: int = 4):
        self.size = size
        self.kept: dict[Hashable, tuple[Any, tuple[Any, ...]]] = {}

    def __call__(self, key: Hashable, depends: Sequence[Any], make: Callable[[], Any]) -> Any:
        """The value of `make()`, from before where neither key nor what it depends on has changed.

        depends: tensors, and other objects that never change. While a graph is exported, tensors have no values: the
        newest value of this key is a constant of the graph.
        """
        if torch.compiler.is_exporting():
            return next(value for (known, _), (value, _) in reversed(self.kept.items()) if known == key)
        if recorded():
            return make()
        full = (key, tuple(map(_version, depends)))
        if full not in self.kept:
            with _disable_current_modes():  # a count of operations is of those that every example needs
                value = make()
            while len(self.kept) >= self.size:
                self.kept.pop(next(iter(self.kept)))
            self.kept[full] = (value, tuple(depends))
        return self.kept[full][0]


def recorded() -> bool:
    """Whether a graph of the operations is being made, for ONNX say: nothing can be looked up then."""
    return torch.jit.is_tracing() or torch.compiler.is_compiling() or torch.compiler.is_exporting()


def _version(value: Any) -> tuple[int, int]:
    return (value.data_ptr(), value._version) if isinstance(value, Tensor) else (id(value), 0)


class FrozenPrefix:
    """What a frozen part of a network makes of each example, found by the example's own bytes.

    The same picture without augmentation gives the same activations in every epoch, round and evaluation, whoever asks.
    Once `room` bytes are taken, further examples are computed each time. Pictures are computed eight at a time, the
    last few filled up with zeros: kernels choose by shapes, so the result does not depend on what was asked before.
    """

    def __init__(self, part: Callable[[Tensor], Tensor], room: int = ROOM):
        self.part, self.room, self.used = part, room, 0
        self.kept: dict[bytes, Tensor] = {}

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        """`part(x)` without gradient, row by row from memory where it was computed before; on the CPU.

        Where operations are recorded or counted, all of them are carried out.
        """
        if recorded() or _get_current_dispatch_mode() is not None:
            return self.part(x)
        keys = [_digest(row) for row in x]
        new = {key: i for i, key in enumerate(keys) if key not in self.kept}
        made = dict(zip(new, self._computed(x[list(new.values())]), strict=True)) if new else {}
        found = torch.stack([made[key] if key in made else self.kept[key] for key in keys])
        for key, value in made.items():
            self._keep(key, value)
        return found

    def _computed(self, x: Tensor) -> Tensor:
        parts = []
        for rows in x.split(CHUNK):
            short = CHUNK - len(rows)
            filled = torch.cat([rows, rows.new_zeros(short, *rows.shape[1:])]) if short else rows
            parts.append(self.part(filled)[: len(rows)])
        return torch.cat(parts)

    def _keep(self, key: bytes, value: Tensor) -> None:
        size = value.numel() * value.element_size()
        if self.used + size <= self.room:
            self.kept[key] = value.clone()
            self.used += size


def _digest(x: Tensor) -> bytes:
    return hashlib.blake2b(x.contiguous().numpy().data, digest_size=16).digest()
