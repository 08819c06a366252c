"""Mixing the logits of two networks per example, and what the gate of the mixture may read."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from fedloom.core.batches import Inputs
from fedloom.core.context import Outputs
from fedloom.core.errors import ConfigError
from fedloom.core.tree import Tensors
from fedloom.models.moe_lm.choices import ChoiceHead, ChoiceScorer


def mixed(common: Tensor, personal: Tensor, inputs: Tensor, gate: Tensors) -> tuple[Tensor, Tensor]:
    """Logits g * common + (1 - g) * personal [batch, classes], and g = sigmoid(w . u + b) [batch].

    inputs: u [batch, width]; gate: "weight" w [width] and "bias" b, or empty: g is 1/2. Exactly `common` where g is 1,
    exactly `personal` where it is 0, and both where they are equal, whatever g is.
    """
    score = inputs @ gate["weight"] + gate["bias"] if gate else inputs.new_zeros(len(inputs))
    share = torch.sigmoid(score)
    return torch.lerp(personal, common, share[:, None]), share


class MixingGate(nn.Module):
    """The gate alone, on what both networks gave: `{"inputs": u, "common": ..., "personal": ...}` -> "logits".

    It starts at zero, so that g is 1/2 for every example.
    """

    def __init__(self, width: int):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(width)), nn.Parameter(torch.zeros(()))

    def forward(self, x: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """`{"logits": [batch, classes], "gates": g [batch]}`."""
        gate = {"weight": self.weight, "bias": self.bias}
        logits, share = mixed(x["common"], x["personal"], x["inputs"], gate)
        return {"logits": logits, "gates": share}


def pooled_features(module: nn.Module, x: Inputs, out: Outputs) -> Tensor:
    """The features [batch, width] that the network gave."""
    found = out.get("feats")
    if found is None or found.dim() != 2:
        shape = "none" if found is None else f"some of shape {list(found.shape)}"
        raise ConfigError(
            f"gate_input is features, and {type(module).__name__} gives {shape}; let it return 'feats' [batch, "
            "features], give the model as a backbone (attribute num_features), or set gate_input to inputs"
        )
    return found


def pooled_inputs(module: nn.Module, x: Inputs, out: Outputs) -> Tensor:
    """The flattened input [batch, width]; of text the mean embedding of its tokens, over all options of a question.

    Without gradient. Raises `ConfigError` for inputs that are neither.
    """
    if isinstance(x, Tensor):
        return x.flatten(1).to(out["logits"].device, torch.float32)
    if "input_ids" not in x or "attention_mask" not in x:
        raise ConfigError(
            f"gate_input is inputs, which takes tensors or token ids, not {sorted(x)}; set it to features"
        )
    table = token_embedding(module)
    mask = x["attention_mask"].flatten(1).bool().to(table.weight.device)
    ids = x["input_ids"].flatten(1).to(table.weight.device).masked_fill(~mask, 0)
    return masked_mean(table.weight.detach()[ids].float(), mask)


def masked_mean(tokens: Tensor, mask: Tensor) -> Tensor:
    """Mean of tokens [batch, length, width] where mask [batch, length] is True; zeros where it is nowhere."""
    kept = mask.unsqueeze(-1)
    return (tokens * kept).sum(1) / kept.sum(1).clamp(min=1)


def token_embedding(module: nn.Module) -> nn.Embedding:
    """The table of token embeddings: the first one of the network. Raises `ConfigError` where it has none."""
    found = next((m for m in module.modules() if isinstance(m, nn.Embedding)), None)
    if found is None:
        raise ConfigError(
            f"gate_input is inputs, which for text is the mean token embedding, and {type(module).__name__} has no "
            "nn.Embedding; set gate_input to features"
        )
    return found


def check_gate_input(module: nn.Module, gate_input: str) -> None:
    """Raises `ConfigError` for features of a network that scores the options of a question: it has some per option."""
    if gate_input == "features" and isinstance(module, ChoiceHead | ChoiceScorer):
        raise ConfigError(
            "gate_input is features, and a model of questions has features per option, not per question; set it to "
            "inputs"
        )


GateInput = Callable[[nn.Module, Inputs, Outputs], Tensor]
GATE_INPUTS: dict[str, GateInput] = {"features": pooled_features, "inputs": pooled_inputs}
