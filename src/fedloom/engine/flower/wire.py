"""Payloads as Flower's records: one `ArrayRecord` per payload and field, and an index of what they do not say.

Every array is a plain `.npy` file, so any Flower app can read it; no pickle is ever made or read. Types that
NumPy lacks (bfloat16, the 8-bit floats) travel as integers of the same width, and the index names the type. A
tensor that stands in several payloads of a message travels once. Of tensors with class rows only the rows of the
seen classes travel, where the others are the initial values that both sides know (see `Cut`).
"""

from __future__ import annotations

import functools
import io
import json
import math
import warnings
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

from fedloom.core import Payload, PayloadError
from fedloom.core.payload import INTEGERS, ClassRows, canonical, put_rows, raw_bytes, take_rows

PROTOCOL = 2  # of what crosses the wire; both sides must speak the same
HEADER, NPY = "fedloom", "numpy.ndarray"

with warnings.catch_warnings():  # torch warns once about views of bytes (ours are only read) and of half complex
    warnings.simplefilter("ignore")
    torch.frombuffer(b"\0", dtype=torch.uint8)
    torch.empty(0, dtype=torch.complex32)


class Cut(NamedTuple):
    """Which rows travel. initial: the tensors with class rows before the first round; both sides have the same."""

    rows: ClassRows
    seen: Sequence[int]
    initial: Payload

    def narrow(self, field: str, name: str, tensor: Tensor) -> Tensor | None:
        """The rows that travel; None when all must, since another row has moved."""
        dim, start = self.rows.get((field, name)), self.initial.get(field, {}).get(name)
        if dim is None or start is None or start.shape != tensor.shape or start.dtype != tensor.dtype:
            return None
        others = [k for k in range(tensor.shape[dim]) if k not in self.seen]
        if not others or not all(0 <= k < tensor.shape[dim] for k in self.seen):
            return None
        if not torch.equal(raw_bytes(take_rows(tensor, dim, others)), raw_bytes(take_rows(start, dim, others))):
            return None
        return take_rows(tensor, dim, self.seen)

    def widen(self, field: str, name: str, tensor: Tensor) -> Tensor:
        """Put the rows back; `PayloadError` when they do not fit."""
        dim, start = self.rows.get((field, name)), self.initial.get(field, {}).get(name)
        if dim is None or start is None:
            raise PayloadError(f"'{field}/{name}' came as rows of classes, and it has none")
        want = (*start.shape[:dim], len(self.seen), *start.shape[dim + 1 :])
        if tensor.shape != want or tensor.dtype != start.dtype:
            raise PayloadError(
                f"'{field}/{name}' has {tensor.dtype} of shape {tuple(tensor.shape)}, expected {start.dtype} of {want}"
            )
        return put_rows(start, dim, self.seen, tensor)


class Packer:
    """Makes the records of messages; one that lives through an exchange encodes a tensor once for all of them.

    What it encoded is kept for as long as the tensor lives, so a client's own download goes when its letter has left.
    """

    def __init__(self, cut: Cut | None = None):
        self._cut = cut
        self._made: dict[tuple[int, str, str], tuple[weakref.ref[Tensor], Array, str | None, bool]] = {}

    def pack(self, payloads: Mapping[str, Payload]) -> tuple[dict[str, ArrayRecord], dict[str, Any]]:
        """(records by `key/field`, index) of payloads by key; keys hold no '/'."""
        records: dict[str, ArrayRecord] = {}
        index: dict[str, Any] = {"fields": {}, "same": {}, "dtypes": {}, "rows": []}
        placed: dict[tuple[int, str, str], tuple[str, Tensor]] = {}
        for key, payload in payloads.items():
            index["fields"][key] = sorted(payload)
            for field in sorted(payload):
                arrays: dict[str, Array] = {}
                for name in sorted(payload[field]):
                    tensor, where = payload[field][name], f"{key}/{field}/{name}"
                    found, _ = placed.setdefault((id(tensor), field, name), (where, tensor))
                    if found != where:
                        index["same"][where] = found
                        continue
                    arrays[name], dtype, short = self._encode(field, name, tensor)
                    if dtype is not None:
                        index["dtypes"][where] = dtype
                    if short:
                        index["rows"].append(where)
                records[f"{key}/{field}"] = ArrayRecord(arrays)
        return records, index

    def _encode(self, field: str, name: str, tensor: Tensor) -> tuple[Array, str | None, bool]:
        key = (id(tensor), field, name)
        found = self._made.get(key)
        if found is None or found[0]() is not tensor:
            short = None if self._cut is None else self._cut.narrow(field, name, tensor)
            array, dtype = encode(tensor if short is None else short)
            found = weakref.ref(tensor, lambda _: self._made.pop(key, None)), array, dtype, short is not None
            self._made[key] = found
        return found[1:]


