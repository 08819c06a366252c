"""The running mean of the routing."""

from __future__ import annotations

import pytest
import torch

from fedloom.core import ConfigError
from fedloom.local.carries.routing_average import RoutingAverage
from local.routed_towers import batch, drawn, out


def test_each_batch_moves_the_mean_by_a_tenth_of_its_own():
    carry, batches = RoutingAverage(), [drawn(2, 6, 4, seed=k).detach() for k in range(3)]
    value = carry.init({"routing_average": {}}, None)
    assert value == {}
    for logits in batches:
        value = carry.close_epoch(carry.update(value, out(logits), batch([]), {}))
    means = [logits.softmax(2).mean(1) for logits in batches]
    torch.testing.assert_close(carry.close(value)["image"], 0.81 * means[0] + 0.09 * means[1] + 0.1 * means[2])
    assert value.keys() == {"image"}


def test_it_goes_on_from_what_is_passed_and_leaves_that_alone():
    before = {"image": torch.full((1, 2), 0.5), "text": torch.tensor([[0.9, 0.1]])}
    carry = RoutingAverage(0.75)
    text = torch.tensor([[[0.0, 0.0]]])
    value = carry.update(carry.init({"routing_average": before}, None), out(text=text), batch([]), {})
    torch.testing.assert_close(value["text"], torch.tensor([[0.8, 0.2]]))
    assert torch.equal(value["image"], before["image"])
    assert torch.equal(before["text"], torch.tensor([[0.9, 0.1]]))


def test_with_nothing_kept_it_is_the_last_batch():
    carry = RoutingAverage(0.0)
    value = carry.update({"image": torch.ones(1, 4)}, out(drawn(1, 6, 4).detach()), batch([]), {})
    torch.testing.assert_close(value["image"], drawn(1, 6, 4).softmax(2).mean(1).detach())


def test_a_part_that_is_no_part_is_refused_in_words():
    with pytest.raises(ConfigError, match="at least 0 and below 1, got 1"):
        RoutingAverage(1.0)
