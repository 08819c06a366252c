"""The server's record of which experts past tasks used most, so that later tasks leave them alone.

Source: Yu et al., "Boosting Continual Learning of Vision-Language Models via Mixture-of-Experts Adapters" (CVPR 2024).
Fields of the server's state, "image" and "text" [layers, experts] in each: "usage", sums of gates of all clients in the
task "task" (its index, []), and "frozen", bool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fedloom.core import Context, Payload, Reply
from fedloom.core.tree import zeros_like
from fedloom.models.clip.network import ClipNetwork
from fedloom.select.most_used import most_used

FIELDS = ("usage", "frozen", "task")


@dataclass(frozen=True)
class ActivateFreeze:
    """count: experts per layer that each task adds to the frozen ones; 0 keeps no record."""

    count: int = 0

    def initial(self, ctx: Context, experts: int) -> dict[str, Any]:
        """Nothing used, nothing frozen."""
        if not self.count:
            return {}
        module: ClipNetwork = ctx.net.module  # type: ignore[assignment]
        layers = {"image": len(module.image_adapters), "text": len(module.text_adapters)}
        usage = {tower: torch.zeros(count, experts) for tower, count in layers.items()}
        frozen = {tower: torch.zeros(count, experts, dtype=torch.bool) for tower, count in layers.items()}
        return {"usage": usage, "frozen": frozen, "task": {"stage": torch.tensor(0)}}

    def begun(self, server: Payload, ctx: Context) -> dict[str, Any]:
        """The fields as they are once this task has begun."""
        if not self.count:
            return {}
        if int(server["task"]["stage"]) == ctx.stage.index:
            return {name: server[name] for name in FIELDS}
        used, frozen = server["usage"], server["frozen"]
        return {
            "usage": zeros_like(used),
            "frozen": {tower: most_used(used[tower], frozen[tower], self.count) for tower in frozen},
            "task": {"stage": torch.tensor(ctx.stage.index)},
        }

    def updated(self, server: Payload, replies: Sequence[Reply], ctx: Context) -> dict[str, Any]:
        """The fields after clients have told "usage"."""
        fields = self.begun(server, ctx)
        for reply in replies if fields else ():
            fields["usage"] = {tower: used + reply.up["usage"][tower] for tower, used in fields["usage"].items()}
        return fields
