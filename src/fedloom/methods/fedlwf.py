"""FedLwF: FedAvg that keeps the old model's answers for the old classes, on new data alone.

Source: Li and Hoiem, "Learning without Forgetting" (ECCV 2016), eqs. (1)-(3), on every client of FedAvg. From the
second stage on, with z the logits, t those of the global model of the end of the last stage, and T the temperature:

    loss = CE(z, y) + weight * H(softmax(t_old / T), softmax(z_old / T))

Both softmaxes of H are over the classes that had arrived before the stage. There is no factor T^2, as in the paper and
in the public code of federated class-incremental learning. The reported loss has KL in place of H: they differ by the
teacher's entropy, which no parameter changes. The first stage is FedAvg with the same label scope, bit for bit.

Decisions: the cross-entropy is over the client's current classes (`label_scope="current"`: rows of old classes learn
from the teacher alone; "seen" lets new classes compete with old ones); the teacher sees the same augmented batch, in
evaluation mode. The paper's first phase, in which only new rows train, is left out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt

from fedloom.local import LocalSGD
from fedloom.local.terms import CrossEntropy, Distillation
from fedloom.methods.teachers import TaughtFedAvg

PRESETS: dict[str, dict[str, Any]] = {"paper": {}}
ABLATIONS: dict[str, dict[str, Any]] = {"no-distillation": {"weight": 0.0}}


def fedlwf(
    *,
    local: LocalSGD,
    weight: Annotated[float, Ge(0)] = 3.0,
    temperature: Annotated[float, Gt(0)] = 2.0,
    label_scope: Literal["current", "seen"] = "current",
    uniform: bool = False,
    buffers: Literal["mean", "pooled", "frozen"] = "mean",
) -> TaughtFedAvg:
    """Assemble FedLwF; the options that are not named here are FedAvg's.

    weight: of the distillation of the old model's answers.
    temperature: T of both softmaxes of the distillation.
    """
    taught = Distillation(temperature, weight, scope="old", scale=False)
    return TaughtFedAvg(replace(local, terms=(CrossEntropy(label_scope),)), uniform, buffers, taught)
