"""Tables from a trace: the declared ones come out again, and so do the numbers of torch-pruning."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.core import ConfigError
from fedloom.core.seeds import seeded
from fedloom.models import Classifier, NetworkSpec
from fedloom.models.channels import Tap, channels_of
from fedloom.models.compact import prunable
from fedloom.models.traced import traced
from toys.pruned import compact, inputs, network, some

torch_pruning = pytest.importorskip("torch_pruning")


class Inverted(nn.Module):
    """An inverted residual with a depthwise convolution and a gate on its channels, then concatenation if asked for."""

    num_features = 8

    def __init__(self, concatenated: bool = False):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.expand, self.norm1 = nn.Conv2d(8, 12, 1, bias=False), nn.BatchNorm2d(12)
        self.depth, self.norm2 = nn.Conv2d(12, 12, 3, padding=1, groups=12, bias=False), nn.BatchNorm2d(12)
        self.squeeze, self.excite = nn.Conv2d(12, 4, 1), nn.Conv2d(4, 12, 1)
        self.project, self.norm3 = nn.Conv2d(12, 8, 1, bias=False), nn.BatchNorm2d(8)
        self.concatenated = concatenated
        self.num_features = 16 if concatenated else 8

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.norm(self.stem(x)))
        h = F.silu(self.norm1(self.expand(x)))
        h = F.silu(self.norm2(self.depth(h)))
        h = h * self.excite(F.relu(self.squeeze(h.mean((2, 3), keepdim=True)))).sigmoid()
        h = self.norm3(self.project(h))
        return (torch.cat([x, h], 1) if self.concatenated else x + h).mean((2, 3))


def inverted() -> Classifier:
    with seeded(0, "inverted"):
        return Classifier(Inverted(), 3)


class Tokens(nn.Module):
    """A layer norm on the features."""

    num_features = 6

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 6), nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x))


class Rescaled(Tokens):
    """A parameter outside of any layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Identity()
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale


