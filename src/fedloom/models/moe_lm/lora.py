"""Low-rank adapters on the experts and the attention of a language model, through `peft`.

Source: Hu et al., "LoRA" (ICLR 2022): W + alpha/rank B A, with B = 0 at the start. The model's own values are frozen,
so they are loaded once and never travel; what `train` names stays trainable, and so does a classifier's head. A
stacked tensor of experts gets one pair of factors per expert. An expert is what it was plus its adapter: the order of
experts is fixed, and clients' factors are averaged factor by factor, which is not the average of their products.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le
from torch import nn

from fedloom.core.errors import ConfigError
from fedloom.models.moe_lm.layers import find_layers
from fedloom.models.moe_lm.packages import adapters

Target = Literal["experts", "attention"]
Part = Literal["gates", "norms", "embeddings"]


@dataclass(frozen=True)
class LoRA:
    """rank: of every pair of factors. alpha: their product is scaled by alpha / rank. targets: what gets adapters.

    train: parts of the model that train as they are.
    """

    rank: Annotated[int, Ge(1), Le(65536)] = 8
    alpha: Annotated[float, Ge(0)] = 16.0
    targets: tuple[Target, ...] = ("experts", "attention")
    train: tuple[Part, ...] = ("gates",)

    def __post_init__(self) -> None:
        if not self.targets:
            raise ConfigError("model.options.lora.targets is empty: name experts, attention or both")


def with_lora(body: Any, lora: LoRA) -> Any:
    """The same model with adapters, everything else frozen but for `lora.train`.

    Raises `ConfigError` where the model has none of the targets.
    """
    experts = _experts(body) if "experts" in lora.targets else []
    parameters = [name for name, _ in body.named_parameters() if name in experts]
    modules = [name for name in experts if name not in parameters]
    modules += _attention(body) if "attention" in lora.targets else []
    kept = _kept(body, lora.train)
    if not modules and not parameters:
        raise ConfigError(
            f"model.options.lora.targets: {type(body).__name__} has no {' and no '.join(lora.targets)} to adapt"
        )
    config = adapters().LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, lora_dropout=0.0, target_modules=modules, target_parameters=parameters
    )
    adapters().inject_adapter_in_model(config, body)
    for parameter in kept:
        parameter.requires_grad_(True)
    return body


def _experts(body: Any) -> list[str]:
    """Names of the linear layers, and of the stacked matrices, that experts are made of."""
    found: dict[str, None] = {}
    for layer in find_layers(body):
        for name in layer.expert_names:
            owner = name.rpartition(".")[0]
            linear = isinstance(body.get_submodule(owner), nn.Linear)
            if linear or body.get_parameter(name).dim() == 3:
                found[owner if linear else name] = None
    return list(found)


def _attention(body: nn.Module) -> list[str]:
    inside = [n for n, module in body.named_modules() if "Attention" in type(module).__name__]
    linear = [n for n, module in body.named_modules() if isinstance(module, nn.Linear)]
    return [name for name in linear if any(name.startswith(f"{outer}.") for outer in inside)]


def _kept(body: Any, train: tuple[Part, ...]) -> list[nn.Parameter]:
    gates = {name for layer in find_layers(body) for name in layer.gate}
    norms = {f"{n}.{p}" for n, m in body.named_modules() if "Norm" in type(m).__name__ for p, _ in m.named_parameters()}
    embeddings = {n for n, p in body.named_parameters() if p is body.get_input_embeddings().weight}
    parts = {"gates": gates, "norms": norms, "embeddings": embeddings}
    names = set().union(*(parts[part] for part in train))
    return [parameter for name, parameter in body.named_parameters() if name in names]
