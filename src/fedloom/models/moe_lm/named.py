"""Language models from a few options, with random initial values: those of `transformers` itself."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from annotated_types import Ge, Le, Lt

from fedloom.core.errors import ConfigError
from fedloom.models.moe_lm.hub import text_backbone
from fedloom.models.moe_lm.layers import find_layers
from fedloom.models.moe_lm.lora import LoRA
from fedloom.models.moe_lm.packages import library
from fedloom.models.moe_lm.text import TextBackbone, is_choices

Size = Annotated[int, Ge(1), Le(65536)]
Share = Annotated[float, Ge(0), Lt(1)]
Dtype = Literal["float32", "bfloat16"]
Architecture = Literal["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3"]


def switch_encoder(
    input_shape: tuple[int, ...],
    vocab_size: int,
    *,
    hidden: Size = 64,
    inner: Size = 128,
    layers: Size = 4,
    heads: Size = 4,
    experts: Size = 8,
    sparse_step: Size = 2,
    capacity: Size = 64,
    dropout: Share = 0.1,
    jitter: Share = 0.01,
    gate_std: Annotated[float, Ge(0)] = 1.0,
    aux: Annotated[float, Ge(0)] = 0.0,
    dtype: Dtype = "float32",
    lora: LoRA | None = None,
) -> TextBackbone:
    """The encoder of Switch Transformers, one expert per token.

    inner: width of dense layers and of each expert. sparse_step: every how many layers are mixtures of experts (layers
    i with i % sparse_step == 1; all of them for 1). capacity: tokens per expert and text; those beyond it get no
    expert. dropout, jitter (of the router's and the experts' input): in training, defaults as in `transformers`.
    gate_std: of the router's initial weights; the default, as in `transformers`, makes it almost sure from the start.
    """
    _check_encoder(hidden, heads, layers, sparse_step)
    config = library().SwitchTransformersConfig(
        vocab_size=vocab_size,
        d_model=hidden,
        d_kv=hidden // heads,
        d_ff=inner,
        num_layers=layers,
        num_heads=heads,
        num_experts=experts,
        expert_capacity=capacity,
        dropout_rate=dropout,
        router_jitter_noise=jitter,
    )
    config.encoder_sparse_step = sparse_step
    body = library().SwitchTransformersEncoderModel(config)
    for layer in find_layers(body):
        body.get_parameter(layer.gate[0]).data.mul_(gate_std)
    return text_backbone(body, causal=False, dtype=dtype, lora=lora, aux=aux)


def moe_decoder(
    input_shape: tuple[int, ...],
    vocab_size: int,
    *,
    architecture: Architecture = "mixtral",
    hidden: Size = 64,
    inner: Size = 128,
    layers: Size = 2,
    heads: Size = 4,
    experts: Size = 8,
    top_k: Size = 2,
    dropout: Share = 0.0,
    tied: bool = True,
    score: Literal["sum", "characters", "tokens"] = "sum",
    aux: Annotated[float, Ge(0)] = 0.0,
    dtype: Dtype = "float32",
    lora: LoRA | None = None,
) -> TextBackbone:
    """A causal language model; every layer is a mixture of experts.

    architecture: of `transformers`. inner: width of each expert, and of the shared expert where there is one. dropout:
    of attention weights, in training. tied: input and output embeddings are one tensor. score: see `ChoiceScorer`.
    """
    _check_decoder(hidden, heads, experts, top_k)
    config = library().AutoConfig.for_model(
        architecture,
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        num_experts_per_tok=top_k,
        max_position_embeddings=input_shape[-1],
        attention_dropout=dropout,
        tie_word_embeddings=tied,
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
        **_particular(architecture, hidden, inner, heads, experts),
    )
    auto = library().AutoModelForCausalLM if is_choices(input_shape) else library().AutoModel
    return text_backbone(auto.from_config(config), causal=True, dtype=dtype, lora=lora, aux=aux, score=score)


def _particular(architecture: str, hidden: int, inner: int, heads: int, experts: int) -> dict[str, Any]:
    """What the configurations of the architectures do not have in common."""
    if architecture == "mixtral":
        return {"num_local_experts": experts}
    if architecture == "olmoe":
        return {"num_experts": experts}
    if architecture == "qwen2_moe":
        return {"num_experts": experts, "moe_intermediate_size": inner, "shared_expert_intermediate_size": inner}
    if architecture == "qwen3_moe":
        return {"num_experts": experts, "moe_intermediate_size": inner, "head_dim": hidden // heads}
    one_group = {"n_group": 1, "topk_group": 1}
    width = hidden // heads
    return {
        "n_routed_experts": experts,
        "moe_intermediate_size": inner,
        "n_shared_experts": 1,
        "first_k_dense_replace": 0,
        "q_lora_rank": None,
        "kv_lora_rank": max(1, hidden // 2),
        "qk_nope_head_dim": width,
        "qk_rope_head_dim": width,
        "v_head_dim": width,
        **(one_group if architecture == "deepseek_v3" else {}),
    }


def _check_encoder(hidden: int, heads: int, layers: int, sparse_step: int) -> None:
    _check_heads("switch_encoder", hidden, heads)
    if sparse_step > 1 and layers < 2:
        raise ConfigError(
            f"model.options.sparse_step {sparse_step} of switch_encoder leaves no mixture of experts in {layers} "
            "layer; set it to 1 or layers to 2"
        )


def _check_decoder(hidden: int, heads: int, experts: int, top_k: int) -> None:
    _check_heads("moe_decoder", hidden, heads)
    if top_k > experts:
        raise ConfigError(f"model.options.top_k of moe_decoder is {top_k} of {experts} experts; lower it")
    if hidden // heads % 2:
        raise ConfigError(
            f"model.options: moe_decoder needs an even hidden / heads for its rotary positions, got {hidden} / {heads}"
        )


def _check_heads(name: str, hidden: int, heads: int) -> None:
    if hidden % heads:
        raise ConfigError(f"model.options.heads of {name} must divide hidden, {hidden}, got {heads}")
