"""Zero-shot CLIP: the logits of the published model, the ensemble of sentences, and runs in which nothing travels."""

import pytest
import torch

from fedloom.core import ConfigError
from fedloom.methods.zeroshot import ZeroShot, imagenet_templates, zeroshot
from fedloom.models.clip.words import fixed
from toys.clip import WORDS, ClipSpec, toy_model
from toys.federation import experiment
from toys.running import rows, start

NAME = "fedloom.methods.zeroshot:zeroshot"
X = torch.randn(5, 2, generator=torch.Generator().manual_seed(0))


def unit(x):
    return x / x.norm(dim=-1, keepdim=True)


def texts(model, template):
    return unit(model.encode_text(fixed(WORDS[:6], template, 24).ids))


@torch.no_grad()
def test_logits_are_the_models_own():
    model, net = toy_model(), zeroshot(template="a bad photo of a {}.").module(ClipSpec())
    expected = 10 * unit(model.visual(X)) @ texts(model, "a bad photo of a {}.").T
    assert torch.allclose(net.eval()(X)["logits"], expected, atol=1e-5)


@torch.no_grad()
def test_the_ensemble_is_the_normalised_mean_of_eighty_sentences():
    model, net = toy_model(), zeroshot(templates="ensemble").module(ClipSpec())
    assert len(imagenet_templates()) == len(set(imagenet_templates())) == 80
    mean = unit(torch.stack([texts(model, template) for template in imagenet_templates()]).mean(0))
    out = net.eval()(X)
    assert torch.allclose(out["texts"], mean, atol=1e-5)
    assert torch.allclose(out["texts"].norm(dim=-1), torch.ones(6))
    net.show((1, 4))
    assert torch.allclose(net(X)["texts"], mean[[1, 4]], atol=1e-5)
    assert torch.isneginf(net(X)["logits"][:, [0, 2, 3, 5]]).all()


def test_nothing_trains_and_nothing_travels(tmp_path):
    whole = experiment(NAME)
    assert whole.net().trainable == () and whole.method.exchanges() == {}
    summary = start(tmp_path / "run", whole)
    for key in ("bytes_up", "bytes_down", "sample_visits", "pass_visits", "rounds", "failed_clients"):
        assert summary[key] == 0
    assert rows(tmp_path / "run") == [] and len(rows(tmp_path / "run", "stage")) == 3
    assert summary["final_accuracy"] is not None and summary["parameters"] > 0


def test_a_task_is_answered_alike_at_every_stage_but_for_the_classes_that_have_arrived(tmp_path):
    """Nothing is forgotten: within its own task every row of the matrix says the same."""
    one = start(tmp_path / "one", experiment(NAME, num_stages=1))
    three = start(tmp_path / "three", experiment(NAME, num_stages=3))
    assert rows(tmp_path / "three", "stage")[-1]["accuracy"] == one["final_accuracy"] == three["final_accuracy"]


def test_a_template_without_a_place_for_the_name_is_refused():
    with pytest.raises(ConfigError, match=r"must hold \{\} once"):
        zeroshot(template="a photo").module(ClipSpec())


def test_one_sentence_is_an_ensemble_of_one():
    assert zeroshot() == ZeroShot(("a photo of a {}.",)) != zeroshot(templates="ensemble") == ZeroShot()
