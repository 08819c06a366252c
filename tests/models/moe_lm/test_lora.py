"""Low-rank adapters: what trains, what travels, and which slices belong to which expert."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedloom.core import ConfigError, Net
from toys.language_models import ARCHITECTURES, permuted, text_spec, texts

EVERY = pytest.mark.parametrize("architecture", ARCHITECTURES)
RANK = 3


def network(architecture: str, **lora: Any) -> Any:
    """A network whose adapters are no longer at their start, where they do nothing."""
    options = {"rank": RANK, "alpha": 6.0, "targets": ["experts"], **lora}
    module = text_spec(architecture, lora=options).classifier().eval()
    with torch.no_grad():
        for name, p in module.named_parameters():
            if "lora_B" in name:
                p.normal_(generator=torch.Generator().manual_seed(1))
    return module


def block_outputs(module: Any, index: int) -> torch.Tensor:
    kept = []
    block = module.get_submodule(module.moe_layers[index].name)
    handle = block.register_forward_hook(lambda m, args, out: kept.append(out))
    with torch.no_grad():
        module(texts())
    handle.remove()
    return kept[0].reshape(-1, 16)


@EVERY
def test_adapters_start_as_the_model_itself(architecture: str) -> None:
    adapted = text_spec(architecture, lora={"targets": ["experts", "attention"]}).classifier().eval()
    plain = text_spec(architecture).classifier().eval()
    with torch.no_grad():
        torch.testing.assert_close(adapted(texts())["logits"], plain(texts())["logits"])


@EVERY
def test_only_adapters_gates_and_the_head_train_and_travel(architecture: str) -> None:
    spec = text_spec(architecture, lora={"rank": RANK, "targets": ["experts", "attention"]})
    net = Net(spec.classifier)
    travels = net.fresh()["params"]
    gates = {name for layer in net.module.moe_layers for name in layer.gate}
    biases = net.fresh()["buffers"].keys()
    assert travels.keys() == set(net.trainable)
    others = {n for n in travels if "lora_" not in n and n not in gates}
    assert others == {"head.weight", "head.bias"}
    assert gates <= travels.keys() | biases and gates
    assert {"lora_A", "lora_B"} == {part for n in travels for part in n.split(".") if part.startswith("lora_")}
    assert any("attn" in n or "Attention" in n for n in travels)
    count = sum(p.numel() for p in travels.values())
    assert count < sum(p.numel() for p in text_spec(architecture).classifier().parameters())
    before = {n: p.detach().clone() for n, p in net.module.named_parameters()}
    out = net(texts())
    (out["logits"].square().sum() + out["routing"].exp()[0, :, 0].sum()).backward()
    assert {n for n, p in net.module.named_parameters() if p.grad is not None and p.grad.any()} <= travels.keys()
    assert all(net.module.get_parameter(n).grad is not None for n in travels if "lora_B" in n and "experts" not in n)
    assert before.keys() > travels.keys()


@EVERY
def test_an_experts_slices_of_the_adapters_change_only_the_tokens_dispatched_to_it(architecture: str) -> None:
    module = network(architecture)
    params = dict(module.named_parameters())
    for index, layer in enumerate(module.moe_layers):
        with torch.no_grad():
            dispatched = module(texts())["dispatched"][index]
        assert all("lora_" in name for name in layer.expert_names)
        for expert, parts in enumerate(layer.experts):
            for part in parts:  # each of them alone: neither rows nor columns may belong to a neighbour
                assert part.of(params).numel() == params[part.name].numel() // (4 if part.index else 1)
                before, kept = block_outputs(module, index), part.of(params).detach().clone()
                with torch.no_grad():
                    part.of(params).add_(torch.randn(kept.shape, generator=torch.Generator().manual_seed(2)))
                moved = ~torch.isclose(block_outputs(module, index), before, atol=1e-7).all(1)
                with torch.no_grad():
                    part.of(params).copy_(kept)
                assert torch.equal(moved, dispatched[:, expert]), part


def test_adapters_alone_in_another_order_are_no_longer_the_same_function() -> None:
    module = network("mixtral")
    params = {n: p.detach().clone() for n, p in module.named_parameters() if p.requires_grad}
    orders = torch.tensor([[1, 0, 2, 3], [0, 1, 2, 3]])
    moved = permuted(params, module.moe_layers, orders)
    with torch.no_grad():
        before = module(texts())
        for name, value in moved.items():
            module.get_parameter(name).copy_(value)
        after = module(texts())
    assert torch.equal(after["routing"][0], before["routing"][0][:, orders[0]])
    assert not torch.allclose(after["logits"], before["logits"])  # the frozen experts stay where they are
    back = permuted(moved, module.moe_layers, orders)
    assert all(torch.equal(back[name], value) for name, value in params.items())


@EVERY
def test_recomputed_activations_give_the_same_gradients(architecture: str) -> None:
    grads = []
    for recompute in (False, True):
        module = network(architecture)
        module.set_grad_checkpointing(recompute)
        out = module(texts())
        (out["logits"].square().sum() + out["routing"].exp()[:, :, 0].sum()).backward()
        grads.append({n: p.grad for n, p in module.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, atol=1e-6, rtol=1e-5)


def test_what_train_names_stays_trainable() -> None:
    def trains(**lora: Any) -> set[str]:
        return set(Net(text_spec("mixtral", lora=lora).classifier).trainable)

    bare = trains(train=[])
    assert not any("gate.weight" in name for name in bare)
    assert {n.rpartition(".")[0].rpartition(".")[2] for n in trains(train=["norms"]) - bare} == {
        "input_layernorm",
        "post_attention_layernorm",
        "norm",
    }
    assert trains(train=["embeddings"]) - bare == {"backbone.body.embed_tokens.weight"}
    module = text_spec("mixtral", lora={"train": []}).classifier()
    assert all(layer.gate == () and layer.num_experts == 4 for layer in module.moe_layers)
    attention = text_spec("mixtral", lora={"targets": ["attention"]}).classifier()
    assert all(layer.experts == ((),) * 4 for layer in attention.moe_layers)


def test_rank_and_alpha_scale_the_product() -> None:
    module = network("switch_encoder")
    layer = module.moe_layers[0]
    linear = module.get_submodule(layer.experts[0][0].name.removesuffix(".lora_A.default.weight"))
    a, b = linear.lora_A["default"].weight, linear.lora_B["default"].weight
    assert a.shape == (RANK, 16) and b.shape == (24, RANK)
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(linear(x), x @ (linear.base_layer.weight + 6.0 / RANK * b @ a).T)


def test_adapters_for_half_precision_take_its_type() -> None:
    module = text_spec("qwen3_moe", dtype="bfloat16", lora={"rank": 2}).classifier()
    assert {p.dtype for n, p in module.named_parameters() if "lora_" in n} == {torch.bfloat16}
    module(texts())["logits"].sum().backward()


def test_bad_adapters_are_refused_in_words() -> None:
    with pytest.raises(ConfigError, match=r"model.options.lora.targets is empty"):
        text_spec("mixtral", lora={"targets": []}).classifier()
    with pytest.raises(
        ConfigError, match=r"model.options.lora.rank of moe_decoder: .*greater than or equal to 1, got 0"
    ):
        text_spec("mixtral", lora={"rank": 0}).classifier()
    with pytest.raises(ConfigError, match=r"model.options.lora.targets of moe_decoder: .*'experts' or 'attention'"):
        text_spec("mixtral", lora={"targets": ["mlp"]}).classifier()
