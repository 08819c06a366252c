"""Whatever a message holds, the worst that comes of it is a refusal in words."""

from __future__ import annotations

import io
import json
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fedloom.core import PayloadError
from fedloom.engine.flower import wire
from fedloom.engine.flower.wire import Cut, Packer, check_announced, decode, header, message, unpack


def npy(value: np.ndarray, **changes: Any) -> bytes:
    """An `.npy` file whose header says something else than its values."""
    head = {"descr": np.lib.format.dtype_to_descr(value.dtype), "fortran_order": False, "shape": value.shape, **changes}
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, head)
    return stream.getvalue() + value.tobytes()


def raw(text: str, values: bytes = b"") -> bytes:
    """An `.npy` file with any text as its header."""
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode() + values


class Bomb:
    """Unpickling it would be seen."""

    went_off = False

    def __reduce__(self):
        return setattr, (Bomb, "went_off", True)


FOUR = np.arange(4, dtype=np.float32)
DAMAGED = {
    "nothing": b"",
    "no magic": b"garbage" * 20,
    "pickle": pickle.dumps(Bomb()),
    "version 2": npy(FOUR).replace(b"NUMPY\x01", b"NUMPY\x02"),
    "truncated header": npy(FOUR)[:40],
    "truncated values": npy(FOUR)[:-1],
    "more values": npy(FOUR) + b"\0",
    "huge shape": npy(FOUR, shape=(2**62, 2**62)),
    "long shape": npy(FOUR, shape=(10**30,)),
    "huge and empty": npy(FOUR[:0], shape=(0, 2**62, 2**62)),
    "negative": npy(FOUR, shape=(-4,)),
    "twice negative": npy(FOUR, shape=(-2, -2)),
    "negative and empty": npy(FOUR[:0], shape=(-1, 0)),
    "true": npy(FOUR[:1], shape=(True,)),
    "fraction": npy(FOUR, shape=(4.0,)),
    "fortran": npy(FOUR.reshape(2, 2), fortran_order=True),
    "big endian": npy(FOUR.astype(">f4")),
    "objects": npy(np.zeros(2, np.int64), descr="|O"),
    "pickled objects": npy(np.zeros(0), descr="|O", shape=(1,)) + pickle.dumps(np.array([Bomb()])),
    "structure": npy(np.zeros(2, np.dtype([("a", "<f4"), ("b", "<i4")]))),
    "structure of objects": npy(np.zeros(1, np.int64), descr=[("a", "|O")]),
    "inner shape": raw("{'descr': ('<f4', (2,)), 'fortran_order': False, 'shape': (2,), }", b"\0" * 16),
    "text": npy(np.array(["ab", "cd"])),
    "void": npy(np.zeros(2, np.dtype("V4"))),
    "times": npy(np.zeros(2, "datetime64[s]")),
    "long double": npy(np.zeros(1, np.longdouble)),
    "code": raw("__import__('os').getpid()"),
    "deep": raw("(" * 5000 + ")" * 5000),
    "no keys": raw("{}"),
    "unknown type": raw("{'descr': 'nonsense', 'fortran_order': False, 'shape': (1,), }", b"\0" * 8),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_array_is_refused_by_name_and_never_unpickled(kind: str):
    array = Array(dtype="float32", shape=(4,), stype="numpy.ndarray", data=DAMAGED[kind])
    with pytest.raises(PayloadError, match=r"'params/w' is no readable array \(.+\)$"):
        decode(array, None, "params/w")
    assert not Bomb.went_off


def test_what_the_record_says_of_an_array_counts_for_nothing():
    array = Array(dtype="object", shape=(9, 9), stype="numpy.ndarray", data=npy(FOUR))
    assert torch.equal(decode(array, None, "w"), torch.arange(4.0))
    with pytest.raises(PayloadError, match=r"'w' is stored as 'pickle', expected 'numpy.ndarray'"):
        decode(Array(dtype="float32", shape=(4,), stype="pickle", data=npy(FOUR)), None, "w")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("float32", "i4"), ("int32", "i4"), ("bfloat16", "i4"), ("bfloat16", "f2"), ("bfloat16", "O"), ("qint8", "i1"),
        ("bits8", "i1"), ("uint4", "i1"), ("float8_e4m3fn", "u1"), ("nn", "i1"), ("", "i1"), ("load", "i1"),
    ],
)  # fmt: skip
def test_a_type_that_is_said_to_be_another_is_refused(name: str, kind: str):
    data = npy(np.zeros(2, np.int64), descr="|O") if kind == "O" else npy(np.zeros(2, kind))
    with pytest.raises(PayloadError, match="is no readable array"):
        decode(Array(dtype=kind, shape=(2,), stype="numpy.ndarray", data=data), name, "w")


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_no_damage_to_an_array_does_more_than_a_refusal(data: st.DataObject):
    whole = bytearray(npy(np.arange(6, dtype=np.int16).reshape(2, 3)))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    end = data.draw(st.integers(0, len(whole)))
    array = Array(dtype="int16", shape=(2, 3), stype="numpy.ndarray", data=bytes(whole[:end]))
    try:
        got = decode(array, data.draw(st.sampled_from([None, "bfloat16", "complex32"])), "w")
    except PayloadError as error:
        assert str(error).startswith("'w' is no readable array")
        return
    assert got.numel() * got.element_size() <= len(whole)