class Fixed(Tokens):
    """A forward pass that works with one width only."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + torch.ones(6, dtype=x.dtype)


@pytest.mark.parametrize(
    "name", ["toy", "mlp", "digits_cnn", "small_cnn", "resnet8", "resnet18", "basic", "bottleneck"]
)
def test_a_trace_finds_what_the_networks_declare(name: str) -> None:
    module = network(name)
    found, told = traced(module, inputs(name)[0].shape[1:]), module.channels
    assert found.axes == told.axes
    for a, b in zip(found.groups, told.groups, strict=True):
        assert (a.name, a.size, set(a.norms), set(a.writers)) == (b.name, b.size, set(b.norms), set(b.writers))


def test_resnet18_pruned_by_torch_pruning_has_the_same_groups_and_size() -> None:
    module = NetworkSpec("torchvision/resnet18", 10, (3, 64, 64)).classifier()
    plain, table = module.backbone.body, channels_of(module)
    plain.fc, plain.conv1, plain.maxpool = module.head, nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.Identity()
    graph = torch_pruning.DependencyGraph().build_dependency(plain, (torch.zeros(1, 3, 32, 32),), verbose=False)
    groups = list(graph.get_all_groups(ignored_layers=[plain.fc]))
    assert sorted(len(group[0].idxs) for group in groups) == sorted(table.sizes) and len(groups) == 12
    pruner = torch_pruning.pruner.BasePruner(
        plain,
        torch.zeros(1, 3, 32, 32),
        importance=lambda group: torch.arange(len(group[0].idxs), dtype=torch.float32),
        pruning_ratio=0.5,
        ignored_layers=[plain.fc],
    )
    pruner.step()
    mine = prunable(NetworkSpec("resnet18", 10, (3, 32, 32)).classifier())
    small = mine.rebuild(tuple(size // 2 for size in mine.channels.sizes))
    counts = [sum(p.numel() for p in net.parameters()) for net in (plain, small)]
    assert counts == [2_797_610] * 2


def test_depthwise_layers_and_gated_channels_are_pruned_with_their_group() -> None:
    module = prunable(inverted().double().eval(), (3, 8, 8))
    table = module.channels
    assert dict(zip(table.names, table.sizes, strict=True)) == {
        "backbone.expand": 12,
        "backbone.squeeze": 4,
        "backbone.stem": 8,
    }
    inner = next(g for g in table.groups if g.name == "backbone.expand")
    assert inner.taps == (Tap("backbone.squeeze", "input"), Tap("backbone.project", "input"))
    assert set(inner.writers) == {f"backbone.{n}.weight" for n in ("expand", "depth", "excite")}
    mask, x = some(table), torch.randn(4, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    small = compact(module, mask)
    assert small.backbone.depth.groups == small.backbone.depth.in_channels == int(mask[:12].sum())
    for training in (False, True):
        with module.train(training).gated(mask.double()):
            expected = module(x)["logits"]
        torch.testing.assert_close(small.train(training)(x)["logits"], expected, rtol=0, atol=1e-12)


def test_gates_of_traced_networks_have_gradients_at_zero() -> None:
    module = prunable(inverted().double().eval(), (3, 8, 8))
    table = module.channels
    gates = table.mask({**table.full(), "backbone.expand": torch.zeros(0, dtype=torch.int64)}).double().requires_grad_()
    x = torch.randn(4, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with module.gated(gates):
        F.cross_entropy(module(x)["logits"], torch.tensor([0, 1, 2, 0])).backward()
    found = dict(zip(table.names, table.split(gates.grad), strict=True))
    assert (found["backbone.expand"] != 0).all() and (found["backbone.stem"] != 0).all()


def test_tracing_leaves_the_network_and_the_generators_alone(no_global_draws: None) -> None:
    module = inverted().train()
    before = {n: t.clone() for n, t in module.state_dict().items()}
    channels_of(module, (3, 8, 8))
    assert module.training and all(p.dtype == torch.float32 and p.grad is None for p in module.parameters())
    assert all(torch.equal(t, before[n]) for n, t in module.state_dict().items())


def test_layers_beside_backbone_and_head_are_traced_too() -> None:
    module: Any = network("resnet8")
    module.head = nn.Sequential(nn.Linear(64, 5), nn.ReLU(), nn.Linear(5, 4)).double()
    module.class_rows = {"head.2.weight": 0, "head.2.bias": 0}
    table = channels_of(module, (3, 8, 8))
    assert table.sizes[-1] == 5 and table.names[-1] == "head.0"


@pytest.mark.parametrize(
    ("make", "shape", "message"),
    [
        (Tokens, (4,), "'backbone.norm' is a LayerNorm, whose channels cannot be pruned"),
        (Rescaled, (4,), "a parameter outside of any layer, of shape"),
        (lambda: Inverted(concatenated=True), (3, 8, 8), "reads or writes channels of several groups side by side"),
        (Fixed, (4,), "the channels of Fixed cannot be traced"),
        (Inverted, (1, 8, 8), "the channels of Inverted cannot be traced"),
        (Inverted, None, "tracing the channels of Inverted needs the shape of one example; pass input_shape"),
    ],
)
def test_what_no_table_can_say_is_refused(
    make: Callable[[], nn.Module], shape: tuple[int, ...] | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        channels_of(Classifier(make(), 3), shape)


def test_a_network_that_names_no_class_rows_is_refused() -> None:
    plain = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    with pytest.raises(ConfigError, match="Sequential does not say which rows belong to classes"):
        channels_of(plain, (4,))
    plain.class_rows = {"2.weight": 0, "2.bias": 0}
    assert channels_of(plain, (4,)).sizes == (6,)


def test_a_missing_package_is_told_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "torch_pruning":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ConfigError, match=r"needs torch-pruning: pip install 'fedloom\[prune\]'"):
        channels_of(inverted(), (3, 8, 8))
