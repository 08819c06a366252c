"""CLIP's tensors and configuration in open_clip's names <-> those of transformers' `CLIPModel`.

Values are the same in both, up to two differences of form: open_clip keeps query, key and value in one matrix, and its
two projections multiply from the right.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fedloom.core.errors import ConfigError

State = dict[str, Tensor]

WHOLE = {
    "logit_scale": "logit_scale",
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "ln_final.weight": "text_model.final_layer_norm.weight",
    "ln_final.bias": "text_model.final_layer_norm.bias",
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    "visual.ln_pre.weight": "vision_model.pre_layrnorm.weight",  # their spelling
    "visual.ln_pre.bias": "vision_model.pre_layrnorm.bias",
    "visual.ln_post.weight": "vision_model.post_layernorm.weight",
    "visual.ln_post.bias": "vision_model.post_layernorm.bias",
}
TRANSPOSED = {"text_projection": "text_projection.weight", "visual.proj": "visual_projection.weight"}
BLOCKS = {
    "transformer.resblocks": "text_model.encoder.layers",
    "visual.transformer.resblocks": "vision_model.encoder.layers",
}
IN_BLOCK = {
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
    "attn.out_proj": "self_attn.out_proj",
}
QKV = ("q_proj", "k_proj", "v_proj")

# What a configuration that was saved leaves out where it is transformers' default.
TEXT = {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "max_position_embeddings": 77,
    "vocab_size": 49408,
}
VISION = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
    "patch_size": 32,
}
ACTIVATIONS = {"quick_gelu": True, "gelu": False}
EPS = 1e-5


def is_transformers(state: Mapping[str, Tensor]) -> bool:
    """Whether tensors have the names of a `CLIPModel`."""
    return any(key.startswith(("text_model.", "vision_model.")) for key in state)


def to_transformers(state: Mapping[str, Tensor]) -> State:
    """Tensors of open_clip's `CLIP` -> those of a `CLIPModel`. Raises `ConfigError` for names that it has not."""
    found: State = {}
    for key, value in state.items():
        head, _, rest = _block(key)
        if key in WHOLE:
            found[WHOLE[key]] = value
        elif key in TRANSPOSED:
            found[TRANSPOSED[key]] = value.T.contiguous()
        elif head and rest.startswith("attn.in_proj_"):
            kind = rest.removeprefix("attn.in_proj_")
            parts = zip(QKV, value.chunk(3), strict=True)
            found |= {f"{head}.self_attn.{name}.{kind}": part.clone() for name, part in parts}
        elif head and (name := _renamed(rest, IN_BLOCK)):
            found[f"{head}.{name}"] = value
        else:
            raise _strange(key, "open_clip's CLIP with a patch embedding")
    return found


def to_open_clip(state: Mapping[str, Tensor]) -> State:
    """Tensors of a `CLIPModel` -> those of open_clip's `CLIP`. Raises `ConfigError` for names that it has not."""
    whole, transposed = _turned(WHOLE), _turned(TRANSPOSED)
    found: State = {}
    for key, value in state.items():
        head, theirs, rest = _block(key)
        if key.endswith(".position_ids"):  # 0, 1, 2 ...: in files of older versions
            continue
        if key in whole:
            found[whole[key]] = value
        elif key in transposed:
            found[transposed[key]] = value.T.contiguous()
        elif head and (part := re.fullmatch(r"self_attn\.[qkv]_proj\.(weight|bias)", rest)):
            names = [f"{theirs}.self_attn.{name}.{part[1]}" for name in QKV]
            if missing := [name for name in names if name not in state]:
                raise ConfigError(
                    f"the tensors of transformers' CLIPModel lack '{missing[0]}'; take a whole checkpoint"
                )
            if odd := [name for name in names if state[name].shape != value.shape]:
                raise ConfigError(
                    f"the tensors of transformers' CLIPModel do not fit each other: '{odd[0]}' has shape "
                    f"{list(state[odd[0]].shape)} and '{key}' {list(value.shape)}; take a whole checkpoint"
                )
            found[f"{head}.attn.in_proj_{part[1]}"] = torch.cat([state[name] for name in names])
        elif head and (name := _renamed(rest, _turned(IN_BLOCK))):
            found[f"{head}.{name}"] = value
        else:
            raise _strange(key, "transformers' CLIPModel")
    return found


def _block(key: str) -> tuple[str, str, str]:
    """(the block's name in the other package, in its own, the rest), empty for what lies in no block."""
    for here, there in (*BLOCKS.items(), *_turned(BLOCKS).items()):
        if match := re.fullmatch(rf"({re.escape(here)}\.(\d+))\.(.+)", key):
            return f"{there}.{match[2]}", match[1], match[3]
    return "", "", ""


