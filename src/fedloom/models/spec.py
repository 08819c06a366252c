"""The configured network as a value: what every process needs to build it with the same initial values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from fedloom.core.errors import ConfigError
from fedloom.core.seeds import seeded
from fedloom.models.heads import Classifier
from fedloom.models.registry import backbone


@dataclass(frozen=True)
class NetworkSpec:
    """Implements `fedloom.core.method.ModelSpec`.

    name: of a backbone (see `registry.names`). input_shape: of one example. seed: of the initial values, which
    are the same in every process and whenever they are asked for. weights: see `registry.backbone`.
    options: of the backbone, as pairs or as a mapping.
    """

    name: str
    num_classes: int
    input_shape: tuple[int, ...]
    seed: int = 0
    weights: str | None = None
    options: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        if self.num_classes < 1:
            raise ConfigError(f"num_classes must be at least 1, got {self.num_classes}")
        pairs = self.options.items() if isinstance(self.options, Mapping) else self.options
        frozen = {str(k): tuple(v) if isinstance(v, list) else v for k, v in pairs}
        object.__setattr__(self, "options", tuple(sorted(frozen.items(), key=lambda pair: pair[0])))
        object.__setattr__(self, "input_shape", tuple(self.input_shape))

    def backbone(self) -> nn.Module:
        """The feature extractor [batch, ...] -> [batch, num_features]."""
        with seeded(self.seed, "backbone"):
            return backbone(self.name, input_shape=self.input_shape, weights=self.weights, **dict(self.options))

    def classifier(self) -> Classifier:
        """The backbone with a fixed-width linear head; the head has a random stream of its own."""
        body = self.backbone()
        with seeded(self.seed, "head"):
            return Classifier(body, self.num_classes)
