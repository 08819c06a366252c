"""What a client remembers of its routing: the running average, and the target of its task."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedloom.methods.routing_memory import CARRY, recalled, remembered


def context(stage: int) -> Any:
    return SimpleNamespace(stage=SimpleNamespace(index=stage))


@pytest.mark.parametrize("given", [False, True], ids=["its own average", "a given target"])
@pytest.mark.parametrize("stages", [[0, 0, 0], [0, 1, 1, 2], [1, 1, 3], [0, 2, 2, 5, 5]])
def test_a_task_has_one_target_which_is_taken_when_it_begins(stages: list[int], given: bool) -> None:
    state: Any = {}
    targets: list[Any] = []
    for k, stage in enumerate(stages):
        first = {"gate": torch.tensor([10.0 + k])} if given else None
        ref = recalled(state, context(stage), first)
        assert ref[CARRY] == ({"gate": torch.tensor([k - 1.0])} if k else {}), "the average goes on in every round"
        targets.append(ref["routing_target"])
        state = remembered({CARRY: {"gate": torch.tensor([float(k)])}}, ref, context(stage))
    for k, stage in enumerate(stages):
        begun = stages.index(stage)
        expected = 10.0 + begun if given else begun - 1.0
        assert targets[k] == ({"gate": torch.tensor([expected])} if given or begun else {})


def test_without_the_carry_nothing_is_remembered() -> None:
    assert remembered({"fisher": {}}, recalled({}, context(0)), context(0)) == {}
