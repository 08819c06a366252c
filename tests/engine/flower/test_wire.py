"""Payloads as Flower's records: bit for bit there and back."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("flwr")

from flwr.app import Array, RecordDict

from fedloom.core import PayloadError
from fedloom.core.payload import Payload, digest, items, narrow, nbytes, raw_bytes
from fedloom.engine.flower import wire
from fedloom.engine.flower.wire import Cut, Packer, check_announced, decode, encode, header, message, owned, unpack
from toys.grids import deflated

KNOWN = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32,
    torch.uint64, torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128,
]  # fmt: skip
FOREIGN = [
    torch.bfloat16, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu, torch.complex32,
]  # fmt: skip
FRAME = 128  # bytes before the values of an array of few dimensions


def bits(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Random bits as a tensor, NaN and all."""
    size = math.prod(shape) * dtype.itemsize
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (size,), generator=torch.Generator().manual_seed(seed))
    return raw.to(torch.uint8).view(dtype).reshape(shape) if size else torch.zeros(shape, dtype=dtype)


def same(a: Payload, b: Payload) -> bool:
    """Equal fields (also empty ones), names, types, shapes and bits."""
    shapes = [[(f, n, t.dtype, t.shape) for f, n, t in items(payload)] for payload in (a, b)]
    return sorted(a) == sorted(b) and shapes[0] == shapes[1] and digest(a) == digest(b)


def proto(content: RecordDict) -> RecordDict:
    """A message's content through one protobuf."""
    serde = pytest.importorskip("flwr.common.serde")
    return serde.recorddict_from_proto(
        type(sent := serde.recorddict_to_proto(content)).FromString(sent.SerializeToString())
    )


WAYS = {"as it is": lambda content: content, "deflated": deflated, "proto": proto}


