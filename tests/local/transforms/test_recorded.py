"""What is recorded of gradients, by hand and in training: of all weights, before they are masked or clipped."""

from __future__ import annotations

import pytest
import torch

from fedloom.local import LocalSGD
from fedloom.local.transforms.masked import MaskedGradients
from fedloom.local.transforms.recorded import RECORDS, PerStep, RecordGradients
from toys.federation import experiment


@pytest.mark.parametrize(("name", "expected"), [("per_step", [10.0, 8.0]), ("summed", [4.0, 16.0])])
def test_squares_of_steps_and_of_their_sum(name: str, expected: list[float]):
    record = RECORDS[name](["w"])
    for step in ([3.0, 2.0], [-1.0, 2.0]):
        grads = {"w": torch.tensor(step), "b": torch.tensor([9.0])}
        assert RecordGradients()(grads, {}, {"record": record}) is grads
        assert grads["w"].tolist() == step
    assert {n: t.tolist() for n, t in record.squares().items()} == {"w": expected}


@pytest.mark.parametrize("name", RECORDS)
def test_without_steps_nothing_is_recorded(name: str):
    assert RECORDS[name](["w"]).squares() == {}


def test_pruned_weights_are_recorded_as_if_there_were_no_mask_and_no_clipping():
    """One step from the same model: the recorded square is that of plain autograd."""
    whole = experiment("fedloom.methods.fedavg:fedavg", num_stages=1)
    ctx, data = whole.context(whole.net(), 0, round=0, client=0), whole.plan.train(0, 0, 0, "train")
    state, name = ctx.init_state(), "body.layers.0.weight"
    masks, record = {name: torch.zeros(8, 2, dtype=torch.bool)}, PerStep([name])
    local = LocalSGD(batch_size=len(data), clip_norm=1e-3, transforms=(RecordGradients(), MaskedGradients()))
    local(state, data, ctx, ref={"masks": masks, "record": record})
    live = ctx.bind(state["params"], state["buffers"])
    ctx.net.train(True)
    (batch,) = data.epoch(0, len(data))
    loss = torch.nn.functional.cross_entropy(ctx.apply(batch.x)["logits"], batch.y)
    (grad,) = torch.autograd.grad(loss, [live[name]])
    torch.testing.assert_close(record.squares()[name], grad.square())
    assert (grad != 0).all()
