"""Arrays, labels and files that cannot be used are refused; splits are always read alike."""

import os

import numpy as np
import pytest
import torch

from fedloom.core import ConfigError, DataError
from fedloom.data import load_source
from fedloom.data.dirichlet import Dirichlet
from fedloom.data.partition import QuantitySkew
from fedloom.data.stream import make_arrival

Y = np.arange(30) % 3
X = np.random.default_rng(0).normal(size=(30, 4))
IMAGES = np.random.default_rng(0).integers(0, 256, size=(30, 8, 8))


class Odd(torch.utils.data.Dataset):
    def __init__(self, kind, length=30):
        self.kind, self.length = kind, length

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        if self.kind == "raises" and i == 3:
            raise RuntimeError("oops")
        return torch.zeros(4), torch.zeros(3) if self.kind == "vector" else i % 3


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ((IMAGES.astype(np.uint8), Y, IMAGES / 255, Y), "give both the same dtype"),
        ((X, np.where(Y == 1, 1e300, Y)), "must be integers 0..C-1, got 1e\\+300 at position 1"),
        ((X, np.where(Y == 1, np.uint64(2**63 + 5), Y.astype(np.uint64))), "got 9223372036854775813 at position 1"),
        ((X, np.array([10**30] + [1] * 29, dtype=object)), "got an integer of over 64 bits"),
        ((X, np.array([b"\xff", b"a", b"b"] * 10)), "no UTF-8 text"),
        ((X, np.array(["\ud800", "a", "b"] * 10)), "no UTF-8 text"),
        ((np.array(3.0), Y), "x must be an array of examples"),
        ((None, Y), "x must be an array of examples"),
        ((X, None), "y must be an array of examples"),
        ((X, Y, X, None), "y_test must be an array of examples"),
        ((np.zeros((30, 0, 8, 8)), Y), "holds no value"),
        ((torch.rand(30, 4).to_sparse(), Y), "sparse"),
        ((torch.rand(30, 4, device="meta"), Y), "meta"),
        ((X * 1e300, Y), "NaN or infinite"),
        (Odd("raises"), r"example 3 of Odd cannot be read \(RuntimeError: oops test_odd_inputs.py:"),
        (Odd("length", -1), "the length of Odd cannot be read"),
        (Odd("vector"), r"example 0 of Odd has a label of shape \(3,\)"),
    ],
)
def test_unusable_data_is_refused(data, sentence):
    with pytest.raises(DataError, match=sentence):
        load_source(data)


def test_both_splits_are_stored_as_one_type():
    wide = IMAGES.copy()
    wide[0, 0, 0] = 256
    source = load_source((IMAGES, Y, wide, Y))
    assert source.x_train.dtype == source.x_test.dtype == torch.float32
    assert float(source.x_test.max()) == 256 and source.mean == ()
    source = load_source((IMAGES.astype(np.uint8), Y, IMAGES, Y))
    assert source.x_train.dtype == source.x_test.dtype == torch.uint8
    assert torch.equal(source.x_train, source.x_test)


def test_bytes_and_numpy_objects_are_labels():
    assert load_source((X, np.array(["é".encode(), b"a", b"b"] * 10))).class_names == ("a", "b", "é")
    assert load_source((X, np.array([np.int64(v) for v in Y], dtype=object))).class_names == ("0", "1", "2")


def test_alpha_has_an_end():
    for rule in (Dirichlet, QuantitySkew):
        with pytest.raises(ConfigError, match=r"partition\.alpha must be at most 1e\+06, got 1e\+308"):
            rule(alpha=1e308)
        rule(alpha=1e6).split(Y, 3, 0)


@pytest.mark.parametrize("value", [1.7, True, "1.0", "²"])
def test_timetables_hold_whole_numbers(value):
    with pytest.raises(ConfigError, match=r"stream\.arrival: task must be"):
        make_arrival({0: {0: value}}, tasks=2, clients=3, seed=0)


@pytest.mark.parametrize("name", ["/", "a/b/c", "~/x", "x" * 300, "a b/c"])
def test_names_that_are_no_repository(name):
    with pytest.raises(DataError, match="unknown data set"):
        load_source(name)


@pytest.mark.parametrize("name", ["folder:~nosuchuser/x", "folder:" + "x" * 300, "parquet:a\0b"])
def test_paths_that_are_none(name):
    with pytest.raises(DataError, match=r"data\.name"):
        load_source(name)


def test_image_folders_with_odd_entries(tmp_path):
    from PIL import Image

    for label in "ab":
        (tmp_path / label).mkdir()
        for k in range(3):
            Image.new("L", (4, 4), k).save(tmp_path / label / f"{k}.png")
    (tmp_path / "a" / "z.png").mkdir()
    assert len(load_source(f"folder:{tmp_path}").y_train) == 4
    os.symlink(tmp_path / "nowhere", tmp_path / "b" / "z.png")
    with pytest.raises(DataError, match=r"z\.png' is a link to nothing"):
        load_source(f"folder:{tmp_path}")


def test_options_without_use_are_noted():
    assert load_source("sklearn/digits").notes == ()
    notes = load_source("sklearn/digits", label="x", image_size=8).notes
    assert notes == (
        "data.label is not used by data 'sklearn/digits'",
        "data.image_size is not used by data 'sklearn/digits'",
    )
