"""A head of fixed width whose unseen rows are frozen and masked equals a head that really has fewer rows."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedloom.core.payload import narrow, nbytes, widen
from fedloom.local import SGD, AdamW, LocalSGD, Schedule
from fedloom.local.sgd import clip
from fedloom.local.terms import CrossEntropy, Distillation, Proximal, TeacherLogits
from local.blobs import context, data
from toys.federation import BlobSpec

SEEN, WIDTH = 3, 6
ROWS = {("params", "head.weight"): 0, ("params", "head.bias"): 0}


def grown() -> nn.Module:
    """The network that has met three classes so far."""
    module = BlobSpec(WIDTH).classifier()
    head = nn.Linear(module.head.in_features, SEEN)
    with torch.no_grad():
        head.weight.copy_(module.head.weight[:SEEN])
        head.bias.copy_(module.head.bias[:SEEN])
    module.head = head
    return module


def both(loop: LocalSGD, teacher: bool = False):
    wide, small = context(seen=range(SEEN), num_classes=WIDTH), context(grown, seen=range(SEEN), num_classes=SEEN)
    ends = []
    for ctx in (wide, small):
        state = ctx.init_state()
        used = loop
        if teacher:
            twin = {n: t + 0.1 for n, t in state["params"].items()}
            used = LocalSGD(
                loop.optimizer, epochs=2, batch_size=8, terms=(CrossEntropy(), Distillation()),
                decisions=(TeacherLogits(ctx.teacher(twin, state["buffers"])),),
            )  # fmt: skip
        ends.append(used(state, data(), ctx))
    return wide, ends


OPTIMIZERS = [
    SGD(lr=0.1),
    SGD(lr=0.1, momentum=0.9, weight_decay=0.1),
    SGD(lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True),
    # A bias before batch normalisation has the gradient 0 but for rounding, which a small eps would blow up to a step.
    AdamW(lr=0.02, weight_decay=0.3, eps=1e-3),
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
@pytest.mark.parametrize("clip_norm", [None, 0.3])
@pytest.mark.parametrize("terms", [(CrossEntropy(),), (CrossEntropy(), Proximal(0.5))], ids=["ce", "prox"])
def test_parameters_are_equal_after_several_steps(optimizer, clip_norm, terms):
    loop = LocalSGD(optimizer, Schedule("cosine", per="step"), epochs=2, batch_size=8, clip_norm=clip_norm, terms=terms)
    ctx, (wide, small) = both(loop)
    _compare(ctx, wide, small)


def test_distillation_is_equal():
    ctx, (wide, small) = both(LocalSGD(SGD(lr=0.1, weight_decay=0.1)), teacher=True)
    _compare(ctx, wide, small)


def _compare(ctx, wide, small) -> None:
    cut = narrow({"params": wide.params, "buffers": wide.buffers}, ROWS, range(SEEN))
    for name, tensor in small.params.items():
        torch.testing.assert_close(cut["params"][name], tensor, rtol=1e-5, atol=1e-6)
    for name, tensor in small.buffers.items():
        torch.testing.assert_close(cut["buffers"][name], tensor, rtol=1e-5, atol=1e-6)
    assert wide.metrics["loss"] == pytest.approx(small.metrics["loss"], rel=1e-5)
    initial = ctx.init_state()
    assert torch.equal(wide.params["head.weight"][SEEN:], initial["params"]["head.weight"][SEEN:])
    whole = {"params": wide.params, "buffers": wide.buffers}
    assert nbytes(cut) == nbytes({"params": small.params, "buffers": small.buffers}) == nbytes(whole, ROWS, range(SEEN))
    back = widen(cut, ROWS, range(SEEN), initial)
    assert all(torch.equal(back["params"][n], t) for n, t in wide.params.items())


def test_gradient_norms_are_equal():
    wide, small = context(seen=range(SEEN)), context(grown, seen=range(SEEN), num_classes=SEEN)
    norms = []
    for ctx in (wide, small):
        state = ctx.init_state()
        live = ctx.bind(state["params"], state["buffers"])
        batch = next(data().epoch(0, 16))
        CrossEntropy()(live, ctx.apply(batch.x), batch, {"seen": ctx.class_mask("seen")}, {}).backward()
        grads = [p.grad for p in live.values()]
        norms.append(torch.stack([g.square().sum() for g in grads]).sum().sqrt())
        clip(grads, 0.1)
    torch.testing.assert_close(norms[0], norms[1], rtol=1e-6, atol=0)
    head = wide.net.module.head.weight.grad
    assert not head[SEEN:].any(), "masked rows get no gradient"
    torch.testing.assert_close(head[:SEEN], small.net.module.head.weight.grad)