def _renamed(rest: str, names: Mapping[str, str]) -> str:
    module, _, leaf = rest.rpartition(".")
    return f"{names[module]}.{leaf}" if module in names and leaf in ("weight", "bias") else ""


def _turned(names: Mapping[str, str]) -> dict[str, str]:
    return {there: here for here, there in names.items()}


def _strange(key: str, what: str) -> ConfigError:
    return ConfigError(f"tensor '{key}' is none of {what}; only such models are converted")


def transformers_config(architecture: Mapping[str, Any]) -> dict[str, Any]:
    """What `config.json` of a `CLIPModel` says, from open_clip's form (`embed_dim`, `vision_cfg`, `text_cfg`).

    Text pads with 0, as open_clip does. Raises `ConfigError` for a convolutional stem, which a `CLIPModel` has not.
    """
    if architecture.get("stem"):
        raise ConfigError(
            "a CLIP with a convolutional stem has no counterpart in transformers; take one of patches alone"
        )
    vision, text = architecture["vision_cfg"], architecture["text_cfg"]
    act = next(name for name, quick in ACTIVATIONS.items() if quick == bool(architecture.get("quick_gelu")))
    shared = {"hidden_act": act, "layer_norm_eps": EPS, "projection_dim": architecture["embed_dim"]}
    width, text_width = vision.get("width", 768), text.get("width", 512)
    return {
        "model_type": "clip",
        "architectures": ["CLIPModel"],
        "projection_dim": architecture["embed_dim"],
        "text_config": {
            **shared,
            "hidden_size": text_width,
            "intermediate_size": int(text_width * text.get("mlp_ratio", 4.0)),
            "num_hidden_layers": text.get("layers", 12),
            "num_attention_heads": text.get("heads", 8),
            "max_position_embeddings": text.get("context_length", 77),
            "vocab_size": text.get("vocab_size", 49408),
            "bos_token_id": 49406,
            "eos_token_id": 49407,
            "pad_token_id": 0,
        },
        "vision_config": {
            **shared,
            "hidden_size": width,
            "intermediate_size": int(width * vision.get("mlp_ratio", 4.0)),
            "num_hidden_layers": vision.get("layers", 12),
            "num_attention_heads": width // vision.get("head_width", 64),
            "image_size": vision.get("image_size", 224),
            "patch_size": vision.get("patch_size", 16),
        },
    }


def open_clip_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """`config.json` of a `CLIPModel` -> open_clip's form. Raises `ConfigError` for what open_clip cannot do."""
    given, seen = (
        {**(config.get(f"{key}_config") or {}), **(config.get(f"{key}_config_dict") or {})}
        for key in ("text", "vision")
    )
    for part in (given, seen):
        if part.get("layer_norm_eps", EPS) != EPS:
            raise ConfigError(
                f"layer_norm_eps of the CLIPModel is {part['layer_norm_eps']}, and only {EPS} can be used"
            )
    acts = {part.get("hidden_act", "quick_gelu") for part in (given, seen)}
    if len(acts) > 1 or not acts <= ACTIVATIONS.keys():
        raise ConfigError(
            f"hidden_act of the CLIPModel is {' and '.join(sorted(map(str, acts)))}, and only quick_gelu or gelu in "
            "both towers can be used"
        )
    text, vision = {**TEXT, **given}, {**VISION, **seen}
    return {
        "embed_dim": config.get("projection_dim", 512),
        "quick_gelu": ACTIVATIONS[acts.pop()],
        "vision_cfg": {
            "image_size": vision["image_size"],
            "patch_size": vision["patch_size"],
            "width": vision["hidden_size"],
            "layers": vision["num_hidden_layers"],
            "head_width": vision["hidden_size"] // vision["num_attention_heads"],
            "mlp_ratio": _ratio(vision),
        },
        "text_cfg": {
            "context_length": text["max_position_embeddings"],
            "vocab_size": text["vocab_size"],
            "width": text["hidden_size"],
            "heads": text["num_attention_heads"],
            "layers": text["num_hidden_layers"],
            "mlp_ratio": _ratio(text),
        },
    }


def _ratio(part: Mapping[str, Any]) -> float:
    """The ratio whose product with the width, cut to a whole number, is the inner width."""
    inner, width = part["intermediate_size"], part["hidden_size"]
    ratio = inner / width
    return ratio if int(ratio * width) == inner else math.nextafter(ratio, math.inf)
