import logging
import os
import socket
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from fedloom.core import DataError
from fedloom.data import catalogue, load_source


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("the network was asked for")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture
def write(png):
    """Write a parquet split of `n` 4x4 grey (or RGB) images with labels; returns the pixel arrays."""

    def make(path, n=8, value=0, classes=2, colour=False, labels=None, label="label", size=4):
        shape = (size, size, 3) if colour else (size, size)
        pixels = [np.full(shape, (value + i) % 256, np.uint8) for i in range(n)]
        image = [{"bytes": png(p), "path": f"{i}.png"} for i, p in enumerate(pixels)]
        y = [i % classes for i in range(n)] if labels is None else labels
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"image": image, label: y}), path)
        return pixels

    return make


def test_digits_are_bundled_and_the_split_is_fixed():
    first, again = load_source("digits"), load_source("sklearn/digits", root="/nowhere")
    assert first.fingerprint == again.fingerprint and first.name == "sklearn/digits"
    assert first.fingerprint == "d9437583ce92c39966673571fc9e963149af9acf1cb38c3215572c2299d33f96"  # runs hold it
    assert first.x_train.shape == (1438, 1, 8, 8) and first.x_train.dtype == torch.uint8
    assert torch.bincount(first.y_test).tolist() == [36, 36, 35, 37, 36, 36, 36, 36, 35, 36]
    assert int(first.x_train.max()) == 255 and len(first.x_train[first.x_train > 0].unique()) == 16
    assert dict(first.granularity) == {"coarse": 3, "fine": 5}


def test_second_start_needs_neither_sklearn_nor_datasets(private_cache):
    load_source("digits")
    code = (
        "import sys; from fedloom.data import load_source; s = load_source('digits');"
        "heavy = [m for m in ('sklearn', 'datasets', 'pyarrow', 'matplotlib', 'PIL') if m in sys.modules];"
        "print(len(s.y_train), heavy)"
    )
    env = os.environ | {"FEDLOOM_CACHE": str(private_cache)}
    out = subprocess.run([sys.executable, "-W", "error", "-c", code], env=env, capture_output=True, text=True)
    assert out.stdout.split(maxsplit=1) == ["1438", "[]\n"], out.stderr


def test_parquet_folder_with_splits(write, tmp_path):
    pixels = write(tmp_path / "train-00000-of-00002.parquet", 6)
    write(tmp_path / "train-00001-of-00002.parquet", 4, value=100)
    write(tmp_path / "test-00000-of-00001.parquet", 2)
    source = load_source(f"parquet:{tmp_path}")
    assert source.x_train.shape == (10, 1, 4, 4) and len(source.x_test) == 2
    assert torch.equal(source.x_train[3, 0], torch.tensor(pixels[3])) and int(source.x_train[6].max()) == 100


def test_changed_parquet_under_one_path_is_new_data(write, tmp_path):
    file = tmp_path / "data.parquet"
    write(file, 10, value=1)
    first = load_source(f"parquet:{file}")
    write(file, 10, value=2)
    second = load_source(f"parquet:{file}")
    assert first.fingerprint != second.fingerprint
    assert {int(v) for v in second.x_train.unique()} | {int(v) for v in second.x_test.unique()} == set(range(2, 12))


def test_second_read_comes_from_the_cache(write, tmp_path, monkeypatch):
    write(tmp_path / "train.parquet")
    first = load_source(f"parquet:{tmp_path}")
    monkeypatch.setattr("fedloom.data.sources.read_parquet", lambda *a: pytest.fail("decoded again"))
    assert load_source(f"parquet:{tmp_path}").fingerprint == first.fingerprint


def test_numeric_parquet(tmp_path):
    table = pa.table({"a": [0.5, 1.0, 2.0, 3.0], "b": [1, 2, 3, 4], "target": ["u", "v", "u", "v"]})
    pq.write_table(table, tmp_path / "t.parquet")
    source = load_source(f"parquet:{tmp_path / 't.parquet'}", test_fraction=0.5)
    assert source.input_shape == (2,) and source.class_names == ("u", "v") and len(source.x_test) == 2


