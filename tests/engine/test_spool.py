from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from fedloom.core.payload import digest
from fedloom.engine.spool import Reader, Spool

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


@pytest.fixture
def spool(tmp_path: Path):
    made = Spool(tmp_path / "deep" / "0.bin")
    yield made
    made.close()
    assert not made.path.exists()


def test_payloads_come_back_whole(spool: Spool):
    payload = {
        "typed": {str(d): torch.ones(3, 5).to(d) for d in DTYPES},
        "odd": {"scalar": torch.tensor(3), "none": torch.zeros(0, 4), "view": torch.arange(6.0).reshape(2, 3).T},
        "empty": {},
    }
    ref, second = spool.write(payload), spool.write({"p": {"w": torch.full((7,), 2.0)}})
    reader = Reader()
    trees = reader.open(ref)
    assert digest(trees) == digest(payload) and set(trees) == set(payload)
    assert ref.not_finite is None and all(e.offset % 64 == 0 for e in ref.entries)
    view = reader.open(second)["p"]["w"]
    assert view.tolist() == [2.0] * 7 and view.data_ptr() % 64 == 0
    assert reader.holds(view) and reader.holds(view[2:]) and not reader.holds(view.clone())
    kept = trees["typed"]["torch.float32"]
    again = trees["typed"]["torch.float32"]
    assert torch.equal(kept, again), "pages that were handed back come again"
    reader.forget()
    assert kept.sum().item() == 15.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_the_first_tensor_that_is_not_finite_is_named(spool: Spool, bad: float):
    big = torch.zeros(3_000_000)
    big[-1] = bad
    assert spool.write({"p": {"a": torch.ones(2), "b": big, "c": big}}).not_finite == "p/b"
    assert spool.write({"p": {"a": torch.full((2,), torch.finfo(torch.float32).max)}}).not_finite is None


def test_kept_tensors_are_written_once(spool: Spool):
    shared = torch.ones(4)
    one = spool.write({"p": {"w": shared}}, keep=True)
    two = spool.write({"q": {"v": shared, "x": torch.zeros(4)}}, keep=True)
    assert one.entries[0].offset == two.entries[0].offset and two.entries[0].field == "q"
    assert Reader().open(two)["q"]["v"].tolist() == [1.0] * 4
    spool.reset()
    assert spool.write({"p": {"w": torch.zeros(1)}}).entries[0].offset == 0


def test_a_spool_is_a_new_file_even_where_one_lies(tmp_path: Path):
    """A worker that outlives a killed run may still write to its old file; that must reach nobody."""
    old = Spool(tmp_path / "1.bin")
    fd = os.dup(old._fd)
    new = Spool(tmp_path / "1.bin")
    ref = new.write({"p": {"w": torch.ones(4)}})
    os.pwrite(fd, b"\xff" * 64, 0)
    assert Reader().open(ref)["p"]["w"].tolist() == [1.0] * 4
    os.close(fd)
    os.close(old._fd)
    new.close()
