"""Features of texts from a network of `transformers`.

Inputs are a mapping {"input_ids": int64 [B, S], "attention_mask": bool [B, S]}, padded on the right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedloom.core.errors import ConfigError
from fedloom.core.moe import MoELayer
from fedloom.models.checkpointing import nested_blocks, set_checkpointing
from fedloom.models.moe_lm.layers import find_layers, gate_of, travelling

FP32_ROUTERS = ("switch_transformers", "deepseek_v2", "deepseek_v3")  # they cast to fp32 whatever their weights are


class TextBackbone(nn.Module):
    """`body`, a `PreTrainedModel`, with pooling: [B, S] token ids -> [B, num_features] in fp32.

    causal: the features are those of the last token that is no padding; otherwise the mean over the tokens. aux: weight
    of the load balance (see `fedloom.models.moe_lm.routed`). score: see `ChoiceScorer`. moe_layers: see
    `fedloom.core.moe`; tensors that are frozen from the start are none of theirs.
    """

    memory_format = "contiguous"

    def __init__(self, body: Any, *, causal: bool, aux: float = 0.0, score: str = "sum"):
        super().__init__()
        self.body, self.causal, self.aux, self.score = body, causal, aux, score
        self.num_features = int(body.config.hidden_size)
        body.config.use_cache = False
        layers = find_layers(self)
        self.moe_layers: tuple[MoELayer, ...] = travelling(self, layers)
        if body.config.model_type in FP32_ROUTERS:
            for layer in layers:
                gate: Any = gate_of(self.get_submodule(layer.name))
                gate.float()

    def states(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Last hidden states [B, S, H]; a text without any token is given its first place to look at."""
        first = torch.arange(mask.shape[1], device=mask.device) == 0
        states: Tensor = self.body.base_model(input_ids=ids, attention_mask=mask.bool() | first).last_hidden_state
        return states

    def forward(self, x: Mapping[str, Tensor]) -> Tensor:
        """Features [B, num_features]; zeros or those of padding for a text without any token."""
        mask = x["attention_mask"]
        states = self.states(x["input_ids"], mask).float()
        if self.causal:
            last = (mask.sum(1) - 1).clamp(min=0)
            return states[torch.arange(len(states), device=states.device), last]
        weight = mask.to(states.dtype).unsqueeze(2)
        return (states * weight).sum(1) / weight.sum(1).clamp(min=1)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the activations of each layer in the backward pass."""
        set_checkpointing(nested_blocks(self.body), enable)


def is_choices(input_shape: Sequence[int]) -> bool:
    """Whether an example is a question with C options, [2, C, S], and not one text, [S]."""
    return len(input_shape) == 3


def check_inputs(name: str, input_shape: Sequence[int], vocab_size: int) -> None:
    """Raises `ConfigError` unless inputs are texts, or questions with options."""
    fits = len(input_shape) == 1 or (len(input_shape) == 3 and input_shape[0] == 2)
    if vocab_size < 1 or not fits:
        raise ConfigError(
            f"model {name} reads texts, and the data have inputs of shape {list(input_shape)} without a vocabulary; "
            "take a data set of texts, or another model"
        )


def with_aliases(state: dict[str, Tensor], module: nn.Module) -> dict[str, Tensor]:
    """A state dict that names every tied tensor as often as the module does; one of the names is enough."""
    groups: dict[int, list[str]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        groups.setdefault(id(tensor), []).append(name)
    filled = dict(state)
    for names in groups.values():
        known = next((state[name] for name in names if name in state), None)
        filled |= {} if known is None else dict.fromkeys(names, known)
    return filled
