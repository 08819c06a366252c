"""A compact network does what the dense one does with its other channels switched off, at the sizes counted by hand."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from fedloom.core import ConfigError, Forward, Net, Stage
from fedloom.core.context import Context
from fedloom.models import Classifier, NetworkSpec
from fedloom.models.compact import compacted, prunable
from fedloom.models.sparse import sparse_layers
from toys.federation import BlobSpec
from toys.pruned import SHAPES, SMALL, compact, inputs, network, some

DEEP = [name for name in SHAPES if name not in SMALL]


def agrees(name: str, mask: Tensor, dtype: torch.dtype, bound: float) -> None:
    """Scores, gradients and statistics of the kept part in both modes."""
    module = network(name, dtype)
    table, (x, y) = module.channels, inputs(name, dtype=dtype)
    kept = table.kept(mask)
    for training in (False, True):
        module.train(training)
        small = compact(module, mask)
        module.zero_grad()
        with module.gated(mask.to(dtype)):
            dense = module(x)["logits"]
        thin = small(x)["logits"]
        assert float((dense - thin).detach().abs().max()) <= bound
        F.cross_entropy(dense, y).backward()
        F.cross_entropy(thin, y).backward()
        grads = table.gather({n: p.grad for n, p in module.named_parameters()}, kept)
        for n, p in small.named_parameters():
            scale = max(1.0, float(p.grad.abs().max()))
            assert float((grads[n] - p.grad).abs().max()) <= 10 * bound * scale, n
        buffers = table.gather(dict(module.named_buffers()), kept)
        for n, b in small.named_buffers():
            assert torch.allclose(buffers[n].double(), b.double(), rtol=0, atol=bound), n


@pytest.mark.parametrize("name", SMALL)
@settings(deadline=None, max_examples=12)
@given(seed=st.integers(0, 10**6), share=st.sampled_from([0.0, 0.2, 0.5, 0.9]))
def test_compact_equals_gated_for_any_mask(name: str, seed: int, share: float) -> None:
    agrees(name, some(network(name).channels, share, seed), torch.float64, 1e-12)


@pytest.mark.parametrize("name", DEEP)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_compact_equals_gated_in_deep_networks(name: str, dtype: torch.dtype, bound: float) -> None:
    agrees(name, some(network(name).channels), dtype, bound)


@pytest.mark.parametrize("name", SMALL)
def test_single_precision_is_within_its_rounding(name: str) -> None:
    agrees(name, some(network(name).channels), torch.float32, 1e-5)


@pytest.mark.parametrize("name", SMALL)
def test_training_moves_both_networks_alike_step_by_step(name: str) -> None:
    module = network(name).train()
    table, mask = module.channels, some(module.channels)
    kept, small = table.kept(mask), compact(module, mask)
    start = copy.deepcopy(small.state_dict())
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, 0.9, weight_decay=0.01) for m in (module, small)]
    for step in range(4):
        x, y = inputs(name, seed=step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        with module.gated(mask.double()):
            F.cross_entropy(module(x)["logits"], y).backward()
        F.cross_entropy(small(x)["logits"], y).backward()
        for optimizer in optimizers:
            optimizer.step()
        dense = table.gather(module.state_dict(), kept)
        for n, t in small.state_dict().items():
            assert torch.allclose(dense[n].double(), t.double(), rtol=0, atol=1e-11), (step, n)
    assert not torch.equal(start["head.weight"], small.state_dict()["head.weight"])


def size(module: nn.Module, shape: tuple[int, ...]) -> tuple[int, float]:
    """Parameters, and millions of multiply-accumulates of convolutions and linear layers for one example."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module.eval()(torch.zeros(1, *shape, device="meta"))
    return sum(p.numel() for p in module.parameters()), counter.get_total_flops() / 2e6


def on_meta(name: str, classes: int, shape: tuple[int, ...]) -> Any:
    with torch.device("meta"):
        return prunable(NetworkSpec(name, classes, shape).classifier())


def uniform(module: Any, keep: float, which: Callable[[str], bool] = lambda name: True) -> nn.Module:
    groups = module.channels.groups
    return module.rebuild(tuple(math.ceil(keep * g.size) if which(g.name) else g.size for g in groups))


@pytest.mark.parametrize(
    ("keep", "params", "macs"),
    [
        (0.2, 457_578, 23.1),
        (0.4, 1_803_314, 91.1),
        (0.5, 2_797_610, 139.3),
        (0.6, 4_049_352, 203.0),
        (0.8, 7_175_586, 360.4),
        (1.0, 11_173_962, 555.4),
    ],
)
def test_sizes_of_resnet18_with_the_same_share_of_all_groups(keep: float, params: int, macs: float) -> None:
    found = size(uniform(on_meta("resnet18", 10, (3, 32, 32)), keep), (3, 32, 32))
    assert found[0] == params and round(found[1], 1) == macs


@pytest.mark.parametrize(
    ("keep", "params", "macs"),
    [
        (0.2, 2_400_722, 119.0),
        (0.4, 4_592_594, 229.1),
        (0.5, 5_679_306, 281.7),
        (0.6, 6_796_562, 338.5),
        (0.8, 8_988_434, 448.7),
    ],
)
def test_sizes_of_resnet18_when_the_residual_streams_stay_whole(keep: float, params: int, macs: float) -> None:
    thin = uniform(on_meta("resnet18", 10, (3, 32, 32)), keep, lambda group: group.endswith("conv1"))
    found = size(thin, (3, 32, 32))
    assert found[0] == params and round(found[1], 1) == macs


