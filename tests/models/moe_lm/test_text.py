"""Features of texts, and where they are used."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fedloom.core import ConfigError, Net
from fedloom.models import NetworkSpec
from fedloom.models.experts import ExpertPool
from toys.language_models import ARCHITECTURES, text_spec, texts


def test_features_of_an_encoder_are_the_mean_over_its_tokens() -> None:
    backbone, x = text_spec("switch_encoder").backbone().eval(), texts()
    with torch.no_grad():
        features = backbone(x)
        for row, length in enumerate((12, 7, 1)):
            states = backbone.body(input_ids=x["input_ids"][row : row + 1, :length]).last_hidden_state
            torch.testing.assert_close(features[row], states[0].mean(0), atol=1e-6, rtol=1e-5)


def test_features_of_a_decoder_are_those_of_the_last_token() -> None:
    backbone, x = text_spec("mixtral").backbone().eval(), texts()
    with torch.no_grad():
        features = backbone(x)
        for row, length in enumerate((12, 7, 1)):
            states = backbone.body(input_ids=x["input_ids"][row : row + 1, :length]).last_hidden_state
            torch.testing.assert_close(features[row], states[0, -1], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_text_without_tokens_is_finite_and_counts_nowhere(architecture: str) -> None:
    module, x = text_spec(architecture, aux=0.1).classifier(), texts((12, 1))
    x["attention_mask"][1] = False
    out = module(x)
    assert all(torch.isfinite(tensor).all() for tensor in out.values())
    assert out["token_mask"].sum() == 12
    alone = module.eval()(texts((12,)))["aux_loss"]
    torch.testing.assert_close(module(x)["aux_loss"], alone)


@pytest.mark.parametrize("architecture", ["switch_encoder", "deepseek_v2"])
def test_texts_pass_an_expert_pool_of_another_method(architecture: str) -> None:
    pool = ExpertPool(text_spec(architecture).backbone(), 3, experts=2)
    net = Net(lambda: pool)
    out = net(texts())
    assert out["expert_logits"].shape == (2, 3, 3) and "routing" not in out
    out["logits"].sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in pool.parameters() if p.grad is not None)


def test_a_load_balance_needs_the_classifier() -> None:
    with pytest.raises(ConfigError, match=r"model.options.aux is 0.1, and this method puts heads of its own"):
        text_spec("mixtral", aux=0.1).backbone()


def test_networks_and_data_of_different_kinds_are_refused_in_words() -> None:
    with pytest.raises(ConfigError, match="model switch_encoder reads texts"):
        NetworkSpec("switch_encoder", 3, (3, 8, 8)).classifier()
    with pytest.raises(ConfigError, match="model mlp cannot read texts"):
        NetworkSpec("mlp", 3, (12,), vocab_size=50).classifier()
    with pytest.raises(ConfigError, match=r"unknown model 'swich_encoder'.*switch_encoder"):
        NetworkSpec("swich_encoder", 3, (12,), vocab_size=50).classifier()


def test_weights_from_a_file_need_a_tied_tensor_once(tmp_path: Path) -> None:
    source = text_spec("switch_encoder").backbone()
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(3))
    path = tmp_path / "weights.safetensors"
    save_file({name: p.detach() for name, p in source.named_parameters()}, path)
    spec = text_spec("switch_encoder")
    loaded = NetworkSpec(spec.name, 3, (12,), weights=str(path), options=spec.options, vocab_size=50).backbone()
    assert all(torch.equal(a, b) for a, b in zip(source.parameters(), loaded.parameters(), strict=True))
    assert loaded.body.shared.weight is loaded.body.encoder.embed_tokens.weight


def test_options_stay_hashable() -> None:
    spec = text_spec("mixtral", lora={"targets": ["experts"], "rank": 2})
    assert hash(spec) == hash(text_spec("mixtral", lora={"rank": 2, "targets": ["experts"]}))
    assert dict(spec.options)["lora"] == (("rank", 2), ("targets", ("experts",)))
