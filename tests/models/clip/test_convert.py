"""Weights and configurations of CLIP between open_clip and transformers: the same features, and there and back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from fedloom.core import ConfigError
from fedloom.models.clip.convert import (
    is_transformers,
    open_clip_config,
    to_open_clip,
    to_transformers,
    transformers_config,
)
from fedloom.models.clip.words import fixed
from toys.small_clip import architecture, small_model


def clip_model(config: dict[str, Any]) -> Any:
    """A random `CLIPModel` of a `config.json`."""
    torch.manual_seed(1)
    return transformers.CLIPModel(transformers.CLIPConfig(**config)).eval()


def features(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Features of pictures and texts by either package."""
    x = torch.randn(5, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    ids = fixed(["cat", "red maple tree"], "a photo of a {}.", 24).ids
    with torch.no_grad():
        if isinstance(model, transformers.CLIPModel):
            seen, read = model.get_image_features(pixel_values=x), model.get_text_features(input_ids=ids)
            return seen.pooler_output, read.pooler_output
        return model.encode_image(x), model.encode_text(ids)


@pytest.mark.parametrize("quick_gelu", [False, True])
def test_a_model_of_open_clip_gives_the_same_features_in_transformers(quick_gelu: bool) -> None:
    model, wanted = small_model(quick_gelu=quick_gelu), architecture(quick_gelu=quick_gelu)
    other = clip_model(transformers_config(wanted))
    other.load_state_dict(to_transformers(model.state_dict()), strict=True)
    for mine, theirs in zip(features(model), features(other), strict=True):
        assert (mine - theirs).abs().max() < 1e-5
        assert mine.std() > 0.05  # features that say something
    assert torch.equal(model.logit_scale, other.logit_scale)


@pytest.mark.parametrize("act", ["gelu", "quick_gelu"])
def test_a_model_of_transformers_gives_the_same_features_in_open_clip(act: str) -> None:
    config = transformers_config(architecture())
    for part in ("text_config", "vision_config"):
        config[part] |= {"hidden_act": act, "intermediate_size": 100, "num_attention_heads": 4}
    other = clip_model(config)
    from fedloom.models.clip.compact import build_clip

    described = open_clip_config(other.config.to_dict())
    assert described["quick_gelu"] == (act == "quick_gelu")
    model = build_clip(described).eval()
    model.load_state_dict(to_open_clip(other.state_dict()), strict=True)
    for mine, theirs in zip(features(model), features(other), strict=True):
        assert (mine - theirs).abs().max() < 1e-5
    wrong = build_clip({**described, "quick_gelu": act == "gelu"}).eval()
    wrong.load_state_dict(model.state_dict())
    assert max((a - b).abs().max() for a, b in zip(features(wrong), features(other), strict=True)) > 1e-3


def test_there_and_back_gives_the_same_tensors() -> None:
    state = small_model().state_dict()
    there = to_transformers(state)
    assert is_transformers(there) and not is_transformers(state)
    back = to_open_clip(there)
    assert back.keys() == state.keys() and all(torch.equal(back[key], state[key]) for key in state)
    other = clip_model(transformers_config(architecture())).state_dict()
    again = to_transformers(to_open_clip(other))
    assert again.keys() == other.keys() and all(torch.equal(again[key], other[key]) for key in other)


def test_position_ids_of_older_files_are_no_weights() -> None:
    state = to_transformers(small_model().state_dict())
    older = {**state, "text_model.embeddings.position_ids": torch.arange(24)[None]}
    assert to_open_clip(older).keys() == to_open_clip(state).keys()


def test_what_a_configuration_leaves_out_is_transformers_default() -> None:
    found, full = open_clip_config({"model_type": "clip"}), transformers.CLIPConfig()
    assert found == open_clip_config(full.to_dict())
    assert found["quick_gelu"] and found["vision_cfg"]["patch_size"] == 32 and found["text_cfg"]["width"] == 512
    old = {"vision_config": {"patch_size": 16}, "vision_config_dict": {"patch_size": 14}, "text_config_dict": None}
    assert open_clip_config(old)["vision_cfg"]["patch_size"] == 14


def test_every_inner_width_survives_the_ratio() -> None:
    for width, inner in ((1664, 8192), (48, 100), (7, 29), (512, 2048), (1408, 6144)):
        given = {"vision_config": {"hidden_size": width, "intermediate_size": inner, "num_attention_heads": 1}}
        assert int(width * open_clip_config(given)["vision_cfg"]["mlp_ratio"]) == inner


def test_what_has_no_counterpart_is_refused() -> None:
    stem = small_model(stem=True)
    with pytest.raises(ConfigError, match=r"tensor 'visual.conv1.0.0.weight' is none of open_clip's CLIP"):
        to_transformers(stem.state_dict())
    with pytest.raises(ConfigError, match="a convolutional stem has no counterpart in transformers"):
        transformers_config(architecture(stem=True))
    whole = to_transformers(small_model().state_dict())
    with pytest.raises(ConfigError, match=r"tensor 'text_model.adapter.weight' is none of transformers' CLIPModel"):
        to_open_clip({**whole, "text_model.adapter.weight": torch.zeros(1)})
    part = {k: t for k, t in whole.items() if k != "text_model.encoder.layers.0.self_attn.k_proj.bias"}
    with pytest.raises(ConfigError, match=r"lack 'text_model.encoder.layers.0.self_attn.k_proj.bias'"):
        to_open_clip(part)
    with pytest.raises(ConfigError, match=r"do not fit each other: .*k_proj.bias' has shape \[3\] and "):
        to_open_clip({**whole, "text_model.encoder.layers.0.self_attn.k_proj.bias": torch.zeros(3)})
    for wrong, words in (
        ({"text_config": {"layer_norm_eps": 1e-6}}, "layer_norm_eps of the CLIPModel is 1e-06"),
        ({"text_config": {"hidden_act": "gelu"}}, "hidden_act of the CLIPModel is gelu and quick_gelu"),
        ({k: {"hidden_act": "relu"} for k in ("text_config", "vision_config")}, "hidden_act of the CLIPModel is relu"),
    ):
        with pytest.raises(ConfigError, match=words):
            open_clip_config(wrong)
