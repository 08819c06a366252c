from __future__ import annotations

import ctypes

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedloom.core import PayloadError
from fedloom.core.payload import (
    canonical,
    canonical_payload,
    check_finite,
    check_like,
    check_structure,
    digest,
    is_finite,
    items,
    narrow,
    nbytes,
    raw_bytes,
    widen,
)

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


def test_canonical_copies_only_what_it_must():
    good = torch.empty(4, 4)
    assert canonical(good).data_ptr() == good.data_ptr()
    for odd in (torch.arange(9.0)[1:], torch.ones(3, 4).T, torch.ones(3).expand(2, 3)):
        made = canonical(odd)
        assert torch.equal(made, odd) and made.is_contiguous() and made.data_ptr() % 64 == 0
    learned = torch.ones(2, requires_grad=True)
    assert not canonical(learned).requires_grad
    assert canonical_payload({"a": {"b": torch.ones(2, 3).T}})["a"]["b"].is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_raw_bytes_and_digest_for_every_dtype_and_rank(dtype: torch.dtype, shape: tuple[int, ...]):
    tensor = torch.ones(shape).to(dtype)
    assert len(raw_bytes(tensor)) == tensor.numel() * tensor.element_size()
    first = digest({"f": {"n": tensor}})
    assert first == digest({"f": {"n": tensor.clone()}}) and len(first) == 64
    assert first != digest({"f": {"m": tensor}}) != digest({"g": {"n": tensor}})


@pytest.mark.parametrize("size", [0, 1, 2])
def test_raw_bytes_of_every_second_entry(size: int):
    tensor = torch.arange(2 * size, dtype=torch.int16)
    assert raw_bytes(tensor[::2]).tolist() == [b for k in range(size) for b in (2 * k, 0)]


def test_digest_tells_dtype_shape_and_values_apart_but_not_order():
    one = torch.ones(4)
    different = [one, one.view(torch.int32), one.reshape(2, 2), torch.tensor([1.0, 1, 1, -1]), -torch.zeros(4)]
    assert len({digest({"f": {"n": t}}) for t in [*different, torch.zeros(4)]}) == 6, "-0.0 and 0.0 differ in bits"
    a, b = torch.ones(1), torch.zeros(1)
    assert digest({"x": {"a": a, "b": b}, "y": {}}) == digest({"y": {}, "x": {"b": b, "a": a}})
    assert digest({"f": {"n": torch.arange(6).reshape(2, 3).T}}) == digest(
        {"f": {"n": torch.arange(6).reshape(2, 3).T.contiguous()}}
    )
    assert [(f, n) for f, n, _ in items({"b": {"z": a, "a": a}, "a": {"q": a}})] == [("a", "q"), ("b", "a"), ("b", "z")]


@given(classes=st.integers(1, 8), other=st.integers(1, 4), dim=st.integers(0, 1), data=st.data())
def test_narrow_and_widen_are_inverse(classes: int, other: int, dim: int, data):
    seen = sorted(data.draw(st.sets(st.integers(0, classes - 1))))
    shape = (classes, other) if dim == 0 else (other, classes)
    initial = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    now = initial.clone()
    now.index_fill_(dim, torch.tensor(seen, dtype=torch.long), 7.0)
    payload = {"params": {"head": now, "body": torch.ones(3)}}
    rows = {("params", "head"): dim}
    cut = narrow(payload, rows, seen)
    assert cut["params"]["head"].shape[dim] == len(seen) and torch.equal(cut["params"]["body"], torch.ones(3))
    assert nbytes(cut) == nbytes(payload, rows, seen) == 4 * (other * len(seen) + 3)
    assert digest(widen(cut, rows, seen, {"params": {"head": initial}})) == digest(payload)


