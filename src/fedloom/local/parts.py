"""The slots of local training: what each part is called with, and what it must return.

out: outputs of the network for one batch, plus what the decisions added ("logits", "feats", "gates", ...).
ref: what does not change during the client's work: "anchor" (the downloaded parameters), "seen", "old", "current" and
"all" (additive class masks or None, see `Context.class_mask`), and whatever the method passes.
carry: name of the carry -> its tensors, as they were before this batch.
A part names the `ref` keys that it reads in `needs`; the loop checks them before the first step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from fedloom.core.batches import Batch
from fedloom.core.context import Context, Outputs
from fedloom.core.tree import Tensors

Ref = Mapping[str, Any]
Carried = Mapping[str, Tensors]


class Decision(Protocol):
    """A choice made per batch without gradient (a routing, a teacher's output); its result is merged into `out`."""

    def __call__(self, out: Outputs, batch: Batch, ref: Ref, carry: Carried) -> Outputs:
        """Return the names to add to `out`."""
        ...


class Term(Protocol):
    """One summand of the loss: a scalar, the mean over the batch unless its docstring says otherwise."""

    def __call__(self, params: Tensors, out: Outputs, batch: Batch, ref: Ref, carry: Carried) -> Tensor:
        """Return the scalar."""
        ...


class GradTransform(Protocol):
    """A change of the gradients between backward and the optimiser step (control variates, masks)."""

    def __call__(self, grads: Tensors, params: Tensors, ref: Ref) -> Tensors:
        """Return the gradients to use; it may change `grads` in place."""
        ...


@runtime_checkable
class Carry(Protocol):
    """State threaded through the batches of one client update (a running Fisher, routing averages)."""

    def init(self, ref: Ref, ctx: Context) -> Tensors:
        """Value before the first batch."""
        ...

    def update(self, value: Tensors, out: Outputs, batch: Batch, ref: Ref) -> Tensors:
        """Value after a batch; `out` is detached and was computed before the optimiser step."""
        ...

    def close_epoch(self, value: Tensors) -> Tensors:
        """Value after an epoch."""
        ...

    def close(self, value: Tensors) -> Tensors:
        """Value after the last epoch."""
        ...
