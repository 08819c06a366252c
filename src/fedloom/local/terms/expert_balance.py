"""Load balance of adapters in two towers: the mean over all layers of both (`fedloom.local.tower_routing`).

A form gives one number per layer, of probs and gates [layers, N, E].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.core.batches import Batch
from fedloom.core.context import Outputs
from fedloom.core.errors import pick
from fedloom.core.tree import Tensors
from fedloom.local.parts import Carried, Ref
from fedloom.local.tower_routing import LEAST, check_weight, learning, nothing, probabilities

Form = Callable[[Tensor, Tensor], Tensor]


def switch(probs: Tensor, gates: Tensor) -> Tensor:
    """E sum_e f_e P_e: 1 where all experts share alike, E where one takes all.

    f_e: expert e's share of all choices, without gradient. P_e: its mean probability. Source: Fedus et al., "Switch
    Transformers" (JMLR 2022), eqs. (4)-(6) without alpha.
    """
    choices = (gates.detach() > 0).to(probs.dtype)
    share = choices.sum(1) / choices.sum((1, 2)).unsqueeze(1)
    return probs.shape[2] * (share * probs.mean(1)).sum(1)


def cv(probs: Tensor, gates: Tensor) -> Tensor:
    """CV^2(importance) + CV^2(load): of the sums of gates, and of the numbers of samples, which have no gradient.

    Source: Shazeer et al., "Outrageously Large Neural Networks" (ICLR 2017), eqs. (6)-(7), with plain counts.
    """
    return squared_cv(gates.sum(1)) + squared_cv((gates.detach() > 0).to(gates.dtype).sum(1))


def entropy(probs: Tensor, gates: Tensor) -> Tensor:
    """- (mean entropy of a sample) + (entropy of the mean) + CV^2(importance).

    The form of Fed-Duet's release of 2025, with its signs: they favour samples that do not decide and a mean that does.
    """
    return _entropy(probs.mean(1)) - _entropy(probs).mean(1) + squared_cv(gates.sum(1))


FORMS: dict[str, Form] = {"switch": switch, "cv": cv, "entropy": entropy}


def squared_cv(values: Tensor) -> Tensor:
    """Unbiased variance over squared mean of the last dimension: its size where one takes all, 0 where it is 1."""
    if values.shape[-1] == 1:
        return 0 * values.squeeze(-1)
    return values.var(-1) / (values.mean(-1).square() + 1e-10)


def _entropy(probs: Tensor) -> Tensor:
    return -(probs * probs.clamp(min=LEAST).log()).sum(-1)


@dataclass(frozen=True)
class ExpertBalance:
    """weight * form; 0 where the routers are held still or there are none. form: a key of `FORMS`."""

    form: str
    weight: float

    def __post_init__(self) -> None:
        pick("balance", self.form, FORMS)
        check_weight("alpha", self.weight)

    def __call__(self, params: Tensors, out: Outputs, batch: Batch, ref: Ref, carry: Carried) -> Tensor:
        """Return the scalar."""
        if not learning(out):
            return nothing(out)
        form = FORMS[self.form]
        found = [form(probs, out[f"{tower}_gates"]) for tower, probs in probabilities(out).items()]
        return self.weight * torch.cat(found).mean()
