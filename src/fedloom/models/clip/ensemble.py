"""Several sentences about every class, whose features are averaged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fedloom.models.clip.network import Clip, ClipNetwork
from fedloom.models.clip.words import Phrases, fixed


class TemplateEnsemble(ClipNetwork):
    """Text features t_c = normalise(mean_p t_c^p) over the templates p, each t_c^p of length 1; nothing trains.

    Source: Radford et al., "Learning Transferable Visual Models From Natural Language Supervision" (ICML 2021), section
    3.1.4. templates: with {} once, where the class name goes; at least one.
    """

    def __init__(self, clip: Clip, templates: Sequence[str]):
        several = [fixed(clip.words, template, clip.towers.length) for template in templates]
        super().__init__(clip, several[0])
        self.several = tuple(several)

    def _texts_of(self, context: Tensor | None, phrases: Phrases | None) -> tuple[Tensor, list[Any]]:
        found = [super(TemplateEnsemble, self)._texts_of(context, each)[0] for each in self.several]
        return F.normalize(torch.stack(found).mean(0), dim=-1), []
