"""The compact CLIP: its size, its stem, and what does not fit."""

from __future__ import annotations

import pytest
import torch

from fedloom.core import ConfigError
from fedloom.models.clip.compact import CLIP_SMALL, ConvStem, build_clip


def test_the_small_clip_has_at_most_eight_million_parameters():
    with torch.device("meta"):
        model = build_clip(CLIP_SMALL)
    assert sum(p.numel() for p in model.parameters()) == 7_856_849
    assert model.visual.positional_embedding.shape == (17, 160)


def test_the_stem_halves_the_picture_once_per_further_width():
    stem = ConvStem([8, 12, 16], [1, 0]).eval()
    assert stem(torch.randn(2, 3, 16, 16)).shape == (2, 16, 4, 4)


def test_a_stem_that_does_not_fit_the_tower_is_refused():
    config = {**CLIP_SMALL, "stem": {"widths": [8, 16], "blocks": [0]}}
    with pytest.raises(ConfigError, match="the stem gives patches of 2 and width 16, the image tower has patch_size 8"):
        build_clip(config)


@pytest.mark.parametrize(
    "stem",
    [{}, [1], {"widths": [], "blocks": []}, {"widths": [8, 16]}, {"widths": [8, "a"], "blocks": [0]},
     {"widths": [8, 16], "blocks": [-1]}, {"widths": [8, 16], "blocks": [0, 0]}, {"widths": [-8, 16], "blocks": [0]}],
)  # fmt: skip
def test_what_describes_no_stem_is_refused(stem):
    with pytest.raises(ConfigError, match="stem must hold widths, whole numbers from 1 on, and blocks"):
        build_clip({**CLIP_SMALL, "stem": stem})


def test_a_tower_with_a_stem_may_leave_out_its_patch_size():
    vision = {key: value for key, value in CLIP_SMALL["vision_cfg"].items() if key != "patch_size"}
    with pytest.raises(
        ConfigError, match="the stem gives patches of 8 and width 160, the image tower has patch_size 16"
    ):
        build_clip({**CLIP_SMALL, "vision_cfg": vision})
