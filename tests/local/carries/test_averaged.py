"""The mean of an output's column over training."""

from __future__ import annotations

import torch

from fedloom.core import Batch
from fedloom.local.carries.averaged import Averaged, mean
from toys.federation import experiment


def test_it_is_the_mean_over_examples_not_over_batches():
    whole = experiment("fedloom.methods.fedavg:fedavg")
    carry, ctx = Averaged("gates", column=1), whole.context(whole.net(), 0)
    value = carry.init({}, ctx)
    for gates in ([[0.9, 0.1]], [[0.5, 0.5], [0.2, 0.8], [0.4, 0.6]]):
        y = torch.zeros(len(gates), dtype=torch.long)
        value = carry.update(value, {"gates": torch.tensor(gates)}, Batch(torch.tensor(gates), y, y), {})
        value = carry.close_epoch(value)
    assert abs(mean(carry.close(value)) - 0.5) < 1e-7
    assert mean(carry.init({}, ctx)) == 0.0
