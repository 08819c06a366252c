"""From a backbone to the network that gives scores."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from fedloom.core.seeds import seeded
from fedloom.models.heads import Classifier
from fedloom.models.moe_lm.choices import ChoiceHead, ChoiceScorer, choices
from fedloom.models.moe_lm.routed import routed
from fedloom.models.moe_lm.text import TextBackbone, is_choices


def headed(
    body: nn.Module, num_classes: int, input_shape: Sequence[int], seed: int
) -> Classifier | ChoiceScorer | ChoiceHead:
    """The backbone with a fixed-width linear head, whose initial values have a random stream of their own.

    For questions with options, input_shape [2, C, S], the network that scores them. Where there are mixture-of-experts
    layers, its outputs tell their routing (see `fedloom.core.moe`).
    """
    scored = isinstance(body, TextBackbone) and is_choices(input_shape)
    with seeded(seed, "head"):
        made = (choices if scored else Classifier)(body, num_classes)
    return routed(made, getattr(body, "aux", 0.0)) if made.moe_layers else made
