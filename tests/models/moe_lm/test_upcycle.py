"""A dense model with experts added computes what it did, and its experts then part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from fedloom.core import ConfigError
from fedloom.core.moe import expert_names
from fedloom.models import NetworkSpec
from toys.language_models import VOCAB, texts

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
}


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bert")
    torch.manual_seed(0)
    model = transformers.BertModel(transformers.BertConfig(**SIZES))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))  # biases that are not 0, and layers that do something
    model.save_pretrained(folder)
    return folder


def module(folder: Path, **upcycle: Any) -> Any:
    options = {"upcycle": {"experts": 4, **upcycle}}
    return NetworkSpec(f"transformers/{folder}", 3, (12,), 0, "pretrained", options, VOCAB).classifier().eval()


def dense(folder: Path) -> Any:
    return NetworkSpec(f"transformers/{folder}", 3, (12,), 0, "pretrained", {}, VOCAB).classifier().eval()


@pytest.mark.parametrize(
    ("options", "same"),
    [
        ({}, True),
        ({"combine": "renormalised"}, True),
        ({"combine": "renormalised", "top_k": 2}, True),
        ({"combine": "straight_through", "top_k": 2}, True),
        ({"combine": "probability"}, False),
        ({"noise": 0.5}, False),
    ],
)
def test_the_output_at_the_start_is_that_of_the_dense_model(bert: Path, options: Any, same: bool) -> None:
    with torch.no_grad():
        gap = (module(bert, **options)(texts())["logits"] - dense(bert)(texts())["logits"]).abs().max()
    assert (gap < 1e-6) if same else (gap > 1e-3)


@pytest.mark.parametrize(
    ("combine", "learns"), [("straight_through", True), ("probability", True), ("renormalised", False)]
)
def test_the_task_gives_the_gate_a_gradient_unless_weights_are_renormalised(
    bert: Path, combine: str, learns: bool
) -> None:
    net = module(bert, combine=combine)
    net(texts())["logits"].square().sum().backward()
    for layer in net.moe_layers:
        norm = net.get_parameter(layer.gate[0]).grad.norm()
        assert (norm > 1e-4) if learns else (norm < 1e-6)


def test_the_parameter_count_is_that_of_the_copies_and_the_gates(bert: Path) -> None:
    def count(net: Any) -> int:
        return sum(p.numel() for p in net.parameters())

    feed_forward = 16 * 24 + 24 + 24 * 16 + 16
    for experts, layers in ((4, None), (4, [0, 1, 3]), (1, [2])):
        chosen = 2 if layers is None else len(layers)
        added = chosen * ((experts - 1) * feed_forward + experts * 16)
        assert count(module(bert, experts=experts, layers=layers)) == count(dense(bert)) + added


def test_experts_are_copies_and_gates_are_drawn_for_each_layer(bert: Path) -> None:
    net, source = module(bert), transformers.BertModel.from_pretrained(bert)
    assert [int(layer.name.split("layer.")[1].split(".")[0]) for layer in net.moe_layers] == [1, 3]
    gates = [net.get_parameter(layer.gate[0]) for layer in net.moe_layers]
    assert not torch.equal(*gates) and all(0.01 < gate.std() < 0.03 for gate in gates)
    for index, layer in zip((1, 3), net.moe_layers, strict=True):
        block, old = net.get_submodule(layer.name), source.encoder.layer[index]
        for stacked, one in (
            (block.experts.up, old.intermediate.dense.weight),
            (block.experts.up_bias, old.intermediate.dense.bias),
            (block.experts.down, old.output.dense.weight),
            (block.experts.down_bias, old.output.dense.bias),
        ):
            assert torch.equal(stacked, one.expand_as(stacked))
        assert layer.hidden == 16 and len(layer.expert_names) == 4


def test_noise_is_relative_to_each_tensor(bert: Path) -> None:
    quiet, noisy = module(bert), module(bert, noise=0.1)
    for name in expert_names(quiet.moe_layers):
        gap = noisy.get_parameter(name) - quiet.get_parameter(name)
        if name.endswith("bias"):
            assert not gap.any()
        else:
            assert gap.std().item() == pytest.approx(0.1 * quiet.get_parameter(name)[0].std().item(), rel=0.15)
            assert not torch.equal(noisy.get_parameter(name)[0], noisy.get_parameter(name)[1])


def test_after_a_step_experts_that_saw_other_tokens_differ(bert: Path) -> None:
    net = module(bert).train(False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    out = net(texts())
    used = out["dispatched"][0].any(0).nonzero().flatten().tolist()
    unused = [e for e in range(4) if e not in used]
    out["logits"].square().sum().backward()
    up = net.get_submodule(net.moe_layers[0].name).experts.up
    start = up.detach().clone()
    optimizer.step()
    assert len(used) > 1
    assert all(not torch.equal(up[a], up[b]) for a in used for b in used if a < b)
    assert torch.equal(up[unused], start[unused])


def test_values_survive_a_file(bert: Path, tmp_path: Path) -> None:
    source = module(bert, noise=0.1)
    path = tmp_path / "weights.safetensors"
    save_file({n: p.detach() for n, p in source.backbone.named_parameters()}, path)
    options = {"upcycle": {"experts": 4}}
    loaded = NetworkSpec(f"transformers/{bert}", 3, (12,), 5, str(path), options, VOCAB).classifier().eval()
    with torch.no_grad():
        assert torch.equal(loaded(texts())["feats"], source(texts())["feats"])


@pytest.mark.parametrize("top_k", [1, 2])
def test_a_llama_becomes_a_mixtral_of_the_same_function(top_k: int, tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2, pad_token_id=None)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    for shape in ((12,), (2, 4, 12)):
        spec = NetworkSpec(f"transformers/{tmp_path}", 4, shape, 0, "pretrained", {}, VOCAB)
        how = {"upcycle": {"experts": 3, "top_k": top_k, "combine": "renormalised"}}
        made = NetworkSpec(f"transformers/{tmp_path}", 4, shape, 0, "pretrained", how, VOCAB).classifier().eval()
        assert len(made.moe_layers) == 4 and made.moe_layers[0].num_experts == 3
        if len(shape) == 1:
            with torch.no_grad():
                torch.testing.assert_close(
                    made(texts())["logits"], spec.classifier().eval()(texts())["logits"], atol=1e-6, rtol=1e-5
                )
        else:
            assert type(made.backbone.body).__name__ == "MixtralForCausalLM"
            assert torch.equal(made.backbone.body.lm_head.weight, spec.classifier().backbone.body.lm_head.weight)


def refusal(folder: Path, **upcycle: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        module(folder, **upcycle)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_cannot_be_upcycled_is_refused_in_words(bert: Path, tmp_path: Path) -> None:
    assert "layers is [4], and transformers/" in refusal(bert, layers=[4])
    assert "top_k is 5 of 4 experts" in refusal(bert, top_k=5)
    assert "combine of transformers/" in refusal(bert, combine="sum")
    llama = transformers.LlamaConfig(**SIZES, pad_token_id=None)
    transformers.LlamaModel(llama).save_pretrained(tmp_path / "llama")
    assert "set combine to renormalised and layers to null" in refusal(tmp_path / "llama", layers=[1])
    gpt = transformers.GPT2Config(vocab_size=VOCAB, n_embd=16, n_head=4, n_layer=2, n_positions=16)
    transformers.GPT2Model(gpt).save_pretrained(tmp_path / "gpt")
    assert "is neither an encoder in the make of BERT nor a decoder" in refusal(tmp_path / "gpt")
    sparse = transformers.MixtralConfig(**SIZES, num_key_value_heads=4, num_local_experts=2, pad_token_id=None)
    transformers.MixtralModel(sparse).save_pretrained(tmp_path / "mixtral")
    assert "is a mixture of experts already" in refusal(tmp_path / "mixtral")
