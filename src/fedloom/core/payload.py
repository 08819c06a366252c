"""Payloads: field -> name -> tensor. Server state, client state and messages all have this shape.

Class growth: heads have a fixed width and rows of classes not seen yet are frozen at their initial value, so
they are neither counted nor sent. `ClassRows` says which tensors have such rows and along which dimension;
`narrow` cuts a payload to the rows that travel and `widen` puts it back.
"""

from __future__ import annotations

import cmath
import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from fedloom.core.errors import PayloadError
from fedloom.core.tree import Tensors

Payload = Mapping[str, Tensors]
ClassRows = Mapping[tuple[str, str], int]

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by width in bytes
ALIGNMENT = 64  # bytes; what torch's CPU allocator gives, and kernels pick other paths for less


def canonical(tensor: Tensor) -> Tensor:
    """Return the tensor detached, contiguous and 64-byte aligned; a copy only where it is not so already.

    safetensors and Flower hand out misaligned or Fortran-ordered tensors, and kernels then give other bits.
    """
    tensor = tensor.detach()
    if tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def canonical_payload(payload: Payload) -> dict[str, dict[str, Tensor]]:
    """Apply `canonical` to every tensor."""
    return {field: {name: canonical(t) for name, t in tree.items()} for field, tree in payload.items()}


def items(payload: Payload) -> Iterator[tuple[str, str, Tensor]]:
    """Yield (field, name, tensor), sorted by field and name."""
    for field in sorted(payload):
        for name in sorted(payload[field]):
            yield field, name, payload[field][name]


def raw_bytes(tensor: Tensor) -> Tensor:
    """View a contiguous CPU copy of the tensor as uint8, any dtype and rank."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if flat.stride(0) != 1:  # up to one entry, torch calls any stride contiguous
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def digest(payload: Payload) -> str:
    """SHA-256 over sorted fields and names, dtypes, shapes and bytes."""
    sha = hashlib.sha256()
    for field, name, tensor in items(payload):
        sha.update(f"{field}\x1f{name}\x1f{tensor.dtype}\x1f{tuple(tensor.shape)}\x1e".encode())
        sha.update(raw_bytes(tensor).numpy().data)
    return sha.hexdigest()


def nbytes(payload: Payload, rows: ClassRows | None = None, seen: Collection[int] | None = None) -> int:
    """Bytes of all tensors; with `rows` and `seen`, only the class rows that travel are counted."""
    total = 0
    for field, name, tensor in items(payload):
        size = tensor.numel() * tensor.element_size()
        dim = rows.get((field, name)) if rows else None
        if dim is not None and seen is not None and tensor.shape[dim] > 0:
            size = size // tensor.shape[dim] * len(seen)
        total += size
    return total


def narrow(payload: Payload, rows: ClassRows, seen: Sequence[int]) -> dict[str, dict[str, Tensor]]:
    """Keep only the rows of the seen classes in tensors that have class rows."""

    def cut(field: str, name: str, tensor: Tensor) -> Tensor:
        dim = rows.get((field, name))
        return tensor if dim is None else take_rows(tensor, dim, seen)

    return {f: {n: cut(f, n, t) for n, t in tree.items()} for f, tree in payload.items()}


def widen(payload: Payload, rows: ClassRows, seen: Sequence[int], fill: Payload) -> dict[str, dict[str, Tensor]]:
    """Undo `narrow`: unseen rows are taken from `fill` (their initial values, known to both sides)."""

    def grow(field: str, name: str, tensor: Tensor) -> Tensor:
        dim = rows.get((field, name))
        return tensor if dim is None else put_rows(fill[field][name], dim, seen, tensor)

    return {f: {n: grow(f, n, t) for n, t in tree.items()} for f, tree in payload.items()}


def take_rows(tensor: Tensor, dim: int, rows: Sequence[int]) -> Tensor:
    """Some rows of a tensor, of any dtype."""
    return tensor.detach().index_select(dim, torch.tensor(list(rows), dtype=torch.long, device=tensor.device))


def put_rows(start: Tensor, dim: int, rows: Sequence[int], values: Tensor) -> Tensor:
    """A copy of `start` with some rows replaced, of any dtype."""
    whole, idx = start.detach().clone(), torch.tensor(list(rows), dtype=torch.long, device=values.device)
    _bits(whole).index_copy_(dim, idx, _bits(values))
    return whole


def _bits(tensor: Tensor) -> Tensor:
    """Integers of the same width: torch can copy rows of all of these, and not of every other type."""
    return tensor.view(INTEGERS.get(tensor.element_size(), tensor.dtype))


def is_finite(tensor: Tensor) -> bool:
    """True when no entry is NaN or infinite. One pass over memory unless the plain sum overflows."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    if tensor.is_floating_point() and tensor.element_size() == 1:
        tensor = tensor.float()  # torch has no sum of these
    if tensor.is_complex() and tensor.element_size() == 4:
        tensor = torch.view_as_real(tensor)
    if tensor.numel() == 0 or cmath.isfinite(tensor.sum().item()):
        return True
    return bool(torch.isfinite(tensor).all())


def check_structure(payload: object, what: str) -> None:
    """Raise `PayloadError` unless the object is field -> name -> tensor."""
    if not isinstance(payload, Mapping):
        raise PayloadError(f"{what} must map fields to trees of tensors, got {type(payload).__name__}")
    for field, tree in payload.items():
        if not isinstance(field, str) or not field or "/" in field:
            raise PayloadError(f"{what}: a field's name must be text without '/', got {field!r}")
        if not isinstance(tree, Mapping):
            raise PayloadError(f"{what}[{field!r}] must map names to tensors, got {type(tree).__name__}")
        for name, tensor in tree.items():
            if not isinstance(name, str) or not isinstance(tensor, Tensor):
                raise PayloadError(f"{what}[{field!r}][{name!r}] must be a tensor, got {type(tensor).__name__}")


def check_like(up: Payload, template: Payload, ragged: Collection[str] = ()) -> None:
    """Compare an upload with the server's tensors of the same field and name, before any arithmetic.

    A missing name means "not mine". A field that the server does not hold is left to the method. `ragged`
    lists fields whose tensors may have other shapes (sub-networks); their dtypes are still checked.
    Raises `PayloadError` naming field, name and both shapes or dtypes.
    """
    for field in up.keys() & template.keys():
        for name, tensor in up[field].items():
            if name not in template[field]:
                raise PayloadError(f"'{field}/{name}' is not a tensor that the server holds")
            want = template[field][name]
            if tensor.dtype != want.dtype:
                raise PayloadError(f"'{field}/{name}' has dtype {tensor.dtype}, expected {want.dtype}")
            if field not in ragged and tensor.shape != want.shape:
                raise PayloadError(f"'{field}/{name}' has shape {tuple(tensor.shape)}, expected {tuple(want.shape)}")


def check_finite(up: Payload) -> None:
    """Raise `PayloadError` naming the first tensor that holds NaN or infinity."""
    if (bad := not_finite(up)) is not None:
        raise PayloadError(f"'{bad}' holds NaN or infinite values")


def not_finite(payload: Payload) -> str | None:
    """The first tensor that holds NaN or infinity, as "field/name", or None."""
    return next((f"{field}/{name}" for field, name, tensor in items(payload) if not is_finite(tensor)), None)
