"""Several data sets as the domains of one."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from fedloom.core import DataError
from fedloom.data import load_source, store_source


@pytest.fixture
def part(png, tmp_path):
    """Write a data set of 4 train and 2 test images; row i of a split has the pixel value start + i."""

    def make(owner, names=("a", "b"), labels=(0, 1, 0, 1), start=0, side=4, colour=False):
        features = {"label": {"names": list(names), "_type": "ClassLabel"}}
        for split, y in (("train", labels), ("test", labels[:2])):
            shape = (side, side, 3) if colour else (side, side)
            image = [{"bytes": png(np.full(shape, start + i)), "path": "a"} for i in range(len(y))]
            found = pa.table({"image": image, "label": list(y)})
            found = found.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
            (tmp_path / owner).mkdir(parents=True, exist_ok=True)
            pq.write_table(found, tmp_path / owner / f"{split}.parquet")

    return make


def test_data_sets_become_domains_in_the_order_given(part, tmp_path):
    part("me/warm", start=10)
    part("me/cold", start=50, colour=True)
    source = load_source("domains:me/warm, me/cold", root=tmp_path)
    assert source.domain_names == ("warm", "cold") and source.name == "domains:me/warm, me/cold"
    assert source.x_train.shape == (8, 3, 4, 4) and source.x_test.shape == (4, 3, 4, 4)
    assert source.x_train[:, :, 0, 0].tolist() == [[v] * 3 for v in (10, 11, 12, 13, 50, 51, 52, 53)]
    assert source.domains_train.tolist() == [0] * 4 + [1] * 4 and source.domains_test.tolist() == [0, 0, 1, 1]
    assert source.notes == ("classes of cold were matched to those of warm by name",)
    assert np.allclose(source.mean, [np.mean([10, 11, 12, 13, 50, 51, 52, 53]) / 255] * 3)
    other = load_source("domains:me/cold,me/warm", root=tmp_path)
    assert other.domain_names == ("cold", "warm") and other.fingerprint != source.fingerprint


def test_classes_are_matched_by_name_in_any_order(part, tmp_path):
    part("me/one", names=("cat", "dog"))
    part("me/two", names=("dog", "cat"))
    source = load_source("domains:me/one,me/two", root=tmp_path)
    assert source.class_names == ("cat", "dog") and source.y_train.tolist() == [0, 1, 0, 1, 1, 0, 1, 0]


def test_classes_of_other_names_are_matched_by_order_and_told(part, tmp_path):
    part("me/one", names=("0", "1"))
    part("me/two", names=("1", "0"))
    part("me/three", names=("zero", "one"))
    source = load_source("domains:me/one,me/two,me/three", root=tmp_path)
    assert source.y_train.tolist() == [0, 1, 0, 1, 1, 0, 1, 0, 0, 1, 0, 1]
    assert source.notes == (
        "classes of two were matched to those of one by name",
        "classes of three were matched to those of one by order",
    )


def test_a_second_start_reads_the_joined_data_from_the_cache(part, tmp_path, monkeypatch):
    part("me/one")
    part("me/two")
    first = load_source("domains:me/one,me/two", root=tmp_path)
    monkeypatch.setattr("fedloom.data.sources.union", lambda **given: pytest.fail("joined again"))
    again = load_source("domains:me/one,me/two", root=tmp_path)
    assert again.fingerprint == first.fingerprint and again.domain_names == ("one", "two")
    assert again.notes == first.notes and torch.equal(again.domains_train, first.domains_train)


def test_forms_of_every_kind_can_be_parts(part, png, tmp_path):
    part("me/one", side=8, names=tuple("0123456789"), labels=tuple(range(10)) * 2)
    for c in range(10):
        (tmp_path / "amazon" / str(c)).mkdir(parents=True)
        for i in range(2):
            (tmp_path / "amazon" / str(c) / f"{i}.png").write_bytes(png(np.full((8, 8), c)))
    kept = store_source(load_source((np.zeros((20, 8, 8), np.uint8), np.arange(20) % 10)))
    names = ["digits", f"parquet:{tmp_path / 'me/one'}", f"folder:{tmp_path / 'amazon'}/", kept, "digits-domains"]
    source = load_source("domains:" + ",".join(names))
    assert source.domain_names == ("digits", "one", "amazon", "arrays", "digits-domains")
    assert torch.bincount(source.domains_train).tolist() == [1438, 20, 10, 10, 5752]
    assert dict(source.granularity) == {"coarse": 3, "fine": 5}


def test_image_size_brings_parts_to_one_size(part, tmp_path):
    part("me/small", side=4)
    part("me/large", side=6)
    with pytest.raises(DataError, match=r"inputs of 'large' are 1x6x6 and those of 'small' 1x4x4; set data.image_size"):
        load_source("domains:me/small,me/large", root=tmp_path)
    assert load_source("domains:me/small,me/large", root=tmp_path, image_size=5).input_shape == (1, 5, 5)


def test_parts_that_do_not_fit_are_refused(part, tmp_path):
    part("me/two")
    part("me/three", names=("a", "b", "c"))
    part("you/two")
    floats = store_source(load_source((np.zeros((8, 1, 4, 4)), np.arange(8) % 2)))
    for name, message in (
        ("domains:", "needs two data sets or more"),
        ("domains:me/two", "needs two data sets or more"),
        ("domains:me/two,me/three", "'three' has 3 classes and 'two' 2; the domains of one data set need the same"),
        ("domains:me/two,you/two", "names two domains 'two'"),
        ("domains:me/two,nosuch", "unknown data set 'nosuch'"),
        (f"domains:me/two,{floats}", "'arrays' holds float32 inputs and 'two' uint8; all domains need one kind"),
    ):
        with pytest.raises(DataError, match=message) as caught:
            load_source(name, root=tmp_path)
        assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match=r"data.domain 'style' names no column"):
        load_source("domains:me/two,you/two", root=tmp_path, domain="style")


def test_the_mirrored_digits_are_three_domains(mirror):
    source = load_source("domains:ylecun/mnist,flwrlabs/usps,Mike0307/MNIST-M", root=mirror)
    assert source.domain_names == ("mnist", "usps", "MNIST-M") and source.input_shape == (3, 32, 32)
    assert torch.bincount(source.domains_train).tolist() == [1000] * 3
    assert torch.bincount(source.domains_test).tolist() == [300] * 3
    alone = [load_source(name, root=mirror) for name in ("mnist", "usps", "mnist-m")]
    assert all(torch.equal(source.y_test[300 * d : 300 * d + 300], alone[d].y_test) for d in range(3))
    assert torch.equal(source.x_test[300:600, 2], alone[1].x_test[:, 0])


def test_classes_that_are_the_same_in_part_are_refused(part, tmp_path):
    part("me/one", names=("cat", "dog"))
    part("me/two", names=("dog", "eel"))
    with pytest.raises(DataError, match="data 'two' and 'one' share the class 'dog' but not all of their classes"):
        load_source("domains:me/one,me/two", root=tmp_path)