@pytest.mark.parametrize(
    ("keep", "params", "macs"),
    [(0.2, 0.459, 94), (0.4, 1.806, 325), (0.6, 4.053, 690), (0.8, 7.181, 1195), (1.0, 11.180, 1814)],
)
def test_sizes_of_torchvisions_resnet18_on_large_images(keep: float, params: float, macs: int) -> None:
    found = size(uniform(on_meta("torchvision/resnet18", 7, (3, 224, 224)), keep), (3, 224, 224))
    assert (round(found[0] / 1e6, 3), round(found[1])) == (params, macs)


def test_a_compact_network_tells_its_own_sizes() -> None:
    small = compact(network("resnet8"), some(network("resnet8").channels))
    for layer in small.modules():
        if isinstance(layer, nn.Conv2d):
            assert layer.weight.shape[:2] == (layer.out_channels, layer.in_channels)
        if isinstance(layer, nn.Linear):
            assert layer.weight.shape == (layer.out_features, layer.in_features)
        if isinstance(layer, nn.BatchNorm2d):
            assert layer.num_features == len(layer.weight) == len(layer.running_mean)
    out = small(inputs("resnet8")[0])
    assert out["feats"].shape[1] == small.num_features == small.backbone.num_features == small.head.in_features
    assert small.class_rows == {"head.weight": 0, "head.bias": 0} and small.num_classes == 4


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_compact_network_is_prunable_and_its_copies_are_their_own(copied: Callable[[Any], Any]) -> None:
    module = network("resnet8")
    small = compact(module, some(module.channels))
    twin = copied(small)
    assert small.channels.total < module.channels.total and twin.channels == small.channels
    x, mask = inputs("resnet8")[0], some(small.channels)
    with twin.gated(mask.double()):
        gated, plain = twin(x)["logits"], small(x)["logits"]
    assert not torch.equal(gated, plain)
    torch.testing.assert_close(compact(small, mask)(x)["logits"], gated, rtol=0, atol=1e-12)
    with torch.no_grad():
        twin.head.weight.zero_()
    assert not twin.rebuild(twin.channels.sizes).head.weight.any() and small.head.weight.any()


def test_compaction_leaves_the_dense_network_alone() -> None:
    module = network("resnet8")
    F.cross_entropy(module(inputs("resnet8")[0])["logits"], inputs("resnet8")[1]).backward()
    before = {n: t.clone() for n, t in module.state_dict().items()}
    small = compacted(module, module.channels, tuple(1 for _ in module.channels.groups))
    for p in small.parameters():
        assert p.grad is None
        p.data.fill_(3.0)
    assert all(torch.equal(t, before[n]) for n, t in module.state_dict().items())
    assert module.backbone.stem.out_channels == 16


def test_making_a_network_prunable_changes_no_name_and_no_bit() -> None:
    spec, x = NetworkSpec("resnet8", 4, (3, 8, 8)), inputs("resnet8", dtype=torch.float32)[0]
    plain, module = spec.classifier(), prunable(spec.classifier())
    assert [n for n, _ in plain.named_parameters()] == [n for n, _ in module.named_parameters()]
    assert plain.state_dict().keys() == module.state_dict().keys()
    assert torch.equal(plain(x)["logits"], module(x)["logits"])


def test_layout_recomputation_and_caching_survive_a_rebuild_in_a_context() -> None:
    spec = NetworkSpec("resnet8", 4, (3, 8, 8))
    forward = Forward(memory_format=torch.channels_last, grad_checkpointing=True)
    net = Net(lambda: prunable(spec.classifier()), forward)
    ctx = Context(net, Stage(0, 1, 1, (0, 1, 2, 3), (0, 1, 2, 3)), 4)
    state, table = ctx.init_state(), net.module.channels
    kept = table.kept(some(table))
    small = ctx.rebuild(table.widths(kept))
    assert ctx.rebuild(table.widths(kept)).net is small.net
    small.bind(table.gather(state["params"], kept), table.gather(state["buffers"], kept))
    module = small.net.module
    assert module.backbone.blocks[1].conv2.weight.is_contiguous(memory_format=torch.channels_last)
    assert "forward" in module.backbone.blocks[0].__dict__
    assert module.backbone.blocks[0].__dict__["forward"].__self__ is module.backbone.blocks[0]
    small.apply(inputs("resnet8", dtype=torch.float32)[0])["logits"].sum().backward()
    assert int(module.backbone.blocks[0].norm1.num_batches_tracked) == 1
    bare = compacted(net.module, table, table.sizes).backbone.blocks[1].conv2.weight
    assert bare.is_contiguous(memory_format=torch.channels_last)


def test_networks_without_a_norm_and_toys_are_prunable() -> None:
    module = prunable(BlobSpec(6, norm=False).classifier())
    assert module.channels.sizes == (8,) and module.channels.groups[0].norms == ()
    assert module.rebuild((3,))(torch.zeros(2, 2))["feats"].shape == (2, 3)


def test_tied_weights_are_refused() -> None:
    pytest.importorskip("torch_pruning")  # the network is traced

    class Tied(nn.Module):
        num_features = 4

        def __init__(self) -> None:
            super().__init__()
            self.a, self.n = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
            self.b, self.c = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
            self.c.weight = self.b.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = torch.relu(self.n(self.a(x)))
            return torch.relu(self.c(torch.relu(self.b(h)))).mean((2, 3))

    for twin in (prunable, lambda module, shape: sparse_layers(module)):
        with pytest.raises(ConfigError, match=r"'backbone.[bc].weight' is shared with another layer"):
            twin(Classifier(Tied(), 3), (1, 8, 8))
