"""Nested sub-networks: their channels and sizes, and a scaler that acts in training alone."""

from __future__ import annotations

import pytest
import torch

from fedloom.core import ConfigError
from fedloom.models import NetworkSpec
from fedloom.models.channels import Channels, Group
from fedloom.models.compact import prunable
from fedloom.models.nested import prefix, scaled
from toys.pruned import SMALL, inputs, network


def channels(*sizes: int) -> Channels:
    return Channels(tuple(Group(f"g{k}", size, (), (), ()) for k, size in enumerate(sizes)), {})


@pytest.mark.parametrize(("rate", "widths"), [(1.0, (7, 100)), (0.5, (4, 50)), (0.07, (1, 7)), (0.0625, (1, 7))])
def test_widths_are_rounded_up_and_not_by_rounding_errors(rate: float, widths: tuple[int, ...]):
    table = channels(7, 100)
    kept = prefix(table, rate)
    assert table.widths(kept) == widths
    assert all(part.tolist() == list(range(len(part))) for part in kept.values())


@pytest.mark.parametrize("rate", [0.0, -0.5, 1.5, float("nan")])
def test_rates_outside_the_unit_interval_are_refused(rate: float):
    with pytest.raises(ConfigError, match=r"rates must be shares of the width in \(0, 1\]"):
        prefix(channels(4), rate)
    with pytest.raises(ConfigError, match="rates must be"), scaled(network("toy"), channels(4), rate):
        pass


def test_sizes_of_the_resnet18_at_all_rates():
    """2,797,610 parameters at half the width: 25.04 %, about r^2."""
    module = prunable(NetworkSpec("resnet18", 10, (3, 32, 32)).classifier())
    table = module.channels
    sizes = {r: sum(p.numel() for p in module.rebuild(table.widths(prefix(table, r))).parameters()) for r in (1.0, 0.5)}
    assert sizes == {1.0: 11_173_962, 0.5: 2_797_610}
    assert sizes[0.5] / sizes[1.0] == pytest.approx(0.2504, abs=5e-5)


@pytest.mark.parametrize("name", SMALL)
def test_in_evaluation_the_scaler_changes_no_bit_and_it_leaves_nothing_behind(name: str):
    module, (x, _) = network(name).eval(), inputs(name)
    names, plain = list(module.state_dict()), module(x)["logits"]
    with scaled(module, module.channels, 0.25):
        assert torch.equal(module(x)["logits"], plain)
        assert list(module.state_dict()) == names
    with pytest.raises(RuntimeError, match="inside"), scaled(module, module.channels, 0.25):
        raise RuntimeError("inside")
    assert all(not part._forward_hooks for part in module.modules())


def test_in_training_layers_that_write_channels_are_divided_and_the_head_is_not():
    module, (x, _) = network("mlp").train(), inputs("mlp")
    (one, two), head = [layer[0] for layer in module.backbone.layers], module.head
    with scaled(module, module.channels, 0.25):
        found = module(x)["logits"]
    torch.testing.assert_close(found, head((two((one(x.flatten(1)) / 0.25).relu()) / 0.25).relu()))
    with scaled(module, module.channels, 1.0):
        assert torch.equal(module(x)["logits"], module(x)["logits"])


@pytest.mark.parametrize("name", ["toy", "resnet8"])
def test_a_batch_norm_takes_the_factor_away_again_but_for_its_epsilon(name: str):
    module, (x, _) = network(name).train(), inputs(name)
    plain = module(x)["logits"]
    with scaled(module, module.channels, 0.5):
        found = module(x)["logits"]
    assert 0 < (found - plain).abs().max() < 1e-3 * plain.abs().max()


def test_the_smallest_rates_leave_a_channel():
    assert [len(kept) for kept in prefix(channels(4), 1e-300).values()] == [1] * len(channels(4).groups)