def unpack(content: RecordDict, index: Any, cut: Cut | None = None) -> dict[str, dict[str, dict[str, Tensor]]]:
    """Payloads by key. Tensors are views of the message's bytes: only to be read, and misaligned.

    Raises `PayloadError` for whatever was not made by `Packer.pack`; nothing in it is trusted.
    """
    fields, same, dtypes, rows = _index(index)
    found: dict[str, Tensor] = {}
    payloads: dict[str, dict[str, dict[str, Tensor]]] = {}
    for key, names in fields.items():
        payloads[key] = {}
        for field in names:
            record = content.get(f"{key}/{field}")
            if not isinstance(record, ArrayRecord):
                raise PayloadError(f"the field '{field}' was announced and did not come")
            tree = payloads[key][field] = {}
            for name, array in record.items():
                where = f"{key}/{field}/{name}"
                tensor = decode(array, dtypes.get(where), f"{field}/{name}")
                if where in rows:
                    if cut is None:
                        raise PayloadError(f"'{field}/{name}' came as rows of classes, which were not agreed on")
                    tensor = cut.widen(field, name, tensor)
                tree[name] = found[where] = tensor
    for where, first in same.items():
        parts = where.split("/", 2)
        if first not in found or len(parts) != 3 or parts[1] not in payloads.get(parts[0], {}):
            raise PayloadError(f"'{where[:200]}' refers to a tensor that did not come")
        payloads[parts[0]][parts[1]][parts[2]] = found[first]
    return payloads


def check_announced(content: RecordDict, indices: Iterable[Any]) -> None:
    """Raise `PayloadError` when a message holds an array record that none of its indices names."""
    named = {f"{key}/{field}" for index in indices for key, names in _index(index)[0].items() for field in names}
    if extra := arrays_of(content).keys() - named:
        raise PayloadError(f"the field '{min(extra)[:200]}' came and was not announced")


def _index(index: Any) -> tuple[dict[str, list[str]], dict[str, str], dict[str, str], Collection[str]]:
    try:
        fields, same, dtypes, rows = (index[key] for key in ("fields", "same", "dtypes", "rows"))
        texts = [*same.values(), *dtypes.values(), *rows, *(name for names in fields.values() for name in names)]
    except (KeyError, TypeError, AttributeError):
        raise PayloadError("the index of the message is damaged") from None
    if not all(isinstance(text, str) for text in texts) or any("/" in key for key in fields):
        raise PayloadError("the index of the message is damaged")
    return fields, same, dtypes, frozenset(rows)


def encode(tensor: Tensor) -> tuple[Array, str | None]:
    """(array, name of the torch type where NumPy has none); `PayloadError` for a tensor without plain memory."""
    native = _native(tensor.dtype)
    if tensor.layout is not torch.strided or (native is None and not _foreign(tensor.dtype)):
        raise PayloadError(f"a {tensor.layout} tensor of {tensor.dtype} cannot be sent; send dense tensors of numbers")
    kind = native or _native(INTEGERS[tensor.element_size()])
    head = io.BytesIO()
    described = {"descr": np.lib.format.dtype_to_descr(kind), "fortran_order": False, "shape": tuple(tensor.shape)}
    np.lib.format.write_array_header_1_0(head, described)
    data = b"".join((head.getvalue(), raw_bytes(tensor).numpy().data))
    name = None if native is not None else str(tensor.dtype).removeprefix("torch.")
    return Array(dtype=str(kind), shape=tuple(tensor.shape), stype=NPY, data=data), name


