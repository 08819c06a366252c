"""Backbones by name: counts, shapes, layouts, recomputation, and how they live in `Net`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.core import ConfigError, Forward, Net
from fedloom.models import NetworkSpec, backbone, names
from fedloom.models.resnet import ResNet

SHAPES = {"linear": (5,), "mlp": (2, 4, 4), "digits_cnn": (1, 8, 8)}
TEXTS = ("switch_encoder", "moe_decoder")  # see moe_lm/
OWN = [name for name in names() if "/" not in name and name not in (*TEXTS, "clip_small")]  # see clip/
SMALL = ["mlp", "small_cnn", "digits_cnn", "resnet8", "resnet8_gn"]


def shape_of(name: str) -> tuple[int, ...]:
    return SHAPES.get(name, (3, 8, 8))


def parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def inputs(name: str, batch: int = 4, seed: int = 0) -> Tensor:
    return torch.randn(batch, *shape_of(name), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("name", "shape", "classes", "count"),
    [
        ("small_cnn", (3, 32, 32), 10, 545_098),  # 896 + 18,496 + 524,416 + 1,290
        ("digits_cnn", (1, 8, 8), 10, 37_632 + 650),  # 160 + 4,640 + 32,832
        ("mlp", (64,), 10, 64 * 128 + 128 + 1_290),
        ("linear", (3, 8, 8), 10, 1_930),
        ("resnet8", (3, 32, 32), 100, 83_892),  # 432 + 4,608 + 14,336 + 57,344 + norms 672 + head 6,500
        ("resnet8_gn", (3, 32, 32), 100, 83_892),
        ("resnet20", (3, 32, 32), 10, 272_474),
        ("resnet20_gn", (3, 32, 32), 10, 272_474),
        ("resnet18", (3, 32, 32), 10, 11_173_962),
        ("resnet18_gn", (3, 32, 32), 100, 11_220_132),
    ],
)
def test_parameter_counts(name: str, shape: tuple[int, ...], classes: int, count: int) -> None:
    with torch.device("meta"):
        module = NetworkSpec(name, classes, shape).classifier()
    assert parameters(module) == count


def test_the_width_of_residual_networks() -> None:
    # 216 + 1,152 + 3,584 + 14,336 + norms 336 + head 330
    assert parameters(NetworkSpec("resnet8", 10, (3, 32, 32), options={"width": 8}).classifier()) == 19_954
    narrow = backbone("resnet18", input_shape=(3, 32, 32), width=4)
    assert narrow.num_features == 32 and narrow(torch.randn(2, 3, 32, 32)).shape == (2, 32)
    with pytest.raises(ConfigError, match=r"model.options.width must be at least 1, got 0"):
        backbone("resnet20", input_shape=(3, 32, 32), width=0)


def test_resnet8_with_100_classes_stays_small() -> None:
    assert parameters(NetworkSpec("resnet8_gn", 100, (3, 32, 32)).classifier()) <= 100_000


@pytest.mark.parametrize("name", OWN)
def test_features_have_the_declared_width(name: str) -> None:
    module = backbone(name, input_shape=shape_of(name))
    out = module(inputs(name, batch=2))
    assert out.shape == (2, module.num_features) and torch.isfinite(out).all()
    assert module.memory_format in ("contiguous", "channels_last")


def test_group_norm_has_no_buffers_and_batch_norm_has() -> None:
    assert not list(backbone("resnet8_gn", input_shape=(3, 8, 8)).buffers())
    assert len(list(backbone("resnet8", input_shape=(3, 8, 8)).buffers())) == 3 * 9
    norms = [m for m in backbone("resnet8_gn", input_shape=(3, 8, 8)).modules() if isinstance(m, nn.GroupNorm)]
    assert len(norms) == 9 and {n.num_groups for n in norms} == {8}


def test_initial_values_follow_kaiming() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = backbone("resnet18", input_shape=(3, 32, 32))
    assert isinstance(net, ResNet)
    for conv in (m for m in net.modules() if isinstance(m, nn.Conv2d) and m.weight.numel() > 50_000):
        fan_out = conv.out_channels * conv.kernel_size[0] ** 2
        assert float(conv.weight.detach().std()) == pytest.approx((2 / fan_out) ** 0.5, rel=0.03)


def test_pooling_before_relu_changes_neither_values_nor_gradients() -> None:
    x = inputs("small_cnn")
    a, b = (backbone("small_cnn", input_shape=(3, 8, 8)) for _ in range(2))
    b.load_state_dict(a.state_dict())
    out = x
    for layer in b.convs:
        out = F.max_pool2d(F.relu(layer.conv(out)), 2)
    reference = F.relu(b.fc(out.flatten(1)))
    assert torch.equal(a(x), reference)
    a(x).square().sum().backward()
    reference.square().sum().backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("name", SMALL)
def test_recomputed_activations_give_the_same_gradients_and_buffers(name: str) -> None:
    spec = NetworkSpec(name, 3, shape_of(name))
    plain, recomputing = spec.classifier(), spec.classifier()
    recomputing.set_grad_checkpointing(True)
    y = torch.tensor([0, 1, 2, 1])
    for step in range(2):
        for module in (plain, recomputing):
            module.zero_grad()
            F.cross_entropy(module(inputs(name, seed=step))["logits"], y).backward()
        for a, b in zip(plain.parameters(), recomputing.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)
        for (n, a), (_, b) in zip(plain.named_buffers(), recomputing.named_buffers(), strict=True):
            assert torch.equal(a, b), n
    if name == "resnet8":
        assert recomputing.backbone.norm.num_batches_tracked.item() == 2
        assert recomputing.backbone.blocks[0].norm1.num_batches_tracked.item() == 2
    recomputing.set_grad_checkpointing(False)
    assert "forward" not in getattr(recomputing.backbone, "blocks", [plain])[0].__dict__


def test_recomputation_happens() -> None:
    calls = []
    module = backbone("resnet8_gn", input_shape=(3, 8, 8))
    module.blocks[1].conv2.register_forward_hook(lambda *_: calls.append(1))
    module.set_grad_checkpointing()
    module(torch.randn(2, 3, 8, 8)).sum().backward()
    assert len(calls) == 2
    with torch.no_grad():
        module(torch.randn(2, 3, 8, 8))
    assert len(calls) == 3


@pytest.mark.parametrize("name", ["small_cnn", "digits_cnn", "resnet8", "resnet8_gn"])
def test_layouts_agree(name: str) -> None:
    spec, x = NetworkSpec(name, 3, shape_of(name)), inputs(name)
    plain, last = spec.classifier(), spec.classifier().to(memory_format=torch.channels_last)
    torch.testing.assert_close(
        plain(x)["logits"], last(x.to(memory_format=torch.channels_last))["logits"], rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_binding_and_taking(name: str, layout: torch.memory_format) -> None:
    spec = NetworkSpec(name, 3, shape_of(name))
    net = Net(spec.classifier, Forward(memory_format=layout, grad_checkpointing=True))
    state = net.fresh()
    assert len(state["buffers"]) == (27 if name == "resnet8" else 0)
    moved = {n: p + 1 for n, p in state["params"].items()}
    net.bind(moved, state["buffers"])
    net(inputs(name))["logits"].sum().backward()
    params, buffers = net.take()
    assert all(torch.equal(params[n], moved[n]) for n in moved)
    assert all(int(b) == 1 for n, b in buffers.items() if n.endswith("num_batches_tracked"))
    held = {n: b.clone() for n, b in buffers.items()}
    net.bind(state["params"], state["buffers"])
    net(inputs(name))
    assert all(torch.equal(params[n], moved[n]) for n in moved)
    assert all(torch.equal(buffers[n], held[n]) for n in held)


@pytest.mark.parametrize(
    ("name", "shape", "options", "message"),
    [
        ("resnet9", (3, 8, 8), {}, "unknown model 'resnet9'.*Did you mean 'resnet8'.*Known: .*small_cnn"),
        ("small_cnn", (3, 8, 8), {"widht": 3}, "unknown option of model small_cnn 'widht'.*Did you mean 'width'"),
        ("resnet8", (3, 8, 8), {"norm": "layer"}, "unknown option of model resnet8 'norm'"),
        ("small_cnn", (64,), {}, r"model small_cnn needs images \[C, H, W\], got input_shape \[64\]"),
        ("timm/resnet10t", (64,), {}, "needs images"),
        ("small_cnn", (3, 2, 8), {}, "SmallCnn needs images of at least 4x4"),
        ("small_cnn", (3, 8, 8), {"width": 0}, "width must be at least 1, got 0"),
        ("mlp", (0,), {}, "input_shape must hold positive integers"),
        ("mlp", (), {}, "input_shape must hold positive integers"),
        ("mlp", (4,), {"hidden": [8, 0]}, r"hidden must be one or more widths of at least 1, got \[8, 0\]"),
        ("resnet8_gn", (3, 8, 8), {"groups": 3}, r"groups must divide the widths \[16, 32, 64\].*got 3"),
        ("resnet8_gn", (3, 8, 8), {"groups": 0}, "groups must divide"),
        ("torchvision/resnet0", (3, 8, 8), {}, "unknown torchvision model 'resnet0'"),
        ("torchvision/", (3, 8, 8), {}, "unknown model 'torchvision/'"),
    ],
)
def test_refusals(name: str, shape: tuple[int, ...], options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        backbone(name, input_shape=shape, **options)


def test_options_reach_the_network() -> None:
    assert backbone("mlp", input_shape=(4,), hidden=[8, 6]).num_features == 6
    assert backbone("mlp", input_shape=(4,), hidden=5).num_features == 5
    assert backbone("small_cnn", input_shape=(3, 8, 8), width=7).num_features == 7


def test_every_name_has_a_line() -> None:
    assert all(about and "\n" not in about for about in names().values())
    assert {"torchvision/NAME", "timm/NAME", "resnet18_cifar"} <= names().keys()
