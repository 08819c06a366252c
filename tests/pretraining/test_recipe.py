"""The recipe's tree: what is refused, and that it says everything once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fedloom.core.errors import ConfigError
from fedloom.models.clip.compact import CLIP_SMALL, build_clip
from fedloom.pretraining.recipe import Recipe, recipe_names, resolve


def test_clip_small_is_the_architecture_and_the_defaults() -> None:
    tree = resolve("clip-small").as_dict()
    assert tree["model"] == CLIP_SMALL
    assert tree["text"] == {
        "steps": 2000, "batch_size": 512, "lr": 0.002, "weight_decay": 0.01, "words": 16000, "warmup": 100,
    }  # fmt: skip
    assert tree["images"] == {
        "epochs": 24, "batch_size": 128, "lr": 0.001, "weight_decay": 0.05, "label_smoothing": 0.05, "scale": 20.0,
        "cutmix": 0.5, "zoom": 0.35, "warmup": 500,
    }  # fmt: skip
    assert tree["data"] == {"name": "local/tiny-imagenet-32", "root": None, "whole": True}
    assert tree["zeroshot"] == ["uoft-cs/cifar100", "zh-plus/tiny-imagenet"] and tree["seed"] == 0
    assert recipe_names() == ["clip-small"]


def test_clip_small_has_7_9_million_parameters_and_16_megabytes() -> None:
    with torch.device("meta"):
        model = build_clip(CLIP_SMALL)
    count = sum(p.numel() for p in model.parameters())
    assert count == 7_856_849
    sizes = (v.numel() * (2 if v.is_floating_point() else 8) for v in model.state_dict().values())
    assert sum(sizes) < 15_900_000


def test_a_file_of_ones_own_needs_data_alone(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("data: {name: 'folder:/pictures'}\nmodel: {embed_dim: 64, stem: null}\nimages.epochs: 3\n")
    tree = resolve(str(path), {"images": {"lr": 0.1}})
    assert (tree.data.name, tree.data.whole, tree.zeroshot) == ("folder:/pictures", False, ())
    assert (tree.model.embed_dim, tree.model.stem, tree.model.vision_cfg.width) == (64, None, 160)
    assert (tree.images.epochs, tree.images.lr, tree.images.batch_size) == (3, 0.1, 128)


def test_a_resolved_tree_resolves_to_itself(tmp_path: Path) -> None:
    tree = resolve("clip-small", {"seed": 3, "model": {"stem": None}})
    assert Recipe.model_validate_json(tree.model_dump_json()) == tree


@pytest.mark.parametrize(
    ("layer", "sentence"),
    [
        ({"images": {"lr": 0.0}}, "images.lr must be above 0, got 0.0"),
        ({"images": {"epochs": "x"}}, "images.epochs must be a whole number, got 'x'"),
        ({"images": {"cutmix": 1.5}}, "images.cutmix must be in [0, 1], got 1.5"),
        ({"text": {"step": 3}}, "unknown key 'text.step'. Did you mean 'text.steps'?"),
        ({"zeroshot": "uoft-cs/cifar100"}, "zeroshot must be a list, got 'uoft-cs/cifar100'"),
        ({"data": {"name": None}}, "data.name must be text, got None"),
        ({"model": {"text_cfg": {"vocab_size": 100}}}, "model.text_cfg.vocab_size must be at least 49408, got 100"),
        ({"model": {"vision_cfg": {"patch_size": 5}}}, "image_size is 32, which model.vision_cfg.patch_size, 5, does"),
        ({"model": {"vision_cfg": {"head_width": 33}}}, "model.vision_cfg.head_width, 33, does not divide"),
        ({"model": {"text_cfg": {"heads": 5}}}, "model.text_cfg.width is 96, which model.text_cfg.heads, 5, does not"),
        ({"model": {"stem": {"blocks": [1]}}}, "model.stem has 4 widths and 1 blocks; give one width more than blocks"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
    ],
)  # fmt: skip
def test_a_bad_value_is_one_sentence(layer: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve("clip-small", layer)
    assert sentence in str(caught.value)
    assert caught.value.exit_code == 2


def test_recipes_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown recipe for pretraining 'clip-smal'\. Did you mean 'clip-small'\?"):
        resolve("clip-smal")
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        resolve(str(tmp_path / "none.yaml"))
    (tmp_path / "empty.yaml").write_text("seed: 1\n")
    with pytest.raises(ConfigError, match="data is missing: give it a value"):
        resolve(str(tmp_path / "empty.yaml"))
