"""Folders whose first level is the domain and whose second is the class."""

import os

import numpy as np
import pytest
import torch

from fedloom.core import DataError
from fedloom.data import load_source


@pytest.fixture
def fill(png, tmp_path):
    """Write `count` images of pixel values from `start` on into a folder."""

    def make(folder, count=5, start=0):
        path = tmp_path / folder
        path.mkdir(parents=True, exist_ok=True)
        for i in range(count):
            (path / f"{i}.png").write_bytes(png(np.full((4, 4), start + i)))

    return make


def test_domain_folders_are_split_within_each_domain_and_class(fill, tmp_path):
    for d, domain in enumerate(("webcam", "amazon")):
        for c, label in enumerate(("mug", "bike")):
            fill(f"{domain}/{label}", count=5 * (d + 1), start=100 * d + 50 * c)
    source = load_source(f"folder:{tmp_path}", domain="folders")
    assert source.domain_names == ("amazon", "webcam") and source.class_names == ("bike", "mug")
    assert torch.bincount(source.domains_test * 2 + source.y_test).tolist() == [2, 2, 1, 1]
    value = source.x_train[:, 0, 0, 0].long()
    assert torch.equal(source.domains_train, (value < 100).long()) and len(value) == 24
    assert torch.equal(source.y_train, (value % 100 < 50).long())


def test_domain_folders_below_given_splits(fill, tmp_path):
    for split, domains in (("train", "ab"), ("val", "bc")):
        for domain in domains:
            fill(f"{split}/{domain}/x", 2)
            fill(f"{split}/{domain}/y", 1)
    source = load_source(f"folder:{tmp_path}", domain="folders")
    assert source.domain_names == ("a", "b", "c")
    assert torch.bincount(source.domains_train, minlength=3).tolist() == [3, 3, 0]
    assert torch.bincount(source.domains_test).tolist() == [0, 3, 3]
    assert source.notes == ("domain 'c' has no train example", "domain 'a' has no test example")


def test_one_folder_is_read_with_and_without_domains(fill, tmp_path):
    fill("a/x")
    fill("b/y")
    assert load_source(f"folder:{tmp_path}", domain="folders").class_names == ("x", "y")
    plain = load_source(f"folder:{tmp_path}", domain="none")
    assert plain.class_names == ("a", "b") and plain.domain_names == ()
    assert plain.fingerprint == load_source(f"folder:{tmp_path}").fingerprint


def test_what_looks_like_domains_is_not_taken_for_classes_in_silence(fill, tmp_path):
    for domain in ("webcam", "amazon"):
        for label in ("mug", "bike"):
            fill(f"{domain}/{label}")
    with pytest.raises(
        DataError,
        match=r"folders 'amazon' and 'webcam' look like domains, since both hold folders 'bike' and 'mug'; set "
        r"data.domain to 'folders' to read domain/class/image, or to 'none' if they are the classes$",
    ):
        load_source(f"folder:{tmp_path}")
    assert load_source(f"folder:{tmp_path}", domain="folders").class_names == ("bike", "mug")
    assert load_source(f"folder:{tmp_path}", domain="none").class_names == ("amazon", "webcam")
    union = load_source(f"domains:folder:{tmp_path / 'amazon'},folder:{tmp_path / 'webcam'}")
    assert union.domain_names == ("amazon", "webcam") and union.class_names == ("bike", "mug")


@pytest.mark.parametrize("path", ["train/{}/{}", "{}/train/{}", "{}/{}/train"])
def test_folders_of_splits_do_not_hide_domains(path, fill, tmp_path):
    for domain in "ab":
        for label in "xy":
            fill(path.format(domain, label))
    with pytest.raises(DataError, match="folders 'a' and 'b' look like domains, since both hold folders 'x' and 'y'"):
        load_source(f"folder:{tmp_path}")


@pytest.mark.parametrize(
    "folders",
    [
        ["cat", "dog"],
        ["cat", "dog", "dog/x", "dog/y", "cow/x", "cow/y"],  # cat holds images itself
        ["cat/images", "dog/images"],  # as Tiny ImageNet has it
        ["cat/x", "cat/y", "dog/z", "dog/w"],
        ["cat/train", "cat/test", "dog/train", "dog/test"],
    ],
    ids=" ".join,
)
def test_class_folders_with_folders_of_their_own_stay_classes(folders, fill, tmp_path):
    for folder in folders:
        fill(folder)
    classes = sorted({folder.partition("/")[0] for folder in folders})
    assert load_source(f"folder:{tmp_path}").class_names == tuple(classes)


def test_unreadable_layouts_are_refused(fill, tmp_path):
    fill("flat/cat")
    with pytest.raises(
        DataError, match=r"image '.*0.png' lies in no class folder of its domain; data.domain 'folders'"
    ):
        load_source(f"folder:{tmp_path / 'flat'}", domain="folders")
    fill("below/a/train/x")
    fill("below/a/test/x")
    with pytest.raises(DataError, match=r"has its splits below the domains; .*data.name=domains:folder:.*below/a,"):
        load_source(f"folder:{tmp_path / 'below'}", domain="folders")
    (tmp_path / "empty" / "a").mkdir(parents=True)
    with pytest.raises(DataError, match=r"one subfolder per domain, in it one per class"):
        load_source(f"folder:{tmp_path / 'empty'}", domain="folders")
    with pytest.raises(DataError, match=r"data.domain must be 'folders' .* got 'style'"):
        load_source(f"folder:{tmp_path / 'flat'}", domain="style")


def test_names_of_folders_must_be_text_and_those_of_pictures_need_not(fill, tmp_path):
    fill("a")
    fill("b")
    os.rename(os.fsencode(tmp_path / "a" / "0.png"), os.fsencode(tmp_path / "a") + b"/\xff.png")
    assert load_source(f"folder:{tmp_path}").class_names == ("a", "b")
    os.rename(os.fsencode(tmp_path / "b"), os.fsencode(tmp_path) + b"/b\xff")
    with pytest.raises(DataError, match=r"the name of folder '.*b\\udcff' is no UTF-8 text; rename it"):
        load_source(f"folder:{tmp_path}")
