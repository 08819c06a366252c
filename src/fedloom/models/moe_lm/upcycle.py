"""A pretrained dense model made a mixture of experts: each expert starts as a copy of the layer's feed-forward part.

Source: Komatsuzaki et al., "Sparse Upcycling" (ICLR 2023); noise on the copies as in Drop-Upcycling (Nakamura et al.,
ICLR 2025), which draws parts of them anew.

Encoders in the make of BERT keep their attention, dropout, residuals and norms; `MoEBlock` replaces two linear layers.
The gate is drawn from N(0, 0.02^2), for each layer anew. Decisions: every other layer, from the second, as in the
paper; one expert per token with the straight-through rule, whose output is that of the dense model while the gate still
gets a gradient (renormalised: the gate gets none; probability, as Switch Transformers have it: another function).
Decoders in the make of Llama become a Mixtral, in all layers and with its rule, "renormalised"; give them `noise`, or
equal experts leave the gate without a gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge
from torch import Tensor, nn

from fedloom.core.errors import ConfigError
from fedloom.models.moe_lm.block import MoEBlock
from fedloom.models.moe_lm.layers import find_layers
from fedloom.models.moe_lm.packages import library


@dataclass(frozen=True)
class Upcycle:
    """layers: which get experts, from 0; None for every other one of an encoder and all of a decoder.

    combine: see `fedloom.models.moe_lm.block`. noise: standard deviation of what is added to each weight of a copy,
    relative to that of the tensor; with 0 all experts of a layer start equal.
    """

    experts: Annotated[int, Ge(1)] = 8
    layers: tuple[Annotated[int, Ge(0)], ...] | None = None
    top_k: Annotated[int, Ge(1)] = 1
    combine: Literal["straight_through", "renormalised", "probability"] = "straight_through"
    noise: Annotated[float, Ge(0)] = 0.0

    def __post_init__(self) -> None:
        if self.top_k > self.experts:
            raise ConfigError(f"model.options.upcycle.top_k is {self.top_k} of {self.experts} experts; lower it")


class MoEOutput(nn.Module):
    """The second half of a layer of BERT, with experts: [..., H] and the residual -> [..., H]."""

    def __init__(self, moe: MoEBlock, norm: nn.Module, dropout: nn.Module):
        super().__init__()
        self.moe, self.LayerNorm, self.dropout = moe, norm, dropout

    def forward(self, hidden: Tensor, residual: Tensor) -> Tensor:
        """LayerNorm(dropout(MoE(hidden)) + residual)."""
        return self.LayerNorm(self.dropout(self.moe(hidden)) + residual)


def upcycled(body: Any, how: Upcycle, name: str) -> Any:
    """The model with experts: an encoder itself, of a decoder a new one; draws come from torch's global generator.

    Raises `ConfigError` for a model of another make, for one that has experts and for a layer that it does not have.
    """
    if find_layers(body):
        raise ConfigError(f"model.options.upcycle: {name} is a mixture of experts already; leave it out")
    if body.config.model_type in ("llama", "mistral"):
        return _as_mixtral(body, how, name)
    layers = getattr(getattr(body, "encoder", None), "layer", None)
    parts = ("intermediate.dense", "output.dense", "output.LayerNorm", "output.dropout")
    if not isinstance(layers, nn.ModuleList) or not all(_has(layers[0], part) for part in parts):
        raise ConfigError(
            f"model.options.upcycle: {name} ({body.config.model_type}) is neither an encoder in the make of BERT nor a "
            "decoder in that of Llama; take another model"
        )
    for index in _chosen(how, len(layers), name):
        layers[index].output = _with_experts(layers[index], how)
        layers[index].intermediate = nn.Identity()
    return body


def _with_experts(layer: Any, how: Upcycle) -> MoEOutput:
    up, down = layer.intermediate.dense, layer.output.dense
    act = layer.intermediate.intermediate_act_fn
    moe = MoEBlock(up.in_features, up.out_features, how.experts, how.top_k, how.combine, act).to(up.weight)
    with torch.no_grad():
        for stacked, dense in ((moe.experts.up, up.weight), (moe.experts.down, down.weight)):
            stacked.copy_(dense.expand_as(stacked))
            _add_noise(stacked, how.noise)
        moe.experts.up_bias.copy_(up.bias.expand_as(moe.experts.up_bias))
        moe.experts.down_bias.copy_(down.bias.expand_as(moe.experts.down_bias))
    return MoEOutput(moe, layer.output.LayerNorm, layer.output.dropout)


def _as_mixtral(body: Any, how: Upcycle, name: str) -> Any:
    """gate_up_proj[e] = [gate_proj; up_proj], down_proj[e] = down_proj; all other tensors have the same names."""
    config = body.config
    every = list(range(config.num_hidden_layers))
    if how.combine != "renormalised" or _chosen(how, len(every), name, every) != every:
        raise ConfigError(
            f"model.options.upcycle: {name} becomes a Mixtral, with experts in all layers and combine renormalised; "
            "set combine to renormalised and layers to null"
        )
    if any(key.endswith(".bias") for key in body.state_dict()):
        raise ConfigError(f"model.options.upcycle: {name} has biases, and Mixtral has none; take another model")
    shared = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    shared += ("num_key_value_heads", "hidden_act", "max_position_embeddings", "initializer_range", "rms_norm_eps")
    shared += ("pad_token_id", "bos_token_id", "eos_token_id", "tie_word_embeddings", "rope_parameters")
    made = library().MixtralConfig(
        **{key: getattr(config, key) for key in shared},
        head_dim=getattr(config, "head_dim", None),
        sliding_window=getattr(config, "sliding_window", None),
        num_local_experts=how.experts,
        num_experts_per_tok=how.top_k,
    )
    kind = type(body).__name__.replace("Llama", "Mixtral").replace("Mistral", "Mixtral")
    model = getattr(library(), kind)(made).to(next(body.parameters()).dtype)
    dense = body.state_dict()
    with torch.no_grad():
        for key, value in model.state_dict().items():
            value.copy_(_from_dense(key, value, dense, how.noise))
    return model


def _from_dense(key: str, value: Tensor, dense: dict[str, Tensor], noise: float) -> Tensor:
    start, found, leaf = key.partition("experts.")
    if not found:
        return dense.get(key, value)  # the gate keeps what it was drawn as
    if leaf == "down_proj":
        one = dense[f"{start}down_proj.weight"]
    else:
        one = torch.cat([dense[f"{start}gate_proj.weight"], dense[f"{start}up_proj.weight"]])
    return _add_noise(one.expand_as(value).clone(), noise)


def _add_noise(stacked: Tensor, noise: float) -> Tensor:
    return stacked.add_(torch.randn_like(stacked) * (noise * stacked[0].std())) if noise else stacked


def _chosen(how: Upcycle, count: int, name: str, default: list[int] | None = None) -> list[int]:
    chosen = list(how.layers) if how.layers is not None else default or list(range(1, count, 2))
    if not chosen or max(chosen) >= count:
        raise ConfigError(
            f"model.options.upcycle.layers is {chosen}, and {name} has the layers 0 to {count - 1}; name some of those"
        )
    return sorted(set(chosen))


def _has(module: nn.Module, path: str) -> bool:
    try:
        module.get_submodule(path)
    except AttributeError:
        return False
    return True
