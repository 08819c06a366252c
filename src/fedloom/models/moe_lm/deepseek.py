"""DeepSeek-MoE-16B (v1), which `transformers` does not know, as a Qwen2-MoE that computes the same function.

Source: Dai et al., "DeepSeekMoE" (ACL 2024): y = shared(h) + sum over the top-k of p_e expert_e(h), p the softmax over
all experts, not renormalised. Qwen2-MoE has sigmoid(w h) shared(h) instead: with w = 0, which stays frozen, the factor
is 1/2, and the shared experts' last matrix is doubled.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedloom.core.errors import ConfigError
from fedloom.models.moe_lm.packages import library

SAME = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "hidden_act")
SAME += ("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "initializer_range", "moe_intermediate_size")
SAME += ("num_experts_per_tok", "norm_topk_prob", "tie_word_embeddings", "attention_dropout", "rope_theta")
SAME += ("pad_token_id", "bos_token_id", "eos_token_id")
ASSUMED = {"attention_bias": False, "rope_scaling": None, "scoring_func": "softmax"}


class Piece(NamedTuple):
    """A tensor of a checkpoint and where it belongs: `into[index] = value`."""

    into: str
    index: tuple[int | slice, ...]
    value: Tensor


def is_deepseek_v1(raw: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of DeepSeek-MoE-16B (v1)."""
    return raw.get("model_type") == "deepseek"


def as_qwen2_moe(raw: Mapping[str, Any]) -> Any:
    """The configuration as one of Qwen2-MoE; `ConfigError` for a variant with another router or attention."""
    for key, value in ASSUMED.items():
        if raw.get(key, value) != value:
            raise ConfigError(
                f"a DeepSeek-MoE (v1) with {key} {raw[key]} has no counterpart in Qwen2-MoE; it needs {value}"
            )
    every, first = raw.get("moe_layer_freq", 1), raw.get("first_k_dense_replace", 0)
    dense = [i for i in range(raw["num_hidden_layers"]) if i < first or i % every]
    return library().Qwen2MoeConfig(
        **{key: raw[key] for key in SAME if key in raw},
        num_experts=raw["n_routed_experts"],
        shared_expert_intermediate_size=raw["n_shared_experts"] * raw["moe_intermediate_size"],
        mlp_only_layers=dense,
        qkv_bias=False,
    )


def pieces(tensors: Iterable[tuple[str, Tensor]], inner: int) -> Iterator[Piece]:
    """The tensors of a checkpoint, one by one, as parts of a Qwen2-MoE with experts of width `inner`."""
    for key, value in tensors:
        start, found, rest = key.partition(".mlp.experts.")
        if found:
            expert, matrix, _ = rest.split(".")
            place = {"gate_proj": slice(inner), "up_proj": slice(inner, 2 * inner), "down_proj": slice(None)}[matrix]
            into = "down_proj" if matrix == "down_proj" else "gate_up_proj"
            yield Piece(f"{start}.mlp.experts.{into}", (int(expert), place), value)
        elif ".shared_experts." in key:
            doubled = 2 * value if "down_proj" in key else value
            yield Piece(key.replace(".shared_experts.", ".shared_expert."), (), doubled)
        else:
            yield Piece(key, (), value)


@torch.no_grad()
def load_pieces(model: Any, found: Iterable[Piece]) -> None:
    """Copy every piece into the model, with head or without; `ConfigError` naming what is missing or does not fit."""
    own = model.state_dict()
    with_head = "lm_head.weight" in own
    missing = {name: tensor.numel() for name, tensor in own.items() if "shared_expert_gate" not in name}
    for into, index, value in found:
        name = into if with_head else into.removeprefix("model.")
        if name == "lm_head.weight" and not with_head:
            continue
        if name not in missing or own[name][index].shape != value.shape:
            raise ConfigError(
                f"'{into}' of shape {list(value.shape)} does not belong to a DeepSeek-MoE (v1) of this size"
            )
        own[name][index].copy_(value)
        missing[name] -= value.numel()
    lacking = sorted(name for name, count in missing.items() if count)
    if lacking:
        raise ConfigError(f"the checkpoint lacks {len(lacking)} tensors of a DeepSeek-MoE (v1), such as '{lacking[0]}'")


def load_shards(kind: Any, config: Any, name: str, dtype: str) -> Any:
    """A model from the `.safetensors` files of a folder or of the hub, read tensor by tensor."""
    from transformers.initialization import no_init_weights

    with no_init_weights():
        model = kind._from_config(config, dtype=getattr(torch, dtype))
    load_pieces(model, pieces(_stored(name), config.moe_intermediate_size))
    return model


def freeze_shared_gates(model: Any) -> None:
    """Set the weights of the shared experts' gates to 0 for good."""
    for name, parameter in model.named_parameters():
        if "shared_expert_gate" in name:
            parameter.data.zero_()
            parameter.requires_grad_(False)


def _stored(name: str) -> Iterator[tuple[str, Tensor]]:
    from safetensors import safe_open

    folder = Path(name)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(name, allow_patterns=["*.safetensors", "*.json"]))
    index = folder / "model.safetensors.index.json"
    files = {"model.safetensors"}
    if index.exists():
        files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    for file in sorted(files):
        if not (folder / file).is_file():
            raise ConfigError(f"model.weights: there is no {file} in '{folder}'; fetch it")
        with safe_open(str(folder / file), "pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118
                yield key, tensors.get_tensor(key)
