"""Models of `transformers` from a folder: what is loaded, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from fedloom.core import ConfigError
from fedloom.core.moe import need_moe_layers
from fedloom.models import NetworkSpec
from fedloom.own_model import own_spec
from toys.language_models import CLASSES, DECODERS, LENGTH, VOCAB, choice_spec, questions, text_spec, texts

SMALL = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}


def folder_spec(folder: Path | str, *, weights: str | None = None, shape: Any = (12,), **options: Any) -> Any:
    return NetworkSpec(f"transformers/{folder}", 4, shape, weights=weights, options=options, vocab_size=VOCAB)


def bert(**changes: Any) -> transformers.BertConfig:
    return transformers.BertConfig(**{**SMALL, "num_attention_heads": 4, "max_position_embeddings": 16, **changes})


@pytest.mark.parametrize("architecture", DECODERS)
def test_a_causal_model_comes_back_from_its_folder(architecture: str, tmp_path: Path) -> None:
    source = choice_spec(architecture).classifier().backbone.body
    source.save_pretrained(tmp_path)
    for shape, kind in (((12,), "Model"), ((2, 4, 12), "ForCausalLM")):
        module = folder_spec(tmp_path, shape=shape).classifier()
        body = module.backbone.body
        assert type(body).__name__.endswith(kind) and len(module.moe_layers) == 2
        own, theirs = body.base_model.state_dict(), source.base_model.state_dict()
        assert own.keys() == theirs.keys() and all(torch.equal(own[n], theirs[n]) for n in own)


def test_a_switch_transformer_gives_its_encoder(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = transformers.SwitchTransformersForConditionalGeneration(switch()).eval()
    source.save_pretrained(tmp_path)
    capfd.readouterr()
    module = folder_spec(tmp_path).classifier().eval()
    assert capfd.readouterr() == ("", "")
    assert not any("decoder" in name for name, _ in module.named_parameters())
    x = texts()
    with torch.no_grad():
        states = source.encoder(input_ids=x["input_ids"], attention_mask=x["attention_mask"]).last_hidden_state
        assert torch.equal(module(x)["feats"][2], states[2, 0])
    assert module.moe_layers[0].num_experts == 4


def test_a_dense_encoder_has_no_experts_and_no_pooler(tmp_path: Path) -> None:
    source = transformers.BertModel(bert())
    source.save_pretrained(tmp_path)
    module = folder_spec(tmp_path).classifier().eval()
    assert not any("pooler" in name for name, _ in module.named_parameters())
    with torch.no_grad():
        one = texts((5,), 5)
        states = source.eval()(one["input_ids"]).last_hidden_state
        torch.testing.assert_close(module(one)["feats"], states.mean(1))
    with pytest.raises(ConfigError, match="needs a network with mixture-of-experts layers"):
        need_moe_layers(module, "fedmoe")


def test_values_can_be_drawn_from_the_seed(tmp_path: Path) -> None:
    source = transformers.BertModel(bert())
    source.save_pretrained(tmp_path)
    first, second = (folder_spec(tmp_path, weights="random").classifier().state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    name = "embeddings.word_embeddings.weight"
    assert not torch.equal(first[f"backbone.body.{name}"], source.state_dict()[name])
    for weights in (None, "pretrained"):
        own = folder_spec(tmp_path, weights=weights).backbone().body.state_dict()
        assert torch.equal(own[name], source.state_dict()[name])


def test_half_precision_adapters_and_load_balance_hold_for_folders_too(tmp_path: Path) -> None:
    text_spec("deepseek_v3").classifier().backbone.body.save_pretrained(tmp_path)
    module = folder_spec(tmp_path, dtype="bfloat16", aux=0.1, lora={"rank": 2}).classifier()
    assert "aux_loss" in module(texts())
    assert {p.dtype for n, p in module.named_parameters() if "experts" in n and "shared" not in n} == {torch.bfloat16}
    assert module.get_parameter(module.moe_layers[0].gate[0]).dtype == torch.float32


def refusal(spec: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        spec.classifier()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_cannot_be_had_or_does_not_fit_is_refused_in_words(tmp_path: Path) -> None:
    assert "cannot be had" in refusal(folder_spec(tmp_path / "nowhere"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no_such_model"}))
    assert "cannot be had" in refusal(folder_spec(tmp_path))
    transformers.T5Config(vocab_size=VOCAB).save_pretrained(tmp_path)
    assert "is a t5, which is neither a causal model nor an encoder" in refusal(folder_spec(tmp_path))
    transformers.BertModel(bert(vocab_size=20)).save_pretrained(tmp_path)
    assert "; set data.tokenizer to the tokeniser of that model" in refusal(folder_spec(tmp_path))
    transformers.BertModel(bert(max_position_embeddings=8)).save_pretrained(tmp_path)
    assert "data.max_length is 12 and" in refusal(folder_spec(tmp_path))
    for broken in ([], {"model_type": "deepseek"}):
        (tmp_path / "config.json").write_text(json.dumps(broken))
        assert "cannot be had" in refusal(folder_spec(tmp_path))
    transformers.BertConfig(**{**bert().to_dict(), "vocab_size": -1}).save_pretrained(tmp_path)
    assert "set data.tokenizer" in refusal(folder_spec(tmp_path))
    said = refusal(folder_spec(tmp_path, upcycel={}))
    assert "unknown option of model transformers/" in said and "Did you mean 'upcycle'?" in said


@pytest.mark.parametrize("options", [{"aux": float("inf")}, {"lora": {"alpha": float("inf")}}])
def test_options_are_finite(options: Any, tmp_path: Path) -> None:
    transformers.BertModel(bert()).save_pretrained(tmp_path)
    said = refusal(folder_spec(tmp_path, **options))
    assert f"{next(iter(options))}" in said and "should be a finite number, got inf" in said


@pytest.mark.parametrize(("hidden", "dtype"), [(10, torch.float32), (16, torch.float64)])
def test_models_that_grouped_products_do_not_fit_run_when_passed_from_python(hidden: int, dtype: torch.dtype) -> None:
    config = {**MIXTRAL.to_dict(), "hidden_size": hidden, "head_dim": 4}
    made = transformers.MixtralModel(transformers.MixtralConfig(**config)).to(dtype)
    assert own_spec(made, CLASSES, (LENGTH,), 0, vocab_size=VOCAB).classifier()(texts())["logits"].isfinite().all()


def test_an_incomplete_checkpoint_is_refused_in_words(tmp_path: Path) -> None:
    transformers.BertModel(bert()).save_pretrained(tmp_path)
    transformers.BertConfig(**{**bert().to_dict(), "num_hidden_layers": 3}).save_pretrained(tmp_path)
    said = refusal(folder_spec(tmp_path))
    assert "holds no values of 16 tensors" in said and "give a complete checkpoint" in said


def switch() -> transformers.SwitchTransformersConfig:
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
    sparse = {"num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
    return transformers.SwitchTransformersConfig(vocab_size=VOCAB, **sizes, **sparse)


MIXTRAL = transformers.MixtralConfig(**SMALL, num_attention_heads=4, num_key_value_heads=2, num_local_experts=4)


@pytest.mark.parametrize(
    ("make", "experts"),
    [
        (lambda: transformers.MixtralForCausalLM(MIXTRAL), 4),
        (lambda: transformers.MixtralForSequenceClassification(MIXTRAL), 4),
        (lambda: transformers.SwitchTransformersForConditionalGeneration(switch()), 4),
        (lambda: transformers.SwitchTransformersEncoderModel(switch()), 4),
        (lambda: transformers.BertForMaskedLM(bert()), 0),
        (lambda: transformers.BertModel(bert()), 0),
    ],
)
def test_a_model_passed_from_python_is_a_backbone_whatever_its_head(make: Any, experts: int) -> None:
    for source in (make(), make):
        module = own_spec(source, 3, (12,), 0, vocab_size=VOCAB).classifier()
        out = module(texts())
        assert out["logits"].shape == (3, 3) and ("routing" in out) == bool(experts)
        assert {layer.num_experts for layer in module.moe_layers} == ({experts} if experts else set())
        out["logits"].sum().backward()
        idle = [n for n, p in module.named_parameters() if p.grad is None and "experts" not in n]
        assert not idle, idle


def test_a_causal_model_passed_from_python_scores_options() -> None:
    module = own_spec(transformers.MixtralForCausalLM(MIXTRAL), 4, (2, 4, 12), 0, vocab_size=VOCAB).classifier()
    assert module(questions())["choice_nll"].shape == (3, 4)
    with pytest.raises(ConfigError, match="MixtralModel has no head that predicts tokens"):
        own_spec(transformers.MixtralModel(MIXTRAL), 4, (2, 4, 12), 0, vocab_size=VOCAB)
    with pytest.raises(ConfigError, match="model MixtralModel reads texts"):
        own_spec(transformers.MixtralModel(MIXTRAL), 4, (3, 8, 8), 0)
