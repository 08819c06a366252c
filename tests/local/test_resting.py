"""What rests while a part of a network trains."""

from __future__ import annotations

import torch
from torch import nn

from fedloom.local import Phase
from fedloom.local.resting import resting
from toys.federation import experiment, local

AVG = "fedloom.methods.fedavg:fedavg"


def trained(rest: bool):
    """Parameters and buffers before and after training the blobs' head alone."""
    whole = experiment(AVG)
    ctx, data = whole.context(whole.net(), 0, round=0, client=0), whole.plan.train(0, 0, 0, "train")
    loop, down = local(phases=(Phase(("head.*",)),)), ctx.init_state()
    if not rest:
        return down, loop(down, data, ctx), ctx
    with resting(ctx.net.module, ("head.weight", "head.bias")):
        return down, loop(down, data, ctx), ctx


def test_statistics_of_what_does_not_move_stay_although_the_loop_is_in_training_mode():
    down, end, _ = trained(rest=True)
    assert all(torch.equal(down["buffers"][name], tensor) for name, tensor in end.buffers.items())
    same = {name for name, tensor in end.params.items() if torch.equal(down["params"][name], tensor)}
    assert same == end.params.keys() - {"head.weight", "head.bias"}
    down, end, _ = trained(rest=False)
    assert not torch.equal(down["buffers"]["body.layers.1.running_mean"], end.buffers["body.layers.1.running_mean"])


def test_afterwards_training_is_as_before():
    _, _, ctx = trained(rest=True)
    assert not ctx.net.module._forward_pre_hooks
    ctx.net.train(True)
    ctx.net(torch.zeros(2, 2))
    assert ctx.net.module.body.layers[1].training


def test_dropout_between_moving_layers_stays_active_and_that_inside_a_resting_part_does_not():
    base = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    net = nn.Sequential(base, nn.Dropout(0.5), nn.Linear(2, 2)).train()
    with resting(net, ("2.weight",)):
        net(torch.zeros(1, 2))
    assert not base.training and not base[1].training
    assert net.training and net[1].training and net[2].training
