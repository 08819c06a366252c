"""Vision-language models as specs: towers with words for methods, image towers as backbones, the user's own model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fedloom.core import ConfigError
from fedloom.models import NetworkSpec, names
from fedloom.models.clip.checkpoint import OPENAI
from fedloom.models.clip.network import ClipNetwork
from fedloom.models.clip.pictures import normalization, renormalized
from fedloom.models.clip.words import fixed, learnable
from fedloom.own_model import identity, own_spec
from toys.small_clip import MEAN, STD, architecture, small_model, write_folder

CIFAR = ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))
WORDS = ("cat", "polar bear", "sea")


def spec(folder: Path | None, name: str = "clip_small", shape: Any = (3, 32, 32), **changes: Any) -> NetworkSpec:
    mean, std = CIFAR
    given = {"weights": "random" if folder is None else str(folder), "mean": mean, "std": std, "words": WORDS}
    return NetworkSpec(name, 3, shape, **{**given, **changes})


def pictures(channels: int = 3) -> torch.Tensor:
    """Four pictures in [0, 1]."""
    return torch.rand(4, channels, 32, 32, generator=torch.Generator().manual_seed(0))


def normalized(x: torch.Tensor, mean: Any, std: Any) -> torch.Tensor:
    return (x - torch.tensor(mean).view(-1, 1, 1)) / torch.tensor(std).view(-1, 1, 1)


@pytest.mark.parametrize("stem", [False, True])
def test_the_network_scores_pictures_as_open_clip_does(tmp_path: Path, stem: bool) -> None:
    model = write_folder(tmp_path, stem=stem).eval()
    found = spec(tmp_path, repeats=False).clip()
    assert found.words == WORDS and not found.repeats and found.normalize == (*CIFAR, MEAN, STD)
    network = ClipNetwork(found, fixed(WORDS, "a photo of a {}.", 24)).eval()
    x = pictures()
    with torch.no_grad():
        out = network(normalized(x, *CIFAR))
        seen = model.encode_image(normalized(x, MEAN, STD), normalize=True)
        texts = model.encode_text(fixed(WORDS, "a photo of a {}.", 24).ids, normalize=True)
    torch.testing.assert_close(out["logits"], model.logit_scale.exp() * seen @ texts.T, atol=1e-4, rtol=1e-4)
    assert not any(p.requires_grad for p in network.parameters())


def test_random_values_are_the_same_whenever_they_are_asked_for() -> None:
    options = {"config": {"model_cfg": architecture(), "preprocess_cfg": {}}}
    first, again, other = (spec(None, options=options, seed=seed).clip().towers.state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not torch.equal(first["model.visual.proj"], other["model.visual.proj"])


def test_statistics_that_agree_or_that_the_data_lack_need_nothing() -> None:
    assert normalization(OPENAI, OPENAI) is None and normalization(((), ()), OPENAI) is None
    x = pictures()
    both = normalization(CIFAR, (MEAN, STD))
    torch.testing.assert_close(renormalized(normalized(x, *CIFAR), both), normalized(x, MEAN, STD))
    assert renormalized(x, None) is x


def test_grey_pictures_are_shown_in_three_equal_channels(tmp_path: Path) -> None:
    model = write_folder(tmp_path).eval()
    grey = spec(tmp_path, shape=(1, 32, 32), mean=(0.3,), std=(0.2,))
    x = pictures(1)
    with torch.no_grad():
        seen = ClipNetwork(grey.clip(), fixed(WORDS, "{}", 24)).eval()(normalized(x, [0.3], [0.2]))["feats"]
        wanted = model.encode_image(normalized(x.expand(-1, 3, -1, -1), MEAN, STD), normalize=True)
        torch.testing.assert_close(seen, wanted, atol=1e-5, rtol=1e-5)
        assert grey.backbone()(normalized(x, [0.3], [0.2])).shape == (4, 32)


@pytest.mark.parametrize("stem", [False, True])
def test_the_image_tower_is_a_trainable_backbone(tmp_path: Path, stem: bool) -> None:
    model = write_folder(tmp_path, stem=stem).eval()
    body = spec(tmp_path).backbone().eval()
    x = pictures()
    torch.testing.assert_close(
        body(normalized(x, *CIFAR)), model.encode_image(normalized(x, MEAN, STD)), atol=1e-5, rtol=1e-5
    )
    assert body.num_features == 32 and all(p.requires_grad for p in body.parameters())
    assert not any(name.startswith(("token", "transformer", "ln_final")) for name, _ in body.named_parameters())
    network = spec(tmp_path).classifier()
    assert network.class_rows == {"head.weight": 0, "head.bias": 0}
    plain, again = (gradients(network, x, recompute) for recompute in (False, True))
    assert all(p.grad is not None for p in network.parameters())
    for name in plain:
        torch.testing.assert_close(plain[name], again[name], atol=1e-6, rtol=1e-4)


def gradients(network: Any, x: torch.Tensor, recompute: bool) -> dict[str, torch.Tensor]:
    network.eval().zero_grad()
    network.set_grad_checkpointing(recompute)
    network(x)["logits"].square().sum().backward()
    return {name: p.grad.clone() for name, p in network.named_parameters()}


def test_vision_language_models_are_listed() -> None:
    assert "fedloom pretrain-clip clip-small" in names()["clip_small"] and "ViT-B-16" in names()["open_clip/NAME"]


@pytest.mark.parametrize(
    ("shape", "changes", "words"),
    [
        ((3, 64, 64), {}, r"clip_small reads pictures of 32x32, and the data have 64x64; set data.image_size: 32"),
        ((64,), {}, r"needs pictures \[C, H, W\], got input_shape \[64\]"),
        ((4, 32, 32), {}, "reads pictures of 3 channels, and the data have 4"),
        ((1, 32, 32), {"mean": (), "std": ()}, "the data are numbers of 1; repeat the channel three times"),
    ],
)
def test_data_that_a_clip_cannot_see_are_refused(tmp_path: Path, shape: Any, changes: Any, words: str) -> None:
    write_folder(tmp_path)
    for ask in (spec(tmp_path, shape=shape, **changes).clip, spec(tmp_path, shape=shape, **changes).backbone):
        with pytest.raises(ConfigError, match=words):
            ask()


def test_texts_and_other_models_are_refused(tmp_path: Path) -> None:
    write_folder(tmp_path)
    with pytest.raises(ConfigError, match="model clip_small cannot read texts; use switch_encoder"):
        spec(tmp_path, shape=(16,), vocab_size=300).backbone()
    with pytest.raises(
        ConfigError, match=r"needs a vision-language model, and model mlp is none; set model.name to clip_"
    ):
        NetworkSpec("mlp", 3, (4,)).clip()
    with pytest.raises(ConfigError, match=r"unknown model 'open_clip/'"):
        NetworkSpec("open_clip/", 3, (3, 32, 32)).backbone()


def test_a_class_name_that_is_too_long_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path)
    found = spec(tmp_path, words=("cat", "a very long name of a class that nobody would use", "sea")).clip()
    with pytest.raises(
        ConfigError, match=r"takes 30 tokens and the text tower reads 24; shorten the name \(model.options"
    ):
        learnable(found.words, 16, found.towers.length)


def test_one_class_is_scored(tmp_path: Path) -> None:
    write_folder(tmp_path)
    found = NetworkSpec("clip_small", 1, (3, 32, 32), weights=str(tmp_path), words=("cat",)).clip()
    assert ClipNetwork(found, fixed(found.words, "{}", 24))(pictures())["logits"].shape == (4, 1)


def own(model: Any, **changes: Any) -> Any:
    from dataclasses import replace

    mean, std = CIFAR
    return replace(own_spec(model, 3, (3, 32, 32), 0), words=WORDS, mean=mean, std=std, **changes)


def test_the_users_own_clip_is_a_spec() -> None:
    model = small_model()
    model.visual.preprocess_cfg = {"mean": MEAN, "std": STD}
    for source in (model, small_model):
        found = own(source).clip()
        assert found.words == WORDS and found.normalize[2:] == ((MEAN, STD) if source is model else OPENAI)
        assert torch.equal(found.towers.model.visual.proj, model.visual.proj)
    assert all(p.requires_grad for p in model.parameters()), "the user's model is left as it was"
    x = normalized(pictures(), *CIFAR)
    with torch.no_grad():
        feats = own(model).classifier().eval()(x)["feats"]
        torch.testing.assert_close(feats, model.encode_image(normalized(pictures(), MEAN, STD)), atol=1e-5, rtol=1e-5)


def test_the_users_own_clip_may_be_frozen_and_in_half_precision() -> None:
    model = small_model().half().requires_grad_(False)
    found = own(model).clip()
    assert found.towers.model.visual.proj.dtype == torch.float32
    assert identity(model).startswith("object:CLIP-") and identity(model) != identity(small_model(1))


def test_another_model_of_the_users_is_no_clip() -> None:
    with pytest.raises(
        ConfigError, match=r"needs a vision-language model, and Linear is none; pass one of open_clip's"
    ):
        own_spec(torch.nn.Linear(4, 3), 3, (4,), 0).clip()
    with pytest.raises(ConfigError, match=r"model CLIP has a text tower without causal mask; take a CLIP of plain"):
        broken = small_model()
        broken.attn_mask = None
        own(broken).clip()
