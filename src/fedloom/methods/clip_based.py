"""What methods for vision-language models have in common: which classes are scored, and FedAvg of what they train."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from fedloom.core import Batches, Context, ModelSpec, Payload, Update
from fedloom.methods.fedavg import FedAvg
from fedloom.models.clip.network import Clip, ClipNetwork

LabelScope = Literal["current", "seen"]
Build = Callable[[Clip], ClipNetwork]


@dataclass(frozen=True)
class ClipMethod(FedAvg):
    """FedAvg of the trainable parts around a frozen CLIP.

    build: the network from the towers and the words. label_scope: classes that a client scores in training, those of
    its task or all that have arrived; in evaluation always the latter.
    """

    build: Build = ClipNetwork  # type: ignore[assignment]
    label_scope: LabelScope = "current"

    needs_clip: ClassVar[bool] = True
    reveals: ClassVar[Mapping[str, str]] = {
        "params": "small parts around a frozen CLIP, trained on the client's data: open to gradient inversion",
        "buffers": "nothing: the parts have no statistics",
    }

    def module(self, spec: ModelSpec) -> ClipNetwork:
        """The network of the configured CLIP."""
        return self.build(spec.clip())

    def client_update(self, down: Payload, state: Payload, data: Batches, ctx: Context) -> Update:
        """Train on the shown classes; upload what was trained."""
        show(ctx, self.label_scope)
        return super().client_update(down, state, data, ctx)

    def deployed(self, down: Payload, state: Payload, ctx: Context) -> Context:
        """The network bound to this view, scoring every class that has arrived."""
        ctx = super().deployed(down, state, ctx)
        show(ctx, "seen")
        return ctx


def show(ctx: Context, scope: LabelScope) -> None:
    """Have the network of this process score the classes of the client's task, or all that have arrived."""
    module: ClipNetwork = ctx.net.module  # type: ignore[assignment]
    module.show(ctx.stage.classes if scope == "current" else ctx.stage.seen)