def travel(payloads: Mapping[str, Payload], cut: Cut | None = None, way: str = "as it is") -> dict[str, Any]:
    """Payloads after packing, a message, a way and unpacking."""
    records, index = Packer(cut).pack(payloads)
    came = WAYS[way](message({"index": index}, records))
    check_announced(came, [header(came)["index"]])
    return unpack(came, header(came)["index"], cut)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Any type, rank 0 to 5, empty ones too, in any memory order."""
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=5)))
    tensor = bits(draw(st.sampled_from(KNOWN + FOREIGN)), shape, draw(st.integers(0, 99)))
    kind = draw(st.sampled_from(["plain", "fortran", "permuted", "strided", "expanded"]))
    if kind == "fortran" and len(shape) > 1:
        order = list(range(len(shape)))[::-1]
        return tensor.permute(order).contiguous().permute(order)
    if kind == "permuted":
        return tensor.permute(draw(st.permutations(range(len(shape)))))
    if kind == "strided" and shape:
        return torch.cat([tensor, tensor])[::2]
    return tensor.expand(2, *shape) if kind == "expanded" else tensor


NAMES = st.text(min_size=1, max_size=12)
FIELDS = NAMES.filter(lambda name: "/" not in name)
ODD = ["a.b.c", "a/b", "/", "//", "0/params/w", "größe", "重み", "🙂", "'\"\\", "\x00", " ", "fields", "same"]
PAYLOADS = st.dictionaries(
    st.one_of(FIELDS, st.sampled_from(["params", "metrics", "header"])),
    st.dictionaries(st.one_of(NAMES, st.sampled_from(ODD)), tensors(), max_size=3),
    max_size=3,
)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from(["0", "1", "17"]), PAYLOADS, max_size=3), st.sampled_from(sorted(WAYS)))
def test_any_payload_comes_back_bit_for_bit(payloads: dict[str, Payload], way: str):
    came = travel(payloads, way=way)
    assert came.keys() == payloads.keys()
    assert all(same(came[key], payloads[key]) for key in payloads)
    assert all(same(owned(came[key]), payloads[key]) for key in payloads)


@pytest.mark.parametrize("way", sorted(WAYS))
@pytest.mark.parametrize("dtype", KNOWN + FOREIGN, ids=str)
def test_every_type_and_rank(dtype: torch.dtype, way: str):
    shapes = [(), (1,), (3,), (0,), (2, 3), (0, 3), (3, 0), (2, 1, 3), (1, 2, 3, 2), (2, 1, 2, 1, 2)]
    payload = {"f": {str(k): bits(dtype, shape, k) for k, shape in enumerate(shapes)}}
    assert same(travel({"0": payload}, way=way)["0"], payload)


@pytest.mark.parametrize("dtype", KNOWN, ids=str)
def test_flower_reads_what_numpy_knows(dtype: torch.dtype):
    for shape in ((), (0, 2), (2, 3)):
        tensor = bits(dtype, shape)
        array, name = encode(tensor)
        assert name is None and array.dtype == str(tensor.numpy().dtype) and array.shape == shape
        assert array.numpy().tobytes() == tensor.numpy().tobytes() and array.numpy().shape == shape
        assert torch.equal(raw_bytes(decode(Array(tensor.numpy()), None, "w")), raw_bytes(tensor)), "and back"


@pytest.mark.parametrize("dtype", FOREIGN, ids=str)
def test_flower_reads_the_rest_as_integers_of_the_same_width(dtype: torch.dtype):
    array, name = encode(bits(dtype, (2, 3)))
    assert array.numpy().dtype == f"int{8 * dtype.itemsize}" and getattr(torch, name) == dtype


def test_a_learned_tensor_and_one_that_is_a_view_of_another():
    whole = torch.arange(12.0, requires_grad=True)
    payload = {"f": {"part": whole[3:7], "all": whole}}
    assert same(travel({"0": payload})["0"], payload)


@pytest.mark.parametrize("way", sorted(WAYS))
def test_a_tensor_in_several_payloads_travels_once(way: str):
    big, own = torch.randn(1000), torch.randn(3)
    payloads = {"0": {"params": {"w": big}}, "1": {"params": {"w": big, "own": own}}, "2": {"params": {"w": own}}}
    records, index = Packer().pack(payloads)
    assert index["same"] == {"1/params/w": "0/params/w"}
    tensors, framing = wire.weigh(RecordDict(records))
    assert tensors == 4 * 1000 + 2 * 4 * 3 and 3 * FRAME < framing < 3 * FRAME + 100
    came = travel(payloads, way=way)
    assert all(same(came[key], payloads[key]) for key in payloads)
    assert came["0"]["params"]["w"] is came["1"]["params"]["w"]


def test_a_packer_encodes_a_tensor_once_and_packs_another_one_that_is_equal():
    packer, tensor = Packer(), torch.ones(3)
    first, second = (packer.pack({"0": {"f": {"w": tensor}}})[0]["0/f"]["w"] for _ in range(2))
    assert first.data is second.data
    assert packer.pack({"0": {"f": {"w": tensor.clone()}}})[0]["0/f"]["w"].data is not first.data


def test_trees_that_make_their_tensors_when_they_are_asked():
    """A tensor that is gone may leave its identity to the next one."""

    class Lazy(Mapping):
        def __init__(self, value: float):
            self.value = value

        def __getitem__(self, name: str) -> Tensor:
            return torch.full((3,), self.value)

        def __iter__(self):
            return iter(["w"])

        def __len__(self) -> int:
            return 1

    came = travel({str(k): {"f": Lazy(float(k))} for k in range(20)})
    assert [came[str(k)]["f"]["w"].tolist() for k in range(20)] == [[float(k)] * 3 for k in range(20)]


def test_what_was_encoded_goes_with_its_tensor():
    packer, tensor = Packer(), torch.ones(3)
    first = packer.pack({"0": {"f": {"w": tensor}}})[0]["0/f"]["w"].data
    before = [sys.getrefcount(first)]
    packer.pack({"0": {"f": {"w": torch.zeros(3)}}})
    before.append(sys.getrefcount(first))
    del tensor
    assert before[0] == before[1] == sys.getrefcount(first) + 1


@pytest.mark.parametrize("payloads", [{}, {"0": {}}, {"0": {"f": {}}}, {"0": {"f": {}, "g": {}}, "1": {}}])
@pytest.mark.parametrize("way", sorted(WAYS))
def test_emptiness_is_kept(payloads: dict[str, Payload], way: str):
    assert travel(payloads, way=way) == payloads


def test_owned_tensors_are_aligned_and_apart_from_the_message():
    payload = {"f": {"w": torch.randn(5, 3), "b": torch.tensor(1.0)}}
    came = travel({"0": payload})["0"]
    for name, tensor in owned(came)["f"].items():
        assert tensor.data_ptr() % 64 == 0 and tensor.is_contiguous()
        assert tensor.data_ptr() != came["f"][name].data_ptr()


UNSENDABLE = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "quantised": lambda: torch.zeros(2, dtype=torch.int8).view(torch.qint8),
    "without meaning": lambda: torch.zeros(2, dtype=torch.uint8).view(torch.bits8),
}


@pytest.mark.filterwarnings("ignore:torch.quantize")
@pytest.mark.parametrize("kind", UNSENDABLE)
def test_what_are_no_plain_numbers_is_refused(kind: str):
    with pytest.raises(PayloadError, match=r"cannot be sent; send dense tensors of numbers"):
        Packer().pack({"0": {"f": {"w": UNSENDABLE[kind]()}}})


# Class rows.

ROWED = [*KNOWN, *FOREIGN]


def rows(dtype: torch.dtype, dim: int, seen: tuple[int, ...] = (1, 3)) -> tuple[Cut, Tensor]:
    """A cut over 5 classes, and a tensor in which only seen rows have moved."""
    shape = (5, 2, 3) if dim == 0 else (2, 5, 3)
    start, moved = bits(dtype, shape, 1), bits(dtype, shape, 2)
    picked = [moved.select(dim, k) if k in seen else start.select(dim, k) for k in range(5)]
    tensor = torch.stack([t.view(torch.uint8) for t in picked], dim).view(dtype)
    return Cut({("params", "w"): dim}, seen, {"params": {"w": start}}), tensor


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("dtype", ROWED, ids=str)
def test_only_seen_rows_travel_and_all_come_back(dtype: torch.dtype, dim: int):
    cut, tensor = rows(dtype, dim)
    short = cut.narrow("params", "w", tensor)
    assert short.shape[dim] == 2 and short.numel() * 5 == tensor.numel() * 2
    assert torch.equal(raw_bytes(cut.widen("params", "w", short)), raw_bytes(tensor))
    payload = {"params": {"w": tensor, "b": torch.ones(2)}}
    for way in WAYS:
        assert same(travel({"0": payload}, cut, way)["0"], payload)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(ROWED), st.integers(0, 1), st.sets(st.integers(0, 4)), st.sets(st.integers(0, 4)))
def test_whatever_has_moved_the_cut_loses_nothing(dtype: torch.dtype, dim: int, seen: set[int], moved: set[int]):
    """A moved row of an unseen class makes the whole tensor travel."""
    cut, tensor = rows(dtype, dim, tuple(sorted(moved)))
    cut = cut._replace(seen=tuple(sorted(seen)))
    before = [raw_bytes(t.select(dim, k)) for t in (tensor, cut.initial["params"]["w"]) for k in range(5)]
    whole = any(not torch.equal(before[k], before[5 + k]) for k in range(5) if k not in seen) or len(seen) == 5
    assert (cut.narrow("params", "w", tensor) is None) == whole
    payload = {"params": {"w": tensor}}
    assert same(travel({"0": payload}, cut)["0"], payload)


def test_bytes_that_travel_are_those_that_are_counted():
    cut, tensor = rows(torch.float32, 0)
    payload = {"params": {"w": tensor, "b": torch.ones(7)}}
    records, _ = Packer(cut).pack({"0": payload})
    sent, framing = wire.weigh(RecordDict(records))
    assert 2 * FRAME < framing < 2 * FRAME + 100
    assert sent == nbytes(payload, cut.rows, cut.seen) == nbytes(narrow(payload, cut.rows, cut.seen))


def test_tensors_that_are_not_as_they_began_travel_whole():
    cut, tensor = rows(torch.float32, 0)
    assert cut.narrow("params", "v", tensor) is None, "a name that is unknown"
    assert cut.narrow("other", "w", tensor) is None
    assert cut.narrow("params", "w", tensor[:, :1]) is None, "another shape"
    assert cut.narrow("params", "w", tensor.double()) is None, "another type"
    assert cut._replace(seen=(0, 9)).narrow("params", "w", tensor) is None, "a class beyond the rows"
    negative = tensor.clone()
    negative[0], cut.initial["params"]["w"][0] = -0.0, 0.0
    assert cut.narrow("params", "w", negative) is None, "-0.0 is not 0.0"
    cut.initial["params"]["w"][0] = negative[0] = float("nan")
    assert cut.narrow("params", "w", negative).shape[0] == 2, "equal NaN are equal"


def test_rows_that_do_not_fit_are_refused():
    cut, tensor = rows(torch.float32, 0)
    for wrong in (tensor[:3], tensor[:2, :1], tensor[:2].double()):
        with pytest.raises(PayloadError, match=r"'params/w' has torch.float.* of shape .*, expected torch.float32 of"):
            cut.widen("params", "w", wrong)
    with pytest.raises(PayloadError, match=r"'params/b' came as rows of classes, and it has none"):
        cut.widen("params", "b", tensor)
    records, index = Packer(cut).pack({"0": {"params": {"w": tensor}}})
    with pytest.raises(PayloadError, match="came as rows of classes, which were not agreed on"):
        unpack(RecordDict(records), index, None)
