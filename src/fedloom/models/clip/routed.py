"""A frozen CLIP with routed adapters in every block of both towers, and fixed sentences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from fedloom.models.clip.adapters import Adapters, adapter_layers
from fedloom.models.clip.network import Clip, ClipNetwork, Token
from fedloom.models.clip.words import fixed


@dataclass(frozen=True)
class RoutedAdapters:
    """Makes the network. token: what routes a text; template: of the sentences, with {} for the class name."""

    adapters: Adapters
    token: Token = "eot"
    template: str = "a bad photo of a {}."

    def __call__(self, clip: Clip) -> ClipNetwork:
        """The network."""
        image, text = adapter_layers(clip.towers, self.adapters, clip.seed)
        phrases = fixed(clip.words, self.template, clip.towers.length)
        return ClipNetwork(clip, phrases, image_layers=image, text_layers=text, token=self.token)


def by_parameter(module: ClipNetwork, chosen: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Name of a stacked parameter of experts -> bool [experts], from "image" and "text" [adapted blocks, experts]."""
    found = {}
    for tower in ("image", "text"):
        layers = getattr(module, f"{tower}_adapters")
        for row, (block, layer) in enumerate(layers.items()):
            for name, _ in layer.local.named_parameters():
                found[f"{tower}_adapters.{block}.local.{name}"] = chosen[tower][row]
    return found