def test_image_folder_with_and_without_splits(png, tmp_path):
    for part, value in (("train", 10), ("test", 20)):
        for name in ("cat", "dog"):
            folder = tmp_path / "split" / part / name
            folder.mkdir(parents=True)
            for i in range(3):
                (folder / f"{i}.png").write_bytes(png(np.full((4, 5, 3), value + i)))
    source = load_source(f"folder:{tmp_path / 'split'}")
    assert source.x_train.shape == (6, 3, 4, 5) and int(source.x_test.min()) == 20
    assert source.class_names == ("cat", "dog") and source.y_train.tolist() == [0, 0, 0, 1, 1, 1]
    flat = load_source(f"folder:{tmp_path / 'split' / 'train'}")
    assert len(flat.x_train) == 4 and len(flat.x_test) == 2


def test_grey_images_among_rgb_are_repeated(png, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    for i in range(2):
        (tmp_path / "a" / f"{i}.png").write_bytes(png(np.full((4, 4), 7)))
        (tmp_path / "b" / f"{i}.png").write_bytes(png(np.full((4, 4, 3), [1, 2, 3])))
    source = load_source(f"folder:{tmp_path}", test_fraction=0.5)
    assert source.x_train[0].unique().tolist() == [7] and source.x_train[1].flatten(1)[:, 0].tolist() == [1, 2, 3]


def test_other_sizes_need_image_size(png, tmp_path):
    (tmp_path / "a").mkdir()
    for i, side in enumerate((4, 4, 6)):
        (tmp_path / "a" / f"{i}.png").write_bytes(png(np.full((side, side), 9)))
    with pytest.raises(
        DataError, match=r"2.png' is 6x6 \(width x height\) but the first image is 4x4; set data.image_size"
    ):
        load_source(f"folder:{tmp_path}")
    assert load_source(f"folder:{tmp_path}", image_size=8).input_shape == (1, 8, 8)
    assert load_source(f"folder:{tmp_path}", image_size=[8, 6]).input_shape == (1, 8, 6)
    with pytest.raises(DataError, match=r"data.image_size must be a positive integer"):
        load_source(f"folder:{tmp_path}", image_size=0)


def test_mirror_layout_any_repository_and_class_labels(write, tmp_path, monkeypatch):
    write(tmp_path / "me" / "mine" / "data" / "train-00000-of-00001.parquet", 8, colour=True)
    write(tmp_path / "me" / "mine" / "data" / "validation-00000-of-00001.parquet", 2, colour=True)
    monkeypatch.setenv("FEDLOOM_DATA", str(tmp_path))
    source = load_source("me/mine")
    assert source.x_train.shape == (8, 3, 4, 4) and len(source.x_test) == 2 and source.name == "me/mine"


def test_several_configurations_must_be_chosen(write, tmp_path):
    for config, n in (("small", 4), ("large", 8)):
        write(tmp_path / "me" / "two" / config / "train-00000-of-00001.parquet", n)
    with pytest.raises(DataError, match=r"set data.config to one of: large, small"):
        load_source("me/two", root=tmp_path)
    assert len(load_source("me/two", root=tmp_path, config="large", test_fraction=0.5).x_train) == 4
    with pytest.raises(DataError, match="no configuration 'tiny'"):
        load_source("me/two", root=tmp_path, config="tiny")


def test_missing_data_set_names_the_folder_and_the_mend(tmp_path):
    with pytest.raises(DataError, match=r"no parquet file in '.*uoft-cs/cifar100'.*hf download uoft-cs/cifar100"):
        load_source("cifar100", root=tmp_path)


def test_unknown_name_gets_the_closest_match():
    with pytest.raises(DataError, match=r"unknown data set 'cifar1000'. Did you mean 'uoft-cs/cifar100'"):
        load_source("cifar1000")


def test_hub_offline_is_one_sentence():
    with pytest.raises(DataError, match="'no/such-set' is neither in the Hugging Face cache nor") as caught:
        load_source("no/such-set")
    assert "\n" not in str(caught.value)


def test_the_library_does_not_talk_about_its_retries(monkeypatch):
    heard = []

    def load_dataset(*args):
        heard.extend(logging.getLogger(n).isEnabledFor(logging.ERROR) for n in ("huggingface_hub.utils", "datasets"))
        raise ConnectionError("no route")

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    before = logging.getLogger("datasets").level
    with pytest.raises(DataError, match="no route"):
        load_source("no/such-set")
    assert heard == [False, False] and logging.getLogger("datasets").level == before


def test_corrupt_parquet_and_images_are_named(write, png, tmp_path):
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 nonsense")
    with pytest.raises(DataError, match=r"parquet file '.*bad.parquet' cannot be read"):
        load_source(f"parquet:{tmp_path / 'bad.parquet'}")
    image = [{"bytes": png(np.zeros((4, 4))), "path": "a"}, {"bytes": b"xx", "path": "b"}]
    pq.write_table(pa.table({"image": image, "label": [0, 1]}), tmp_path / "t.parquet")
    with pytest.raises(DataError, match=r"row 1 of '.*t.parquet' is not a readable image"):
        load_source(f"parquet:{tmp_path / 't.parquet'}")


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ({"kind": [0, 1]}, {}, "has no label column; set data.label to one of: image, kind"),
        ({"label": [0, 1]}, {"label": "lable"}, "has no label column 'lable'"),
        ({"label": [0, 1]}, {"image": "img"}, "has no image column 'img'"),
        ({"label": [0, 1]}, {"image": "label"}, "holds no images"),
        ({"label": [0, None]}, {}, "1 empty labels"),
        ({"label": [0.5, 1.0]}, {}, "must be integers 0..C-1, got 0.5"),
        ({"label": [0, 1]}, {"test_split": "test"}, "data.test_split 'test' is not in"),
    ],
)
def test_bad_columns(png, tmp_path, columns, options, message):
    image = [{"bytes": png(np.zeros((4, 4))), "path": "a"}] * 2
    pq.write_table(pa.table({"image": image, **columns}), tmp_path / "t.parquet")
    with pytest.raises(DataError, match=message):
        load_source(f"parquet:{tmp_path / 't.parquet'}", **options)


