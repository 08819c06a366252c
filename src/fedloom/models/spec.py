"""The configured network as a value: what every process needs to build it with the same initial values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from fedloom.core.errors import ConfigError
from fedloom.core.seeds import seeded
from fedloom.models.clip.named import clip
from fedloom.models.clip.network import Clip
from fedloom.models.headed import headed
from fedloom.models.heads import Classifier
from fedloom.models.moe_lm.choices import ChoiceHead, ChoiceScorer
from fedloom.models.moe_lm.text import is_choices
from fedloom.models.registry import backbone


@dataclass(frozen=True)
class NetworkSpec:
    """Implements `fedloom.core.method.ModelSpec`.

    name: of a backbone (see `registry.names`). input_shape: of one example. seed: of the initial values, which
    are the same in every process and whenever they are asked for. weights: see `registry.backbone`.
    options: of the backbone, as pairs or as a mapping. vocab_size: of token ids, 0 where inputs are no text.
    Of vision-language models: words, class names as they stand in a sentence; mean, std: by which pictures have been
    normalised, per channel; repeats: pictures come without augmentation.
    """

    name: str
    num_classes: int
    input_shape: tuple[int, ...]
    seed: int = 0
    weights: str | None = None
    options: tuple[tuple[str, Any], ...] = ()
    vocab_size: int = 0
    words: tuple[str, ...] = ()
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    repeats: bool = True

    def __post_init__(self) -> None:
        if self.num_classes < 1:
            raise ConfigError(f"num_classes must be at least 1, got {self.num_classes}")
        pairs = self.options.items() if isinstance(self.options, Mapping) else self.options
        frozen = {str(k): _frozen(v) for k, v in pairs}
        object.__setattr__(self, "options", tuple(sorted(frozen.items(), key=lambda pair: pair[0])))
        object.__setattr__(self, "input_shape", tuple(self.input_shape))

    def backbone(self) -> nn.Module:
        """The feature extractor [batch, ...] -> [batch, num_features].

        Raises `ConfigError` for multiple choice, where logits are no function of one vector of features, and for a load
        balance, which only `classifier` can tell.
        """
        if self.vocab_size and is_choices(self.input_shape):
            raise ConfigError(
                f"this method puts heads of its own on features, and model {self.name} scores the options of a "
                "question; take another method, or data of texts with classes"
            )
        if aux := dict(self.options).get("aux"):
            raise ConfigError(
                f"model.options.aux is {aux}, and this method puts heads of its own on the network, which hides the "
                "load of its experts; set it to 0"
            )
        return self._body()

    def classifier(self) -> Classifier | ChoiceScorer | ChoiceHead:
        """The backbone with a head; see `fedloom.models.headed`."""
        return headed(self._body(), self.num_classes, self.input_shape, self.seed)

    def clip(self) -> Clip:
        """The frozen towers and the words of the classes. Raises `ConfigError` for a model that is no CLIP."""
        with seeded(self.seed, "backbone"):
            return clip(
                self.name,
                input_shape=self.input_shape,
                words=self.words,
                statistics=(self.mean, self.std),
                weights=self.weights,
                options=dict(self.options),
                seed=self.seed,
                repeats=self.repeats,
            )

    def _body(self) -> nn.Module:
        options = dict(self.options)
        with seeded(self.seed, "backbone"):
            return backbone(
                self.name,
                input_shape=self.input_shape,
                weights=self.weights,
                vocab_size=self.vocab_size,
                statistics=(self.mean, self.std),
                **options,
            )


def _frozen(value: Any) -> Any:
    """A hashable value: lists as tuples, mappings as tuples of pairs."""
    if isinstance(value, Mapping):
        return tuple(sorted((str(k), _frozen(v)) for k, v in value.items()))
    return tuple(_frozen(v) for v in value) if isinstance(value, list | tuple) else value
