"""The block of a shared extractor and a domain eraser, and networks that are made of it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.core import ConfigError, Forward, Net
from fedloom.core.seeds import seeded
from fedloom.models import NetworkSpec
from fedloom.models.eraser import Eraser, erased, is_eraser, moments, own, shared, shared_moments
from toys.federation import BlobSpec

pytestmark = pytest.mark.usefixtures("no_global_draws")


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def network(name: str = "resnet8", *, ratio: int = 2, **options: object) -> nn.Module:
    return erased(NetworkSpec(name, 10, (3, 16, 16)).classifier(), ratio, **options)


def block(width: int = 5, ratio: int = 2, **shape: object) -> Eraser:
    with seeded(0):
        layer = nn.Conv2d(3, width, **{"kernel_size": 3, "padding": 1, **shape})
        return Eraser(layer, nn.BatchNorm2d(width), ratio)


def test_five_channels_at_ratio_two_are_three_core_and_three_cheap_ones_cut_to_five():
    five = block(5)
    assert (five.dfe_conv.out_channels, five.dse_conv.out_channels, five.dse_conv.groups) == (3, 3, 3)
    assert five(drawn(2, 3, 8, 8)).shape == (2, 5, 8, 8)
    with seeded(0):
        flat = Eraser(nn.Linear(4, 5), nn.BatchNorm1d(5))
    assert (flat.dfe_conv.out_channels, flat.dse_conv.out_channels) == (3, 3)
    assert flat.dse_conv.kernel_size == (1, 1) and five.dse_conv.kernel_size == (3, 3)


@pytest.mark.parametrize(("width", "ratio", "core", "cheap"), [(8, 2, 4, 4), (8, 3, 3, 6), (1, 2, 1, 1), (7, 7, 1, 6)])
def test_the_split_of_other_widths(width: int, ratio: int, core: int, cheap: int):
    made = block(width, ratio)
    assert (made.dfe_conv.out_channels, made.dse_conv.out_channels) == (core, cheap)
    assert made(drawn(2, 3, 4, 4)).shape == (2, width, 4, 4)


def test_its_output_is_the_formula_for_convolutions():
    made = block(5, stride=2, bias=True).eval()
    with torch.no_grad():
        for norm in (made.dse_bn, made.dfe_bn):
            norm.running_mean.copy_(drawn(len(norm.running_mean), seed=1))
            norm.running_var.copy_(drawn(len(norm.running_var), seed=2).square() + 0.5)
            norm.weight.copy_(drawn(len(norm.weight), seed=3))
    x, eps = drawn(2, 3, 8, 8), made.dfe_bn.eps

    def normed(y: Tensor, norm: nn.BatchNorm2d) -> Tensor:
        mean, var, weight, bias = (
            t[:, None, None] for t in (norm.running_mean, norm.running_var, norm.weight, norm.bias)
        )
        return (y - mean) / (var + eps).sqrt() * weight + bias

    core = normed(F.conv2d(x, made.dfe_conv.weight, stride=2, padding=1), made.dse_bn)
    cheap = [F.conv2d(core[:, k : k + 1], made.dse_conv.weight[k : k + 1], padding=1) for k in range(3)]
    whole = torch.cat([core, *cheap], 1)[:, :5] + made.dfe_bias[:, None, None]
    torch.testing.assert_close(made(x), normed(whole, made.dfe_bn))


def test_its_output_is_the_formula_for_linear_layers():
    with seeded(0):
        layer, norm = nn.Linear(4, 6), nn.BatchNorm1d(6)
        weight, bias = layer.weight.clone(), layer.bias.clone()
        made = Eraser(layer, norm, 2)
    x = drawn(7, 4)
    core = F.batch_norm(x @ weight[:3].T, None, None, training=True)
    whole = torch.cat([core, core * made.dse_conv.weight.flatten()], 1) + bias
    torch.testing.assert_close(made(x), F.batch_norm(whole, None, None, training=True))


def test_the_block_has_about_half_the_parameters():
    with seeded(0):
        made = Eraser(nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64))
    # 32 x 64 x 9 of dfe_conv, 2 x 32 of dse_bn, 32 x 9 of dse_conv, 64 of dfe_bias, 2 x 64 of dfe_bn; 36,992 before
    assert sum(p.numel() for p in made.parameters()) == 18_432 + 64 + 288 + 64 + 128


@pytest.mark.parametrize(("name", "blocks", "count"), [("resnet8", 9, 41_866), ("resnet18", 20, 5_625_546)])
def test_every_convolution_of_a_residual_network_becomes_a_block(name: str, blocks: int, count: int):
    with torch.device("meta"):
        module = NetworkSpec(name, 10, (3, 32, 32)).classifier()
    assert erased(module) is module
    assert sum(isinstance(m, Eraser) for m in module.modules()) == blocks
    norms = {n for n, m in module.named_modules() if isinstance(m, nn.BatchNorm2d)}
    assert {n.rpartition(".")[2] for n in norms} == {"dse_bn", "dfe_bn"} and len(norms) == 2 * blocks
    assert sum(p.numel() for p in module.parameters()) == count
    assert module.class_rows == {"head.weight": 0, "head.bias": 0}


def test_relus_stay_where_they_were_and_none_comes_before_the_residual_sum():
    module = network().eval()
    first = module.backbone.blocks[0]
    x = drawn(2, 16, 8, 8)
    inner = first.conv2(F.relu(first.conv1(x)))
    assert bool((inner < 0).any())
    assert torch.equal(first(x), F.relu(inner + x))


def test_initial_values_are_the_layers_first_filters_and_the_same_each_time():
    plain = NetworkSpec("resnet8", 10, (3, 16, 16), seed=4).classifier()
    one, two = (erased(NetworkSpec("resnet8", 10, (3, 16, 16), seed=4).classifier(), seed=4) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert torch.equal(one.backbone.stem.dfe_conv.weight, plain.backbone.stem.weight[:8])
    assert torch.equal(one.head.weight, plain.head.weight)
    other = erased(NetworkSpec("resnet8", 10, (3, 16, 16), seed=4).classifier(), seed=5)
    assert not torch.equal(one.backbone.stem.dse_conv.weight, other.backbone.stem.dse_conv.weight)


def test_tensors_are_told_apart_by_their_names():
    module = network()
    erasers = {n for n, _ in (*module.named_parameters(), *module.named_buffers()) if is_eraser(n)}
    kinds = {name.split(".", 3)[-1] if name.startswith("backbone.blocks") else name for name in erasers}
    assert {kind.rsplit("dse_", 1)[1] for kind in kinds} == {
        *(f"bn.{n}" for n in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")), "conv.weight",
    }  # fmt: skip
    tree = dict(module.named_buffers())
    assert {**shared(tree), **own(tree)} == tree and not shared(tree).keys() & own(tree).keys()


def test_a_training_pass_reports_the_statistics_of_every_block_in_order():
    module, seen = network(measured=True), []
    module.backbone.stem.dfe_bn.register_forward_pre_hook(lambda norm, args: seen.append(args[0]))
    out = module.train()(drawn(4, 3, 16, 16))
    names = [name for name in out if name.startswith("moments/")]
    assert names == [f"moments/{n}" for n, m in module.named_modules() if isinstance(m, Eraser)] and len(names) == 9
    x = seen[0].detach()
    want = torch.stack([x.mean((0, 2, 3)), x.var((0, 2, 3))])
    torch.testing.assert_close(out["moments/backbone.stem"].detach(), want)
    assert out["moments/backbone.stem"].requires_grad
    torch.testing.assert_close(module.backbone.stem.dfe_bn.running_mean, 0.1 * want[0])
    torch.testing.assert_close(module.backbone.stem.dfe_bn.running_var, 0.9 + 0.1 * want[1])
    assert not any(name.startswith("moments/") for name in module.eval()(drawn(4, 3, 16, 16)))
    assert not any(name.startswith("moments/") for name in network().train()(drawn(4, 3, 16, 16)))


def test_statistics_of_vectors_and_of_low_precision():
    x = drawn(6, 4)
    torch.testing.assert_close(moments(x), torch.stack([x.mean(0), x.var(0)]))
    assert moments(x.bfloat16()).dtype == torch.float32 and moments(x.double()).dtype == torch.float64


def test_recomputed_activations_give_the_same_gradients_and_leave_nothing_behind():
    grads = []
    for again in (False, True):
        net = Net(lambda: network(measured=True), Forward(grad_checkpointing=again))
        net.train()
        out = net(drawn(4, 3, 16, 16))
        sum(t.square().sum() for t in out.values()).backward()
        grads.append([p.grad for p in net.module.parameters()])
        assert all(m.moments is None for m in net.module.modules() if isinstance(m, Eraser))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


def test_running_statistics_by_block_once_batches_have_been_counted():
    module = network()
    assert shared_moments(dict(module.named_buffers())) == {}
    module.train()(drawn(4, 3, 16, 16))
    found = shared_moments(dict(module.named_buffers()))
    assert set(found) == {n for n, m in module.named_modules() if isinstance(m, Eraser)}
    norm = module.backbone.stem.dfe_bn
    assert torch.equal(found["backbone.stem"], torch.stack([norm.running_mean, norm.running_var]))


def test_linear_layers_of_the_toy_network_count():
    module = erased(BlobSpec().classifier())
    assert isinstance(module.body.layers[0], Eraser) and isinstance(module.body.layers[1], nn.Identity)
    assert module(drawn(4, 2))["logits"].shape == (4, 6)
    assert math.isfinite(float(module(drawn(4, 2))["feats"].detach().sum()))


def test_layers_without_a_pair_stay_as_they_are():
    module = nn.Sequential(
        nn.utils.skip_init(nn.Conv2d, 3, 6, 3), nn.ReLU(), nn.BatchNorm2d(6),  # ReLU in between
        nn.utils.skip_init(nn.Conv2d, 6, 6, 3, groups=6), nn.BatchNorm2d(6),  # groups
        nn.utils.skip_init(nn.Conv2d, 6, 4, 3), nn.BatchNorm2d(4, track_running_stats=False),  # no statistics
        nn.utils.skip_init(nn.Conv2d, 4, 4, 3), nn.BatchNorm2d(4),
    )  # fmt: skip
    erased(module)
    assert [isinstance(m, Eraser) for m in module] == [False] * 7 + [True, False]


class Twice(nn.Module):
    """A layer that is used twice, and one whose output goes two ways."""

    def __init__(self):
        super().__init__()
        self.one, self.norm_one = nn.utils.skip_init(nn.Linear, 4, 4), nn.BatchNorm1d(4)
        self.two, self.norm_two = nn.utils.skip_init(nn.Linear, 4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm_one(self.one(self.one(x)))
        y = self.two(x)
        return y + self.norm_two(y)


@pytest.mark.parametrize("name", ["mlp", "small_cnn", "resnet8_gn"])
def test_networks_without_batch_normalisation_are_refused(name: str):
    with pytest.raises(ConfigError, match=r"no convolution or linear layer with batch normalisation.*resnet8"):
        network(name)


def test_layers_that_are_used_otherwise_are_no_pair():
    with pytest.raises(ConfigError, match="Twice has no convolution or linear layer"):
        erased(Twice())


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


def test_a_network_that_cannot_be_traced_is_refused_in_words():
    with pytest.raises(ConfigError, match=r"the layers of Branching cannot be told.*traced.*resnet8"):
        erased(Branching())
