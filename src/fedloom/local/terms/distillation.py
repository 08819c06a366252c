"""Distillation from a teacher's logits."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from fedloom.core.batches import Batch, Inputs
from fedloom.core.context import Outputs
from fedloom.core.errors import ConfigError
from fedloom.core.tree import Tensors
from fedloom.local.parts import Carried, Ref


@dataclass(frozen=True)
class Distillation:
    """weight * factor * mean_b KL(softmax(teacher / T) || softmax(student / T)) over the classes of `scope`.

    factor is T^2 with `scale=True` (Hinton et al., "Distilling the Knowledge in a Neural Network", 2015,
    section 2) and 1 without. teacher: name in `out` of the teacher's logits, which get no gradient; a decision
    such as `TeacherLogits` puts them there. A scope without classes ("old" in the first stage) has the loss 0.
    """

    temperature: float = 2.0
    weight: float = 1.0
    scope: str = "seen"
    scale: bool = True
    teacher: str = "teacher"

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise ConfigError(f"temperature must be a finite number above 0, got {self.temperature}")
        if not (math.isfinite(self.weight) and self.weight >= 0):
            raise ConfigError(f"distillation weight must be a finite number of at least 0, got {self.weight}")

    @property
    def needs(self) -> tuple[str, ...]:
        """The mask of the scope."""
        return (self.scope,)

    def __call__(self, params: Tensors, out: Outputs, batch: Batch, ref: Ref, carry: Carried) -> Tensor:
        """Return the scalar."""
        mask = ref[self.scope]
        student, teacher = out["logits"] / self.temperature, out[self.teacher].detach() / self.temperature
        if mask is not None:
            inside = mask == 0
            student, teacher = student[:, inside], teacher[:, inside]
        loss = F.kl_div(F.log_softmax(student, -1), F.log_softmax(teacher, -1), reduction="batchmean", log_target=True)
        return self.weight * (self.temperature**2 if self.scale else 1.0) * loss


@dataclass(frozen=True)
class TeacherLogits:
    """Decision that adds the logits of another network to `out` (see `Context.teacher`)."""

    forward: Callable[[Inputs], Outputs]
    name: str = "teacher"

    def __call__(self, out: Outputs, batch: Batch, ref: Ref, carry: Carried) -> Outputs:
        """Return the teacher's logits of the batch."""
        return {self.name: self.forward(batch.x)["logits"]}