def test_nbytes_counts_all_without_rows():
    assert nbytes({"a": {"x": torch.zeros(3), "y": torch.zeros(2, dtype=torch.int64)}, "b": {}}) == 28
    assert nbytes({"a": {"x": torch.zeros(0, 3)}}, {("a", "x"): 0}, [1]) == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_is_finite(dtype: torch.dtype):
    big = torch.full((1000,), torch.finfo(dtype).max, dtype=dtype)
    assert is_finite(big), "the sum overflows, the entries do not"
    assert is_finite(torch.zeros(0, dtype=dtype)) and is_finite(torch.tensor([3, 4]))
    for bad in (float("nan"), float("inf"), -float("inf")):
        assert not is_finite(torch.tensor([1.0, bad], dtype=dtype))
    assert not is_finite(torch.tensor([float("inf"), -float("inf")], dtype=dtype))
    with pytest.raises(PayloadError, match="'p/w' holds NaN or infinite values"):
        check_finite({"p": {"a": torch.ones(1), "w": torch.tensor(float("nan"))}})


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.complex32])
def test_is_finite_for_types_that_torch_cannot_sum(dtype: torch.dtype):
    plain = torch.float16 if dtype.is_complex else dtype
    good, bad = (torch.tensor([1.0, last, 1.0, 1.0]).to(plain).view(dtype) for last in (2.0, float("nan")))
    assert is_finite(good) and is_finite(good[:0]) and not is_finite(bad)


def test_is_finite_whatever_an_earlier_call_of_the_c_library_left_behind():
    library = ctypes.CDLL(None)
    library.strtod(b"1e999", None)  # sets errno, by which abs() of a complex NaN fails
    assert not is_finite(torch.tensor([float("nan")]))


def test_structure_is_checked_in_words():
    check_structure({"p": {"w": torch.ones(1)}, "empty": {}}, "x")
    bad = {
        "must map fields": [torch.ones(1)],
        "'p'.*must map names": {"p": torch.ones(1)},
        "'w'.*must be a tensor, got float": {"p": {"w": 1.0}},
        "field's name must be text without '/', got 1": {1: {"w": torch.ones(1)}},
        "field's name must be text without '/', got 'a/b'": {"a/b": {"w": torch.ones(1)}},
        "field's name must be text without '/', got ''": {"": {"w": torch.ones(1)}},
    }
    for words, payload in bad.items():
        with pytest.raises(PayloadError, match=words):
            check_structure(payload, "the upload")


def test_uploads_are_compared_with_what_the_server_holds():
    server = {"p": {"w": torch.zeros(3)}}
    check_like({"p": {}}, server)
    check_like({"p": {"w": torch.ones(3)}, "extra_field": {"any": torch.ones(9)}}, server)
    check_like({"p": {"w": torch.ones(2)}}, server, ragged=("p",))
    for up, words in [
        ({"w": torch.ones(1)}, r"'p/w' has shape \(1,\), expected \(3,\)"),
        ({"w": torch.ones(3).double()}, "dtype torch.float64, expected torch.float32"),
        ({"v": torch.ones(3)}, "'p/v' is not a tensor that the server holds"),
    ]:
        with pytest.raises(PayloadError, match=words):
            check_like({"p": up}, server)
    with pytest.raises(PayloadError, match="dtype"):
        check_like({"p": {"w": torch.ones(2).double()}}, server, ragged=("p",))


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint64, torch.float8_e4m3fn, torch.bfloat16, torch.complex64])
def test_class_rows_of_any_dtype_come_back(dtype: torch.dtype):
    start = torch.zeros(4, 3).to(dtype)
    moved = torch.arange(12.0).reshape(4, 3).to(dtype)
    rows, seen = {("f", "w"): 0}, [0, 2]
    back = widen(narrow({"f": {"w": moved}}, rows, seen), rows, seen, {"f": {"w": start}})["f"]["w"]
    assert back.dtype == dtype
    whole = [raw_bytes(tensor).reshape(4, -1) for tensor in (back, moved, start)]
    assert torch.equal(whole[0][[0, 2]], whole[1][[0, 2]]) and torch.equal(whole[0][[1, 3]], whole[2][[1, 3]])
