"""Domain columns of tables: names or text, empty labels, columns that are none."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from fedloom.core import DataError
from fedloom.data import load_source

HOMES = ["sea", "land", "sea", "air"] * 6


@pytest.fixture
def table(png, tmp_path):
    """Write a table of grey images with the given columns; `names` are class labels of the column domain."""

    def make(names=None, at="t.parquet", **columns):
        length = len(next(iter(columns.values())))
        image = [{"bytes": png(np.full((4, 4), i)), "path": "a"} for i in range(length)]
        found = pa.table({"image": image, **columns})
        if names:
            features = {"domain": {"names": names, "_type": "ClassLabel"}}
            found = found.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
        path = tmp_path / at
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(found, path)
        return f"parquet:{path}"

    return make


def by_image(source):
    """Pixel value, which is the row of the table -> domain name."""
    pairs = ((source.x_train, source.domains_train), (source.x_test, source.domains_test))
    return {int(v): source.domain_names[d] for x, ids in pairs for v, d in zip(x[:, 0, 0, 0], ids, strict=True)}


def test_text_gives_sorted_domains(table):
    source = load_source(table(label=[0, 1] * 12, domain=HOMES), domain="domain")
    assert source.domain_names == ("air", "land", "sea") and by_image(source) == dict(enumerate(HOMES))
    assert source.domains_train.dtype == torch.int64 and source.notes == ()


def test_class_labels_keep_their_order_and_only_domains_that_occur(table):
    name = table(names=["sketch", "none here", "art"], label=[0, 1] * 6, domain=[2, 2, 0, 0] * 3)
    source = load_source(name, domain="domain")
    assert source.domain_names == ("sketch", "art")
    assert by_image(source) == dict(enumerate(["art", "art", "sketch", "sketch"] * 3))


def test_the_catalogue_names_the_domain_column(table, tmp_path):
    table(label=[0, 1] * 12, domain=HOMES, at="flwrlabs/pacs/data/train-00000-of-00001.parquet")
    assert load_source("pacs", root=tmp_path).domain_names == ("air", "land", "sea")
    assert load_source("pacs", root=tmp_path, domain="none").domain_names == ()
    with pytest.raises(DataError, match=r"data.label and data.domain are both 'domain'; set data.domain to 'none'"):
        load_source("pacs", root=tmp_path, label="domain")
    assert load_source("pacs", root=tmp_path, label="domain", domain="none").class_names == ("air", "land", "sea")


def test_ignored_domains_give_the_data_of_before(table):
    with_column = load_source(table(label=[0, 1] * 12, domain=HOMES), domain="none")
    without = load_source(table(label=[0, 1] * 12, at="other.parquet"))
    assert with_column.fingerprint == without.fingerprint


def test_a_numeric_domain_column_is_no_feature(tmp_path):
    columns = {"a": [0.5, 1.0, 2.0, 3.0] * 2, "domain": [4, 4, 4, 4, 8, 8, 8, 8], "target": [0, 1] * 4}
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    source = load_source(f"parquet:{tmp_path / 't.parquet'}", domain="domain", test_fraction=0.5)
    assert source.input_shape == (1,) and source.domain_names == ("4", "8")
    assert torch.bincount(source.domains_test).tolist() == [2, 2]


@pytest.mark.parametrize(
    ("columns", "asked", "message"),
    [
        ({}, "style", "has no domain column 'style'; set data.domain to 'none' or to one of: image, label$"),
        ({}, "folders", "data.domain 'folders' is for folder:PATH"),
        ({}, "image", "column 'image' of data '.*' holds images, no domains"),
        ({"domain": ["a", None, "b", None]}, "domain", "column 'domain' of data '.*' has 2 empty domain labels"),
        ({"domain": ["a", "", "b", "b"]}, "domain", "an empty text at position 1"),
        ({"domain": [0.0, 1.0, np.nan, 1.0]}, "domain", "integers 0..C-1, got nan at position 2"),
        ({"domain": [[1, 2]] * 4}, "domain", r"got shape \(4, 2\)"),
    ],
)
def test_unusable_domain_columns_are_refused(table, columns, asked, message):
    with pytest.raises(DataError, match=message) as caught:
        load_source(table(label=[0, 1] * 2, **columns), domain=asked)
    assert "\n" not in str(caught.value)


def test_a_test_split_without_the_column_is_refused(table, tmp_path):
    table(label=[0, 1], domain=["a", "b"], at="both/train.parquet")
    table(label=[0, 1], at="both/test.parquet")
    with pytest.raises(DataError, match="has no column 'domain'"):
        load_source(f"parquet:{tmp_path / 'both'}", domain="domain")
