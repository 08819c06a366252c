"""Zero-shot CLIP: classes are scored by their names; nothing is trained and nothing is sent.

Source: Radford et al., "Learning Transferable Visual Models From Natural Language Supervision" (ICML 2021, arXiv
2103.00020), section 3.1. With f the picture's feature and t_c that of a sentence about class c, both of length 1:

    logits_c = exp(ls) f . t_c

It is the line that every method which trains around the same CLIP has to pass: evaluated after each stage over the
classes that have arrived, with no message and no visit of an example. `templates="ensemble"` takes for t_c the
normalised mean over the 80 sentences that the paper used for ImageNet, `template` is then not read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from fedloom.core import Context, Exchange, Method, ModelSpec, Payload, Stage, Trip
from fedloom.methods.clip_based import show
from fedloom.models.clip.ensemble import TemplateEnsemble
from fedloom.models.clip.network import ClipNetwork
from fedloom.models.clip.packages import open_clip

PRESETS: dict[str, dict[str, Any]] = {"paper": {}}


@dataclass(frozen=True)
class ZeroShot(Method):
    """templates: sentences with {} where the class name goes; empty for the 80 of open_clip."""

    templates: tuple[str, ...] = ()

    needs_clip: ClassVar[bool] = True
    personal: ClassVar[bool] = False
    reveals: ClassVar[Mapping[str, str]] = {}

    def module(self, spec: ModelSpec) -> ClipNetwork:
        """The frozen CLIP."""
        return TemplateEnsemble(spec.clip(), self.templates or imagenet_templates())

    def exchanges(self) -> Mapping[str, Exchange]:
        """None."""
        return {}

    def plan(self, stage: Stage) -> Iterable[Trip]:
        """No trip."""
        return ()

    def deployed(self, down: Payload, state: Payload, ctx: Context) -> Context:
        """The frozen CLIP, scoring every class that has arrived."""
        show(ctx, "seen")
        return super().deployed(down, state, ctx)


def imagenet_templates() -> tuple[str, ...]:
    """The 80 sentences of open_clip, with {} for the class name."""
    return tuple(template("{}") for template in open_clip().OPENAI_IMAGENET_TEMPLATES)


def zeroshot(*, template: str = "a photo of a {}.", templates: Literal["one", "ensemble"] = "one") -> ZeroShot:
    """Zero-shot CLIP.

    template: the sentence, with {} for the class name.
    templates: `one`: that sentence; `ensemble`: the mean over the paper's 80, and `template` is not read.
    """
    return ZeroShot((template,) if templates == "one" else ())
