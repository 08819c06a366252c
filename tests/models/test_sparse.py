"""Which weights may go, what they cost, and that sparse models come back as they were."""

from __future__ import annotations

import pytest
import torch

from fedloom.core import ConfigError, PayloadError
from fedloom.core.payload import digest, nbytes
from fedloom.models import NetworkSpec
from fedloom.models.sparse import by_macs, kept, nonzero_parameters, opened, packed, sparse_layers, uniform
from toys.weights_shared import SlidingSpec


def test_convolutions_and_linear_layers_may_be_pruned_but_not_the_head_norms_biases_or_what_is_frozen():
    module = SlidingSpec(6).classifier()
    assert list(sparse_layers(module)) == ["body.conv.weight", "body.fc.weight"]
    module.body.conv.weight.requires_grad_(False)
    assert list(sparse_layers(module)) == ["body.fc.weight"]
    with pytest.raises(ConfigError, match="no weights to prune; take a network with hidden layers"):
        sparse_layers(NetworkSpec("linear", 3, (2, 2)).classifier())


def test_times_are_the_positions_at_which_an_example_meets_a_weight():
    module = SlidingSpec(6).classifier()
    assert by_macs(module, (2,)) == {"body.conv.weight": 2.0, "body.fc.weight": 1.0}
    assert uniform(module, (2,)) == {"body.conv.weight": 1.0, "body.fc.weight": 1.0}
    assert module.training and all(not part._forward_hooks for part in module.modules())
    with pytest.raises(ConfigError, match=r"needs the input.s shape.*time=uniform"):
        by_macs(module, None)


def test_the_operations_of_the_resnet18_are_those_of_the_specification():
    module = NetworkSpec("resnet18", 10, (3, 32, 32)).classifier()
    times, layers = by_macs(module, (3, 32, 32)), sparse_layers(module)
    macs = sum(times[name] * layer.weight.numel() for name, layer in layers.items())
    assert macs + module.head.weight.numel() == pytest.approx(555.4e6, rel=1e-4)
    assert times["backbone.stem.weight"] == 1024 and times["backbone.blocks.7.conv2.weight"] == 16


def model(seed: int = 0):
    rng = torch.Generator().manual_seed(seed)
    params = {"a": torch.randn(3, 5, generator=rng), "b": torch.randn(2, 2, 3, generator=rng), "bias": torch.ones(3)}
    masks = {name: torch.rand(params[name].shape, generator=rng) < 0.5 for name in ("a", "b")}
    return {n: torch.where(masks[n], p, 0) if n in masks else p for n, p in params.items()}, masks


def test_a_sparse_model_comes_back_bit_for_bit():
    params, masks = model()
    stored = packed(params, masks)
    assert digest(kept(params, masks)) == digest({field: stored[field] for field in ("params", "values")})
    found, there = opened(stored, {name: p.shape for name, p in params.items()})
    assert all(torch.equal(found[name], params[name]) for name in params) and found.keys() == params.keys()
    assert all(torch.equal(there[name], masks[name]) for name in masks) and there.keys() == masks.keys()


def test_it_takes_four_bytes_per_kept_weight_and_a_bit_for_each():
    params, masks = model()
    active = sum(int(mask.sum()) for mask in masks.values())
    assert nbytes(kept(params, masks)) == 4 * (active + 3)
    assert nbytes(packed(params, masks)) == 4 * (active + 3) + 2 + 2


def test_values_that_do_not_fit_their_bits_are_refused():
    params, masks = model()
    stored, shapes = packed(params, masks), {name: p.shape for name, p in params.items()}
    cut = {**stored, "values": {**stored["values"], "a": stored["values"]["a"][1:]}}
    with pytest.raises(PayloadError, match=r"'a' came with \d+ values for \d+ places"):
        opened(cut, shapes)


def test_what_is_not_zero_is_counted_and_what_is_never_pruned_in_any_case():
    module = SlidingSpec(6).classifier()
    whole = sum(p.numel() for p in module.parameters())
    with torch.no_grad():
        module.body.fc.weight.zero_()
        module.body.fc.weight[0, :5] = 1.0
        module.head.weight.zero_()
    assert nonzero_parameters(module) == whole - 8 * 12 + 5


def test_a_network_that_reads_no_tensor_of_zeros_is_refused_in_words():
    module = NetworkSpec("mlp", 3, (4,)).classifier()
    with pytest.raises(ConfigError, match=r"operations of Classifier cannot be counted.*set time=uniform"):
        by_macs(module, (5,))
