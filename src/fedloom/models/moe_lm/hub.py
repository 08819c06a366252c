"""Models of `transformers` by name or folder, and what all language models get on the way to a backbone."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge
from torch import nn

from fedloom.core.errors import ConfigError
from fedloom.models.moe_lm.deepseek import as_qwen2_moe, freeze_shared_gates, is_deepseek_v1, load_shards
from fedloom.models.moe_lm.layers import find_layers
from fedloom.models.moe_lm.lora import LoRA, with_lora
from fedloom.models.moe_lm.options import checked
from fedloom.models.moe_lm.packages import library, quiet
from fedloom.models.moe_lm.text import FP32_ROUTERS, TextBackbone, check_inputs, is_choices, with_aliases
from fedloom.models.moe_lm.upcycle import Upcycle, upcycled
from fedloom.models.weights import load_weights

GROUPED = 16  # bytes, of which rows must be a multiple in the grouped products of torch


def text_backbone(
    body: Any, *, causal: bool, dtype: str = "float32", lora: LoRA | None = None, aux: float = 0.0, score: str = "sum"
) -> TextBackbone:
    """The backbone around a model with its initial values, which are cast to `dtype`; buffers stay as they are."""
    routers = find_layers(body) if body.config.model_type in FP32_ROUTERS else ()
    kept = {name for layer in routers for name in layer.gate}
    for name, parameter in body.named_parameters():
        if name not in kept:
            parameter.data = parameter.data.to(getattr(torch, dtype))
    _avoid_odd_rows(body)
    return TextBackbone(body if lora is None else with_lora(body, lora), causal=causal, aux=aux, score=score)


def _avoid_odd_rows(body: Any) -> None:
    """Have experts computed one by one where their matrices do not fit the grouped products of torch."""
    stacked = [body.get_parameter(name) for layer in find_layers(body) for name in layer.expert_names]
    if any(t.dim() == 3 and (t.shape[-1] * t.element_size() % GROUPED or t.dtype == torch.float64) for t in stacked):
        body.set_experts_implementation("eager")


def transformers_backbone(
    name: str, *, input_shape: Sequence[int], vocab_size: int, weights: str | None, options: Mapping[str, Any]
) -> TextBackbone:
    """A model of the hub or of a local folder: Switch Transformers' encoder, a causal model, or an encoder like BERT.

    weights: None or "pretrained" for its own, "random" for initial values that are drawn, or the path of a local state
    dict. options: those of `hub_model`. DeepSeek-MoE-16B (v1) becomes a Qwen2-MoE: `fedloom.models.moe_lm.deepseek`.
    Raises `ConfigError` for a model that cannot be had, that does not fit the data or of an unknown kind.
    """
    check_inputs(f"transformers/{name}", input_shape, vocab_size)
    own = weights in (None, "pretrained")
    module = hub_model(tuple(input_shape), vocab_size, name, own, **checked(f"transformers/{name}", options, hub_model))
    if not own and weights != "random":
        load_weights(module, weights, convert=with_aliases)
    return module


def adopted(module: nn.Module, input_shape: Sequence[int], vocab_size: int) -> nn.Module:
    """The backbone around a model of `transformers` that was made in Python; any other module as it is.

    Of a model with a head only its body is taken, but for questions with options a causal one keeps it; of Switch
    Transformers the encoder. Raises `ConfigError` for a model that does not fit the data or of an unknown kind.
    """
    known = sys.modules.get("transformers")
    if known is None or not isinstance(module, known.PreTrainedModel):
        return module
    body: Any = module
    name = type(body).__name__
    causal = _is_causal(name, body.config)
    check_inputs(name, input_shape, vocab_size)
    _check_fit(name, body.config, input_shape, vocab_size)
    if body.config.model_type == "switch_transformers":
        body = body if isinstance(body, known.SwitchTransformersEncoderModel) else body.get_encoder()
    elif not (causal and is_choices(input_shape)):
        body = body.base_model
    elif body.get_output_embeddings() is None:
        raise ConfigError(f"model {name} has no head that predicts tokens, which scores options; pass it with one")
    if getattr(body, "pooler", None) is not None:
        body.pooler = None
    _avoid_odd_rows(body)
    return TextBackbone(body, causal=causal)


def hub_model(
    input_shape: tuple[int, ...],
    vocab_size: int,
    name: str,
    pretrained: bool,
    *,
    score: Literal["sum", "characters", "tokens"] = "sum",
    upcycle: Upcycle | None = None,
    aux: Annotated[float, Ge(0)] = 0.0,
    dtype: Literal["float32", "bfloat16"] = "float32",
    lora: LoRA | None = None,
) -> TextBackbone:
    """See `transformers_backbone`. pretrained: whether values are those of the model, and not drawn. score: see
    `ChoiceScorer`. upcycle: see `fedloom.models.moe_lm.upcycle`."""
    told = f"transformers/{name}"
    raw = _fetched(name, lambda: dict(library().PreTrainedConfig.get_config_dict(name)[0]))
    if is_deepseek_v1(raw):
        causal, config = True, _fetched(name, lambda: as_qwen2_moe(raw))
    else:
        config = _fetched(name, lambda: library().AutoConfig.from_pretrained(name))
        causal = _is_causal(told, config)
    _check_fit(told, config, input_shape, vocab_size)
    kind = _class(config, causal, is_choices(input_shape))
    given = {"add_pooling_layer": False} if "add_pooling_layer" in inspect.signature(kind.__init__).parameters else {}
    if not pretrained:
        body = _fetched(name, lambda: kind(config, **given))
    elif is_deepseek_v1(raw):
        body = load_shards(kind, config, name, dtype)
    else:
        body = _pretrained(name, kind, config, given)
    if upcycle is not None:
        body = upcycled(body, upcycle, told)
    if is_deepseek_v1(raw):
        freeze_shared_gates(body)
    return text_backbone(body, causal=causal, dtype=dtype, lora=lora, aux=aux, score=score)


def _fetched(name: str, get: Any) -> Any:
    try:
        return get()
    except ConfigError:
        raise
    except Exception as error:  # of the network, the hub's client, the file system and the configuration's own checks
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"model.name: transformers/{name} cannot be had ({type(error).__name__}: {reason}); give a local folder "
            "that holds config.json, or the name of a model of the hub"
        ) from error


def _is_causal(name: str, config: Any) -> bool:
    """Whether the model predicts the next token; `ConfigError` for a model that neither does that nor encodes."""
    auto = library().models.auto.modeling_auto
    if config.model_type == "switch_transformers" or config.model_type in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        return False
    if config.model_type in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not config.is_encoder_decoder:
        return True
    raise ConfigError(
        f"model {name} is a {config.model_type}, which is neither a causal model nor an encoder; "
        "take a mixture of experts such as mixtral, qwen3_moe or switch_transformers, or an encoder such as bert"
    )


def _class(config: Any, causal: bool, with_head: bool) -> Any:
    if config.model_type == "switch_transformers":
        return library().SwitchTransformersEncoderModel
    auto = library().AutoModelForCausalLM if causal and with_head else library().AutoModel
    return auto._model_mapping[type(config)]


def _check_fit(name: str, config: Any, input_shape: Sequence[int], vocab_size: int) -> None:
    if vocab_size > config.vocab_size:
        raise ConfigError(
            f"the tokeniser has {vocab_size} token ids and {name} only {config.vocab_size}; set data.tokenizer to the "
            "tokeniser of that model"
        )
    places = getattr(config, "max_position_embeddings", None)
    if places and input_shape[-1] > places:
        raise ConfigError(f"data.max_length is {input_shape[-1]} and {name} reads at most {places} tokens; lower it")


def _pretrained(name: str, kind: Any, config: Any, given: Mapping[str, Any]) -> Any:
    def get() -> Any:
        with quiet():
            return kind.from_pretrained(name, config=config, dtype="auto", output_loading_info=True, **given)

    body, told = _fetched(name, get)
    lacking = sorted([*told["missing_keys"], *(key for key, *_ in told["mismatched_keys"])])
    if lacking:
        where = "the folder" if Path(name).is_dir() else "the hub"
        raise ConfigError(
            f"model.weights: {where} holds no values of {len(lacking)} tensors of "
            f"transformers/{name} (such as '{lacking[0]}'); give a complete checkpoint"
        )
    return body
