"""What a recipe's pictures are, and which are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fedloom.core.errors import ConfigError, DataError
from fedloom.pretraining.pictures import read
from toys.pretraining import tiny


def test_the_training_part_is_trained_on_and_the_test_part_kept_away(pictures: Path) -> None:
    own, tests = read(tiny(pictures))
    assert own.x.shape == (160, 3, 8, 8) and own.x.dtype == torch.uint8
    assert [len(test.x) for test in tests] == [80]
    assert sorted(own.words) == ["deep blue", "green leaf", "grey", "red"] and tests[0].words == own.words
    seen = {bytes(picture.numpy().tobytes()) for picture in own.x}
    assert not any(bytes(picture.numpy().tobytes()) in seen for picture in tests[0].x)


def test_whole_data_are_both_parts_in_order_and_no_test_of_their_own(pictures: Path) -> None:
    part, tests = read(tiny(pictures))
    whole, none = read(tiny(pictures, data={"whole": True}, zeroshot=[]))
    assert torch.equal(whole.x, torch.cat([part.x, tests[0].x])) and none == []
    assert torch.equal(whole.y, torch.cat([part.y, tests[0].y]))
    with pytest.raises(ConfigError, match=r"which data\.whole trains on as a whole; take it away from either"):
        read(tiny(pictures, data={"whole": True}))


def test_one_percent_of_data_without_a_test_part_is_held_out(pictures: Path) -> None:
    own, tests = read(tiny(pictures / "train"))
    assert (len(own.x), len(tests[0].x)) == (156, 4), "one of forty of every class"


def test_pictures_are_brought_to_the_size_that_the_tower_sees(pictures: Path) -> None:
    layer = {"model": {"vision_cfg": {"image_size": 16}}}
    own, tests = read(tiny(pictures, **layer))
    assert own.x.shape[1:] == tests[0].x.shape[1:] == (3, 16, 16)


def test_missing_data_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is nothing at that path"):
        read(tiny(tmp_path / "nowhere"))
    with pytest.raises(DataError, match=r"data\.root '.*' has no data set 'local/tiny-imagenet-32'"):
        read(tiny("x", data={"name": "local/tiny-imagenet-32", "root": str(tmp_path)}))


def test_grey_pictures_are_refused(tmp_path: Path) -> None:
    from PIL import Image

    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for k in range(4):
            Image.fromarray(np.full((8, 8), 40 * k, np.uint8)).save(tmp_path / name / f"{k}.png")
    with pytest.raises(DataError, match=r"has inputs of shape \[1, 8, 8\] and uint8; a CLIP learns from 8-bit colour"):
        read(tiny(tmp_path))


def test_class_names_that_do_not_fit_are_refused(pictures: Path) -> None:
    sentence = (
        r"class name '.*' of 'folder:.*' in '.*' takes [0-9]+ tokens; the text tower reads 8: raise model\.text_cfg"
    )
    with pytest.raises(ConfigError, match=sentence):
        read(tiny(pictures, model={"text_cfg": {"context_length": 8}}))
