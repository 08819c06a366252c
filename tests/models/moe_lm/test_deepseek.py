"""DeepSeek-MoE (v1) as a Qwen2-MoE against a model written from the formulas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from fedloom.core import ConfigError, Net
from fedloom.models import NetworkSpec
from fedloom.models.moe_lm.deepseek import as_qwen2_moe, pieces
from toys.language_models import VOCAB, questions, texts

H, INNER, DENSE, EXPERTS, TOP, LAYERS, HEADS, SHARED = 16, 6, 20, 4, 2, 3, 4, 2
RAW = {
    "model_type": "deepseek",
    "architectures": ["DeepseekForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekConfig"},
    "vocab_size": VOCAB,
    "hidden_size": H,
    "intermediate_size": DENSE,
    "moe_intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "n_shared_experts": SHARED,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": TOP,
    "moe_layer_freq": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": False,
    "scoring_func": "softmax",
    "hidden_act": "silu",
    "max_position_embeddings": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def checkpoint() -> dict[str, Tensor]:
    """Random tensors under the names of the published checkpoint."""
    rng = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng) * 0.3

    def mlp(prefix: str, inner: int) -> dict[str, Tensor]:
        shapes = {"gate_proj": (inner, H), "up_proj": (inner, H), "down_proj": (H, inner)}
        return {f"{prefix}.{name}.weight": draw(*shape) for name, shape in shapes.items()}

    state = {"model.embed_tokens.weight": draw(VOCAB, H), "lm_head.weight": draw(VOCAB, H)}
    state["model.norm.weight"] = 1 + draw(H)
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        state |= {f"{layer}.self_attn.{p}_proj.weight": draw(H, H) for p in "qkvo"}
        state |= {f"{layer}.{n}_layernorm.weight": 1 + draw(H) for n in ("input", "post_attention")}
        if i == 0:
            state |= mlp(f"{layer}.mlp", DENSE)
            continue
        state[f"{layer}.mlp.gate.weight"] = draw(EXPERTS, H)
        state |= mlp(f"{layer}.mlp.shared_experts", SHARED * INNER)
        for e in range(EXPERTS):
            state |= mlp(f"{layer}.mlp.experts.{e}", INNER)
    return state


def reference(state: dict[str, Tensor], ids: Tensor) -> Tensor:
    """Logits [S, V] of one text, from the formulas."""

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ state[f"{name}.weight"].T

    def norm(name: str, x: Tensor) -> Tensor:
        return state[f"{name}.weight"] * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    def mlp(name: str, x: Tensor) -> Tensor:
        return linear(f"{name}.down_proj", F.silu(linear(f"{name}.gate_proj", x)) * linear(f"{name}.up_proj", x))

    def rotate(x: Tensor) -> Tensor:  # [heads, S, width]
        half = x.shape[-1] // 2
        angle = torch.arange(x.shape[1])[:, None] / 10000.0 ** (torch.arange(half) / half)
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    def attention(name: str, x: Tensor) -> Tensor:
        q, k, v = (linear(f"{name}.{p}_proj", x).view(len(x), HEADS, -1).transpose(0, 1) for p in "qkv")
        scores = rotate(q) @ rotate(k).transpose(1, 2) / (H // HEADS) ** 0.5
        later = torch.triu(torch.ones(len(x), len(x), dtype=torch.bool), 1)
        mixed = scores.masked_fill(later, -torch.inf).softmax(-1) @ v
        return linear(f"{name}.o_proj", mixed.transpose(0, 1).reshape(len(x), H))

    def moe(name: str, x: Tensor) -> Tensor:
        p = linear(f"{name}.gate", x).softmax(-1)
        out = mlp(f"{name}.shared_experts", x)
        for t, chosen in enumerate(p.topk(TOP).indices):
            out[t] += sum(p[t, e] * mlp(f"{name}.experts.{e}", x[t]) for e in chosen.tolist())
        return out

    x = state["model.embed_tokens.weight"][ids]
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        x = x + attention(f"{layer}.self_attn", norm(f"{layer}.input_layernorm", x))
        feed = mlp if i == 0 else moe
        x = x + feed(f"{layer}.mlp", norm(f"{layer}.post_attention_layernorm", x))
    return norm("model.norm", x) @ state["lm_head.weight"].T


def write(folder: Path, state: dict[str, Tensor], shards: int = 1, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**RAW, **changes}))
    if shards == 1:
        save_file(state, folder / "model.safetensors")
        return folder
    names = {key: f"model-{k % shards}.safetensors" for k, key in enumerate(state)}
    for name in set(names.values()):
        save_file({key: state[key] for key in names if names[key] == name}, folder / name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return folder


def network(folder: Path, shape: Any = (2, 4, 12), **options: Any) -> Any:
    return NetworkSpec(f"transformers/{folder}", 4, shape, 0, "pretrained", options, VOCAB).classifier().eval()


@pytest.mark.parametrize("shards", [1, 3])
def test_the_whole_model_computes_the_formulas(shards: int, tmp_path: Path) -> None:
    state = checkpoint()
    module = network(write(tmp_path, state, shards))
    ids = texts((12,))["input_ids"]
    with torch.no_grad():
        found = module.backbone.body(input_ids=ids).logits[0]
    torch.testing.assert_close(found, reference(state, ids[0]), atol=1e-5, rtol=1e-5)
    assert [layer.name.split("layers.")[1] for layer in module.moe_layers] == ["1.mlp", "2.mlp"]
    assert module.moe_layers[0].top_k == TOP and module.moe_layers[0].num_experts == EXPERTS


def test_features_of_texts_need_no_head(tmp_path: Path) -> None:
    state = checkpoint()
    module, x = network(write(tmp_path, state), (12,)), texts((12, 7))
    with torch.no_grad():
        feats = module(x)["feats"]
    for row, length in enumerate((12, 7)):
        logits = feats[row] @ state["lm_head.weight"].T
        torch.testing.assert_close(logits, reference(state, x["input_ids"][row, :length])[-1], atol=1e-5, rtol=1e-5)


def test_the_gates_of_shared_experts_stay_zero_and_never_travel(tmp_path: Path) -> None:
    folder = write(tmp_path, checkpoint())
    for options in ({}, {"lora": {"rank": 2}}):
        net = Net(lambda options=options: network(folder, **options))
        gates = {n: p for n, p in net.module.named_parameters() if "shared_expert_gate" in n}
        assert len(gates) == 2 and not any(p.requires_grad or p.any() for p in gates.values())
        assert not gates.keys() & net.fresh()["params"].keys()
        net(questions())["logits"].sum().backward()
        assert all(p.grad is None for p in gates.values())


def test_tensors_are_read_one_after_the_other() -> None:
    state, asked = checkpoint(), []

    def stream() -> Any:
        for key, value in state.items():
            asked.append(key)
            yield key, value

    for number, piece in enumerate(pieces(stream(), INNER), 1):
        assert len(asked) == number
        key = asked[-1]
        factor = 2 if "shared_experts.down_proj" in key else 1
        assert torch.equal(piece.value, factor * state[key])
    assert len(asked) == len(state)


def test_the_published_configuration_is_that_of_the_paper() -> None:
    published = {
        **RAW,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
    }
    config = as_qwen2_moe(published)
    assert config.mlp_only_layers == [0] and not config.qkv_bias and not config.norm_topk_prob
    assert config.shared_expert_intermediate_size == 2816 and config.num_experts == 64
    assert config.rope_parameters["rope_theta"] == 10000.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_bias": True}, "attention_bias True has no counterpart"),
        ({"scoring_func": "sigmoid"}, "scoring_func sigmoid has no counterpart"),
    ],
)
def test_variants_without_a_counterpart_are_refused_in_words(change: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        as_qwen2_moe({**RAW, **change})


def test_checkpoints_that_do_not_fit_are_refused_in_words(tmp_path: Path) -> None:
    state = checkpoint()
    lacking = {key: value for key, value in state.items() if "layers.1.mlp.experts.3.up_proj" not in key}
    with pytest.raises(ConfigError, match=r"lacks 1 tensors .* 'model.layers.1.mlp.experts.gate_up_proj'"):
        network(write(tmp_path / "a", lacking))
    with pytest.raises(ConfigError, match="does not belong to a DeepSeek-MoE"):
        network(write(tmp_path / "b", {**state, "model.extra.weight": torch.zeros(2)}))
    folder = write(tmp_path / "c", state, 3)
    (folder / "model-1.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"there is no model-1.safetensors in"):
        network(folder)
