"""A small network that learns from what another one gave."""

from __future__ import annotations

import torch
from torch import nn

from fedloom.local import SGD
from fedloom.local.on_outputs import train_on_outputs
from fedloom.local.terms import CrossEntropy, Proximal
from toys.federation import experiment, local

AVG = "fedloom.methods.fedavg:fedavg"


class Scaled(nn.Module):
    """Logits times one number."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x["logits"] * self.factor


def test_one_step_follows_the_gradient_and_the_other_network_stays():
    whole = experiment(AVG, num_stages=1)
    ctx = whole.context(whole.net(), 0, round=0, client=0)
    before = {name: p.clone() for name, p in ctx.net.module.named_parameters()}
    logits, y = torch.randn(20, 6, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 6
    loop = local(optimizer=SGD(lr=0.5), epochs=2, batch_size=20, terms=(CrossEntropy(), Proximal(0.1)))
    end = train_on_outputs(loop, Scaled, {"logits": logits}, y, ctx)
    factor = torch.ones(())
    for _ in range(2):
        factor = factor.clone().requires_grad_()
        loss = nn.functional.cross_entropy(logits * factor, y) + 0.05 * (factor - 1) ** 2
        factor = factor.detach() - 0.5 * torch.autograd.grad(loss, factor)[0]
    torch.testing.assert_close(end.params["factor"], factor)
    assert abs(float(factor) - 1) > 0.01 and end.steps == 2
    assert all(torch.equal(before[name], p) for name, p in ctx.net.module.named_parameters())
    again = train_on_outputs(loop, Scaled, {"logits": logits}, y, ctx)
    assert torch.equal(again.params["factor"], end.params["factor"])
