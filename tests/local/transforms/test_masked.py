"""Weights outside a mask stay exactly 0 after every step, whatever the optimiser does."""

from __future__ import annotations

import pytest
import torch

from fedloom.local import SGD, AdamW, LocalSGD
from fedloom.local.transforms.masked import MaskedGradients
from toys.federation import experiment


def test_gradients_outside_the_mask_are_zero_even_where_they_are_not_numbers():
    masks = {"w": torch.tensor([True, False, False])}
    grads = {"w": torch.tensor([2.0, 3.0, torch.nan]), "b": torch.tensor([4.0])}
    found = MaskedGradients()(grads, {}, {"masks": masks})
    assert found["w"].tolist() == [2.0, 0.0, 0.0] and found["b"].tolist() == [4.0]


class Watch:
    """A transform that looks at the parameters before every step."""

    needs = ("masks",)

    def __init__(self):
        self.steps = 0

    def __call__(self, grads, params, ref):
        assert all((params[n][~mask] == 0).all() for n, mask in ref["masks"].items())
        self.steps += 1
        return grads


@pytest.mark.parametrize(
    "optimizer", [SGD(lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True), AdamW(lr=0.01, weight_decay=0.5)]
)
def test_pruned_weights_are_exactly_zero_after_every_local_step(optimizer):
    whole, watch = experiment("fedloom.methods.fedavg:fedavg", num_stages=1), Watch()
    ctx = whole.context(whole.net(), 0, round=0, client=0)
    state, name = ctx.init_state(), "body.layers.0.weight"
    masks = {name: torch.arange(16).view(8, 2) % 3 == 0}
    params = {**state["params"], name: state["params"][name] * masks[name]}
    local = LocalSGD(optimizer, epochs=2, batch_size=8, clip_norm=1.0, transforms=(watch, MaskedGradients()))
    end = local({**state, "params": params}, whole.plan.train(0, 0, 0, "train"), ctx, ref={"masks": masks})
    assert watch.steps == end.steps > 10
    assert torch.equal(end.params[name] != 0, masks[name])
    assert not torch.equal(end.params[name], params[name])
