"""What a client remembers of its routing from task to task, for the stability term of Fed-Duet, on any network.

The fields of a client's state: "routing", the running average of `RoutingAverage`; "target", what its routing is held
to in its task, such as that average as the task before left it, empty in its first; "task", "stage" int64.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fedloom.core import Context, Payload
from fedloom.core.tree import Tensors

CARRY = "routing_average"


def recalled(state: Payload, ctx: Context, first: Tensors | None = None) -> dict[str, Tensors]:
    """What the carry and the term (`RoutingStability`) read in local training, of the client's state.

    first: the target of a task that the client begins, by default its running average.
    """
    average = state.get("routing", {})
    goes_on = "task" in state and int(state["task"]["stage"]) == ctx.stage.index
    begun = average if first is None else first
    return {CARRY: average, "routing_target": state.get("target", {}) if goes_on else begun}


def remembered(carry: Mapping[str, Tensors], ref: Mapping[str, Any], ctx: Context) -> Payload:
    """The fields of the new state, of closed carries and what was recalled; none without the carry."""
    if CARRY not in carry:
        return {}
    stage = torch.tensor(ctx.stage.index)
    return {"routing": carry[CARRY], "target": ref["routing_target"], "task": {"stage": stage}}
