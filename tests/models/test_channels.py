"""Tables of channels: what belongs to which group, and moving values between dense and compact networks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedloom.core import ConfigError, PayloadError
from fedloom.merge.by_index import indexed_mean, take_part
from fedloom.models import NetworkSpec
from fedloom.models.channels import Axis, Channels, Draft, Tap, channels_of, pack, unpack
from fedloom.models.compact import prunable
from toys.pruned import SHAPES, SMALL, network, some


def classifier(name: str, shape: tuple[int, ...] = (3, 32, 32), **options: int) -> nn.Module:
    with torch.device("meta"):
        return NetworkSpec(name, 10, shape, options=tuple(options.items())).classifier()


def readers(table: Channels, group: str) -> set[str]:
    return {
        n.removesuffix(".weight") for n, axes in table.axes.items() if len(axes) > 1 and (axes[1] or ("",))[0] == group
    }


RESNET18 = {  # group -> size, written by, read by
    "conv1": (
        64,
        "conv1 layer1.0.conv2 layer1.1.conv2",
        "layer1.0.conv1 layer1.1.conv1 layer2.0.conv1 layer2.0.downsample.0",
    ),
    "layer2.0.conv2": (
        128,
        "layer2.0.conv2 layer2.0.downsample.0 layer2.1.conv2",
        "layer2.1.conv1 layer3.0.conv1 layer3.0.downsample.0",
    ),
    "layer3.0.conv2": (
        256,
        "layer3.0.conv2 layer3.0.downsample.0 layer3.1.conv2",
        "layer3.1.conv1 layer4.0.conv1 layer4.0.downsample.0",
    ),
    "layer4.0.conv2": (512, "layer4.0.conv2 layer4.0.downsample.0 layer4.1.conv2", "layer4.1.conv1 head"),
}


def test_resnet18_has_the_groups_that_structured_pruning_knows() -> None:
    table = channels_of(classifier("torchvision/resnet18"))
    assert (len(table.groups), table.total) == (12, 2880)
    at = "backbone.body."
    for name, (size, writers, read) in RESNET18.items():
        group = next(g for g in table.groups if g.name == at + name)
        assert group.size == size
        assert set(group.writers) == {f"{at}{w}.weight" for w in writers.split()}
        assert readers(table, group.name) == {r if r == "head" else at + r for r in read.split()}
    inner = {g.name: g.size for g in table.groups if g.name.removeprefix(at) not in RESNET18}
    assert inner == {f"{at}layer{s}.{b}.conv1": 32 << s for s in (1, 2, 3, 4) for b in (0, 1)}
    assert all(readers(table, name) == {name.replace("conv1", "conv2")} for name in inner)


def test_the_two_resnet18_have_the_same_groups_in_the_same_order() -> None:
    own, foreign = channels_of(classifier("resnet18")), channels_of(classifier("torchvision/resnet18"))
    assert own.sizes == foreign.sizes == (64, 64, 64, 128, 128, 128, 256, 256, 256, 512, 512, 512)
    assert [len(g.norms) for g in own.groups] == [len(g.norms) for g in foreign.groups] == [1, 1, 3] * 4


def test_gates_of_a_stream_sit_after_the_stem_and_after_every_block() -> None:
    table = channels_of(classifier("resnet18"))
    stem = next(g for g in table.groups if g.name == "backbone.stem")
    assert stem.taps == (
        Tap("backbone.blocks", "input"),
        Tap("backbone.blocks.0", "output"),
        Tap("backbone.blocks.1", "output"),
    )
    inner = next(g for g in table.groups if g.name == "backbone.blocks.0.conv1")
    assert inner.taps == (Tap("backbone.blocks.0.conv2", "input"),)


def test_a_linear_layer_reads_flattened_maps_channel_after_channel() -> None:
    table = channels_of(classifier("small_cnn"))
    assert table.sizes == (32, 64, 128)
    assert table.axes["backbone.fc.weight"] == (Axis("backbone.fc"), Axis("backbone.convs.1.conv", 64))
    kept = {**table.full(), "backbone.convs.1.conv": torch.tensor([1, 3])}
    columns = table.index("backbone.fc.weight", kept)[1]
    assert torch.equal(columns, torch.cat([torch.arange(64, 128), torch.arange(192, 256)]))


@pytest.mark.parametrize("name", SHAPES)
def test_every_axis_covers_its_dimension_and_every_channel_its_tensors(name: str) -> None:
    module = network(name)
    table, tensors = module.channels, dict(module.state_dict(keep_vars=True))
    sizes = dict(zip(table.names, table.sizes, strict=True))
    for tensor, axes in table.axes.items():
        assert len(axes) == tensors[tensor].dim()
        for length, axis in zip(tensors[tensor].shape, axes, strict=True):
            assert axis is None or length == sizes[axis.group] * axis.repeat
    whole = {n for n, t in tensors.items() if n not in table.axes}
    assert whole == {"head.bias"} | {n for n in tensors if n.endswith("num_batches_tracked")}
    for group in table.groups:
        assert group.taps and group.writers
        assert all(table.axes[writer][0] == Axis(group.name) for writer in group.writers)
    assert table.axes["head.weight"][1].group == table.names[-1]


@pytest.mark.parametrize("name", SMALL)
def test_gathering_and_scattering_are_inverse_and_leave_all_other_entries(name: str) -> None:
    module = network(name)
    table, dense = module.channels, module.state_dict()
    kept = table.kept(some(table))
    other = {n: torch.full_like(t, 7) for n, t in dense.items()}
    before = {n: t.clone() for n, t in other.items()}
    part = table.gather(dense, kept)
    merged = table.scatter(part, kept, other)
    assert all(torch.equal(other[n], before[n]) for n in other)
    again = table.gather(merged, kept)
    outside = table.scatter({n: torch.full_like(t, 7) for n, t in part.items()}, kept, merged)
    for n in dense:
        assert merged[n].dtype == dense[n].dtype and torch.equal(again[n], part[n])
        assert torch.equal(outside[n], other[n])
        assert torch.equal(part[n], take_part(dense[n], table.index(n, kept) or ()))
    assert any(part[n].numel() < dense[n].numel() for n in dense)
    full = table.full()
    assert all(torch.equal(t, dense[n]) for n, t in table.gather(dense, full).items())


def test_names_that_a_part_lacks_keep_their_values() -> None:
    module = network("resnet8")
    table, dense = module.channels, module.state_dict()
    kept = table.kept(some(table))
    part = {"head.bias": torch.zeros(4, dtype=torch.float64)}
    merged = table.scatter(part, kept, dense)
    assert merged.keys() == dense.keys() and not merged["head.bias"].any()
    assert all(torch.equal(merged[n], dense[n]) for n in dense if n != "head.bias")


def test_merging_by_index_averages_the_shared_block_and_nothing_else() -> None:
    draft = Draft(nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)))
    draft.layer("0", reads=None, writes="0")
    draft.layer("1", reads="0", writes="1")
    table = draft.table()
    shared = {"0": torch.tensor([0, 1]), "1": torch.tensor([0, 1])}
    one = torch.arange(9.0).view(3, 3)
    old = {"1.weight": torch.full((3, 3), -1.0)}
    parts = [table.gather({"1.weight": w}, shared) for w in (one, one + 10)]
    index = {"1.weight": table.index("1.weight", shared)}
    merged = indexed_mean(parts, [index, index], [0.75, 0.25], old)["1.weight"]
    assert torch.equal(merged[:2, :2], torch.tensor([[2.5, 3.5], [5.5, 6.5]]))
    assert (merged[2] == -1).all() and (merged[:, 2] == -1).all()


def test_masks_kept_positions_and_widths_tell_the_same() -> None:
    table = network("resnet8").channels
    mask = some(table)
    kept = table.kept(mask)
    assert torch.equal(table.mask(kept), mask)
    assert table.widths(kept) == tuple(int(part.sum()) for part in table.split(mask))
    assert all(k.dtype == torch.int64 and (k.diff() > 0).all() for k in kept.values())
    assert table.mask(table.full()).all() and table.widths(table.full()) == table.sizes
    assert [tuple(p.shape) for p in table.split(torch.zeros(3, table.total))] == [(3, n) for n in table.sizes]
    assert table.narrowed(table.widths(kept)).sizes == table.widths(kept)


def test_tensors_without_an_axis_are_whole() -> None:
    table = network("resnet8").channels
    kept = table.kept(some(table))
    for name in ("head.bias", "backbone.norm.num_batches_tracked", "no such tensor"):
        assert table.index(name, kept) is None
    counter = {"backbone.norm.num_batches_tracked": torch.tensor(3)}
    assert table.gather(counter, kept) == counter


@settings(deadline=None, max_examples=60)
@given(st.lists(st.booleans(), max_size=40))
def test_packed_masks_take_an_eighth_and_come_back(values: list[bool]) -> None:
    mask = torch.tensor(values, dtype=torch.bool)
    bits = pack(mask)
    assert bits.dtype == torch.uint8 and bits.shape == (-(-len(values) // 8),)
    assert torch.equal(unpack(bits, len(values)), mask)


def test_the_first_channel_is_the_lowest_bit() -> None:
    mask = torch.tensor([1, 0, 0, 0, 0, 0, 0, 1, 0, 1], dtype=torch.bool)
    assert pack(mask).tolist() == [129, 2]


@pytest.mark.parametrize("name", ["resnet8", "resnet20", "resnet18"])
def test_group_normalisation_is_refused_with_the_network_to_take(name: str) -> None:
    with pytest.raises(ConfigError, match=f"group normalisation cannot be pruned.*take {name} instead of {name}_gn"):
        channels_of(classifier(f"{name}_gn"))


def test_networks_without_channels_of_their_own_are_refused() -> None:
    with pytest.raises(ConfigError, match="Flatten has no channels to prune; take a network with hidden layers"):
        channels_of(classifier("linear"))
    with pytest.raises(ConfigError, match=r"layer1.0.conv2' is a convolution in 32 groups"):
        channels_of(classifier("torchvision/resnext50_32x4d"))


def test_masks_widths_and_frozen_layers_that_do_not_fit_are_refused() -> None:
    module = network("resnet8")
    table = module.channels
    for mask in (torch.ones(3, dtype=torch.bool), torch.ones(table.total)):
        with pytest.raises(ConfigError, match=rf"must be bool \[{table.total}\], got"):
            table.kept(mask)
    for widths, message in (
        ((1, 2), "one number for each of 6 groups, got 2"),
        ((0, *table.sizes[1:]), "kept in backbone.blocks.0.conv1 must be 1 to 16, got 0; keep at least one"),
        ((17, *table.sizes[1:]), "must be 1 to 16, got 17"),
    ):
        with pytest.raises(ConfigError, match=message):
            module.rebuild(widths)
    module.backbone.stem.requires_grad_(False)
    with pytest.raises(ConfigError, match=r"'backbone.stem.weight' is frozen"):
        prunable(module)


def test_a_tensor_of_another_shape_is_not_put_back() -> None:
    module = network("resnet8")
    table = channels_of(module)
    dense = dict(module.named_parameters())
    part = {**table.gather(dense, table.full()), table.groups[0].writers[0]: torch.zeros(2, 3)}
    with pytest.raises(PayloadError, match=r"has shape \(2, 3\), the kept channels of the network need"):
        table.scatter(part, table.full(), dense)