WORDS = st.sampled_from(["0/f/w", "0/f", "1/f/w", "f", "w", "0", "a/b"])
LEAF = st.one_of(st.none(), st.booleans(), st.integers(-2, 9), st.floats(), st.text(max_size=5), WORDS)
JSON = st.recursive(
    LEAF,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(WORDS, inner, max_size=3)),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(["fields", "same", "dtypes", "rows"]), JSON), st.booleans())
def test_no_index_does_more_than_a_refusal(damage: dict[str, Any], cut: bool):
    records, index = Packer().pack({"0": {"f": {"w": torch.ones(2), "v": torch.zeros(3)}}})
    content, agreed = RecordDict(records), Cut({("f", "w"): 0}, (0,), {"f": {"w": torch.ones(4)}}) if cut else None
    for step in (lambda i: unpack(content, i, agreed), lambda i: check_announced(content, [i])):
        try:
            step({**index, **damage})
        except PayloadError:
            continue


NO_INDEX = [None, [], {}, "text", 3, {"fields": {}, "same": {}, "dtypes": {}}]


@pytest.mark.parametrize("index", [*NO_INDEX, {"fields": 1, "same": {}, "dtypes": {}, "rows": []}])
def test_an_index_that_is_none_is_refused(index: Any):
    with pytest.raises(PayloadError, match="the index of the message is damaged"):
        unpack(RecordDict({}), index)


def test_what_was_announced_must_come_and_what_comes_must_be_announced():
    records, index = Packer().pack({"0": {"f": {"w": torch.ones(2)}, "g": {}}})
    with pytest.raises(PayloadError, match="the field 'g' was announced and did not come"):
        unpack(RecordDict({"0/f": records["0/f"]}), index)
    with pytest.raises(PayloadError, match="the field 'f' was announced and did not come"):
        unpack(RecordDict({**records, "0/f": MetricRecord({"w": 1.0})}), index)
    with pytest.raises(PayloadError, match="the field '0/h' came and was not announced"):
        check_announced(RecordDict({**records, "0/h": ArrayRecord({})}), [index])
    with pytest.raises(PayloadError, match="'1/f/w' refers to a tensor that did not come"):
        unpack(RecordDict(records), {**index, "same": {"1/f/w": "0/f/w"}})
    with pytest.raises(PayloadError, match="'0/g/w' refers to a tensor that did not come"):
        unpack(RecordDict(records), {**index, "same": {"0/g/w": "0/f/v"}})


def test_headers_travel_and_others_are_refused_in_words():
    found = header(message({"run": "ab", "todo": [{"k": 1, "größe": None}]}, {}))
    assert found == {"protocol": wire.PROTOCOL, "run": "ab", "todo": [{"k": 1, "größe": None}]}
    words = "a message without FedLoom's header came; something else answers for this node"
    bad: list[Any] = ["{", "[]", "3", "null", '"protocol"', "{}", "[" * 100_000, b"\xff", 7, [1], True]
    for value in bad:
        with pytest.raises(PayloadError, match=words):
            header(RecordDict({"fedloom": ConfigRecord({"header": value})}))
    others = [{}, {"fedloom": MetricRecord({"header": 1})}, {"fedloom": ArrayRecord({})}]
    for content in map(RecordDict, others):
        with pytest.raises(PayloadError, match=words):
            header(content)
    with pytest.raises(
        PayloadError, match=r"speaks version 99 of the protocol and this one 2; install the same version"
    ):
        header(RecordDict({"fedloom": ConfigRecord({"header": json.dumps({"protocol": 99})})}))