def test_bad_paths(tmp_path):
    for name in ("folder:", f"folder:{tmp_path / 'none'}", f"parquet:{tmp_path / 'none'}"):
        with pytest.raises(DataError, match="there is nothing at"):
            load_source(name)
    with pytest.raises(DataError, match="holds no parquet file"):
        load_source(f"parquet:{tmp_path}")
    with pytest.raises(DataError, match="holds no images in class folders"):
        load_source(f"folder:{tmp_path}")
    with pytest.raises(DataError, match=r"data.test_fraction must be in \(0, 1\), got 1.5"):
        load_source("digits", test_fraction=1.5)


def test_catalogue_lists_names_and_forms():
    names = [name for name, _ in catalogue()]
    assert {
        "sklearn/digits",
        "sklearn/digits-domains",
        "domains:NAME,NAME",
        "uoft-cs/cifar100",
        "flwrlabs/pacs",
        "folder:PATH",
        "parquet:PATH",
    } <= set(names)


@pytest.mark.parametrize(
    ("name", "shape", "train", "test", "classes"),
    [
        ("uoft-cs/cifar10", (3, 32, 32), 6000, 1500, 10),
        ("ylecun/mnist", (1, 32, 32), 1000, 300, 10),
        ("flwrlabs/usps", (1, 32, 32), 1000, 300, 10),
        ("Mike0307/MNIST-M", (3, 32, 32), 1000, 300, 10),
    ],
)
def test_mirrored_data_sets(mirror, name, shape, train, test, classes):
    source = load_source(name, root=mirror)
    assert source.input_shape == shape and source.num_classes == classes
    assert (len(source.x_train), len(source.x_test)) == (train, test)
    assert len(source.mean) == len(source.std) == shape[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "train", "test", "classes"),
    [("cifar100", 20000, 5000, 100), ("tiny-imagenet", 12000, 2000, 200), ("pacs", 7993, 1998, 7)],
)
def test_large_mirrored_data_sets(mirror, name, train, test, classes):
    source = load_source(name, root=mirror)
    assert (len(source.x_train), len(source.x_test), source.num_classes) == (train, test, classes)


@pytest.mark.slow
def test_pacs_has_its_four_domains(mirror):
    source = load_source("pacs", root=mirror)
    assert source.domain_names == ("art_painting", "cartoon", "photo", "sketch")
    sizes = torch.bincount(source.domains_train) + torch.bincount(source.domains_test)
    assert sizes.tolist() == [2048, 2344, 1670, 3929] and int(sizes.sum()) == 9991
    cells = [torch.bincount(d * 7 + y, minlength=28) for d, y in source_pairs(source)]
    assert (cells[1] - 0.2 * (cells[0] + cells[1])).abs().max() <= 0.5
    assert source.class_names[5] == "house" and int(cells[0][26] + cells[1][26]) == 80
    plain = load_source("pacs", root=mirror, domain="none")
    assert plain.fingerprint == "df3068c5d532090d8e6982486eda1606b3df6b0934937e62e6a7598b32a3e252"


def source_pairs(source):
    return (source.domains_train, source.y_train), (source.domains_test, source.y_test)