def decode(array: Array, dtype: str | None, what: str) -> Tensor:
    """The tensor of an array, a view of its bytes; `PayloadError` naming `what` when it is none."""
    if array.stype != NPY:
        raise PayloadError(f"'{what}' is stored as {array.stype[:80]!r}, expected {NPY!r}")
    try:
        return _decode(array.data, dtype)
    except Exception as error:  # NumPy, its parser and torch raise many kinds
        raise PayloadError(f"'{what}' is no readable array ({str(error)[:200]})") from error


def _decode(data: bytes, dtype: str | None) -> Tensor:
    stream = io.BytesIO(data)
    if np.lib.format.read_magic(stream) != (1, 0):
        raise ValueError("its format is none of ours")
    shape, fortran, kind = np.lib.format.read_array_header_1_0(stream)
    target = _torch(kind) if dtype is None else _named(dtype, kind)
    start, count = stream.tell(), math.prod(shape)
    if fortran or min(shape, default=0) < 0 or count * kind.itemsize != len(data) - start:
        raise ValueError(f"it holds {len(data) - start} bytes, which do not fit its shape {shape}")
    if count == 0:
        return torch.empty(shape, dtype=target)
    flat = torch.frombuffer(data, dtype=torch.uint8, count=len(data) - start, offset=start)
    if flat.data_ptr() % target.itemsize:
        flat = flat.clone()
    return flat.view(target).reshape(shape)


@functools.cache
def _native(dtype: torch.dtype) -> np.dtype[Any] | None:
    try:
        return torch.empty(0, dtype=dtype).numpy().dtype
    except (TypeError, RuntimeError):
        return None


@functools.cache
def _foreign(dtype: torch.dtype) -> bool:
    """Whether a type of numbers is one that NumPy lacks and that travels under its name."""
    return (dtype.is_floating_point or dtype.is_complex) and _native(dtype) is None


@functools.cache
def _torch(kind: np.dtype[Any]) -> torch.dtype:
    if kind.hasobject or not kind.isnative or kind.subdtype is not None:
        raise ValueError(f"its type is {kind}")
    return torch.from_numpy(np.empty(0, kind)).dtype


def _named(name: str, kind: np.dtype[Any]) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or not _foreign(found) or kind != _native(INTEGERS[found.itemsize]):
        raise ValueError(f"its type is said to be {name[:80]!r}, and it holds {kind}")
    return found


def owned(payload: Payload) -> dict[str, dict[str, Tensor]]:
    """A copy in memory of its own, aligned as kernels expect it."""
    return {field: {name: canonical(t.clone()) for name, t in tree.items()} for field, tree in payload.items()}


def message(header: Mapping[str, Any], records: Mapping[str, Any]) -> RecordDict:
    """The content of a message."""
    text = json.dumps({"protocol": PROTOCOL, **header}, allow_nan=False)
    return RecordDict({HEADER: ConfigRecord({"header": text}), **records})


def header(content: RecordDict) -> dict[str, Any]:
    """The header of a message; `PayloadError` when there is none that this version understands."""
    record = content.get(HEADER)
    try:
        found = json.loads(record["header"])  # type: ignore[index]
        spoken = found["protocol"]
    except (TypeError, KeyError, ValueError, RecursionError) as error:
        raise PayloadError("a message without FedLoom's header came; something else answers for this node") from error
    if spoken != PROTOCOL:
        raise PayloadError(
            f"the other side speaks version {spoken!r} of the protocol and this one {PROTOCOL}; "
            "install the same version of fedloom everywhere"
        )
    return found


def weigh(content: RecordDict) -> tuple[int, int]:
    """(bytes of the tensors, bytes of what frames them: header, names, the heads of the arrays) of a message."""
    tensors = framing = 0
    for key, record in content.items():
        framing += len(key)
        if isinstance(record, ArrayRecord):
            heads = [10 + int.from_bytes(array.data[8:10], "little") for array in record.values()]
            tensors += sum(len(array.data) for array in record.values()) - sum(heads)
            framing += sum(heads) + sum(map(len, record))
        else:
            framing += sum(len(name) + (len(value) if isinstance(value, str) else 8) for name, value in record.items())
    return tensors, framing


def arrays_of(content: RecordDict) -> dict[str, ArrayRecord]:
    """The array records of a message.

    Flower's own `array_records` is a cycle, which keeps the message in memory until the next collection of garbage.
    """
    return {name: record for name, record in content.items() if isinstance(record, ArrayRecord)}
