"""The attention that shared prompts got over a client's examples."""

from __future__ import annotations

import torch

from fedloom.core.batches import Batch
from fedloom.local.carries.attention_mass import AttentionMass


class Machine:
    class net:
        class forward:
            device = torch.device("cpu")


def test_it_is_the_mean_over_examples_without_the_own_prompt():
    part, ref = AttentionMass(), {"prompts": torch.zeros(2, 4, 8)}
    value = part.init(ref, Machine)
    assert part.close(value)["mean"].tolist() == [0, 0]
    for size, mass in ((3, [0.5, 0.3, 0.2]), (1, [0.1, 0.1, 0.8])):
        batch = Batch(torch.zeros(size), torch.zeros(size), torch.arange(size))
        value = part.update(value, {"attention": torch.tensor(mass)}, batch, ref)
    torch.testing.assert_close(part.close(part.close_epoch(value))["mean"], torch.tensor([0.25, 0.35]))
