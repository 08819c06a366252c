"""The diagonal Fisher against brute force, against closed forms, and what a pass must leave alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedloom.core import Batches, Forward, Stage
from fedloom.core.payload import digest
from fedloom.core.seeds import generator, seeded
from fedloom.local.passes import diagonal_fisher, model_labels, true_labels
from fedloom.models.heads import Classifier
from fedloom.models.registry import backbone
from local.blobs import context, data
from toys.federation import BlobSpec, Headed

pytestmark = pytest.mark.usefixtures("no_global_draws")


class Doubles(nn.Module):
    """Linear softmax regression on two features, in float64."""

    class_rows = {"head.weight": 0, "head.bias": 0}

    def __init__(self, classes: int = 3):
        super().__init__()
        with seeded("head"):
            self.head = nn.Linear(2, classes, dtype=torch.float64)

    def forward(self, x):
        return self.head(x)


def linear(**given):
    ctx = context(Doubles, num_classes=3, **given)
    return ctx, data(7, dtype=torch.float64)


def images(count: int) -> Batches:
    x = torch.randn(count, 3, 8, 8, generator=generator("images"))
    y = torch.randint(0, 3, (count,), generator=generator("classes"))
    return Batches(x, y, torch.arange(count), key=("local",), prepare=lambda x, rng: x)


def network(name: str):
    options = {"input_shape": (2,), "hidden": [5]} if name == "mlp" else {"input_shape": (3, 8, 8)}

    def build() -> nn.Module:
        with seeded(name):
            return Classifier(backbone(name, **options), 6).double()

    return build


@pytest.mark.parametrize("name", ["mlp", "small_cnn", "resnet8", "resnet8_gn"])
def test_it_is_the_mean_of_squares_of_gradients_taken_one_by_one(name: str):
    ctx = context(network(name), seen=(0, 1, 2))
    examples = data(6) if name == "mlp" else images(6)
    as_double = Batches(examples._x.double(), examples._y, examples._indices, key=(0,), prepare=lambda x, rng: x)
    found = diagonal_fisher(ctx, as_double)
    net = network(name)().eval()
    expected = {n: torch.zeros_like(p) for n, p in net.named_parameters()}
    for x, y in zip(as_double._x, as_double._y, strict=True):
        out = net(x[None])["logits"][:, :3]
        net.zero_grad()
        F.cross_entropy(out, y[None]).backward()
        for n, p in net.named_parameters():
            expected[n] += p.grad**2 / 6
    assert found.keys() == expected.keys()
    for n, tensor in expected.items():
        torch.testing.assert_close(found[n], tensor, rtol=1e-10, atol=1e-14)


def test_a_linear_softmax_has_a_closed_form():
    """The gradient of W_c is (p_c - [c = y]) x, so F(W) = mean (p - y)^2 (x^2)^T and F(b) = mean (p - y)^2."""
    ctx, examples = linear()
    found = diagonal_fisher(ctx, examples)
    x, y = examples.stored(torch.arange(7))
    delta = (Doubles()(x).softmax(1) - F.one_hot(y, 3)).detach() ** 2
    torch.testing.assert_close(found["head.weight"], delta.T @ x**2 / 7)
    torch.testing.assert_close(found["head.bias"], delta.mean(0))
    squared_mean = (Doubles()(x).softmax(1) - F.one_hot(y, 3)).mean(0).detach() ** 2
    assert found["head.bias"].sum() > 2 * squared_mean.sum(), "the square of the mean gradient is another thing"


def test_labels_of_the_model_tend_to_the_true_fisher():
    """For labels from p itself E (p_c - [c = y])^2 = p_c (1 - p_c)."""
    ctx, _ = linear(client=3)
    x = torch.tensor([[0.5, -1.0]], dtype=torch.float64)
    many = Batches(x.expand(2000, 2), torch.zeros(2000, dtype=torch.long), torch.arange(2000), key=(0,), prepare=_plain)
    p = Doubles()(x).softmax(1)[0].detach()
    drawn = diagonal_fisher(ctx, many, labels=model_labels)["head.bias"]
    torch.testing.assert_close(drawn, p * (1 - p), rtol=0.1, atol=0.0)
    torch.testing.assert_close(drawn, diagonal_fisher(ctx, many, labels=model_labels)["head.bias"], rtol=0, atol=0)
    empirical = diagonal_fisher(ctx, many, labels=true_labels)["head.bias"]
    torch.testing.assert_close(empirical, (p - torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)) ** 2)


def _plain(x, rng):
    return x


def test_drawn_labels_differ_between_clients_and_stages():
    _, examples = linear()
    stages = [Stage(k, 2, 1, (0, 1, 2), (0, 1, 2)) for k in range(2)]
    runs = [linear(client=c, stage=s)[0] for c in (0, 1) for s in stages]
    found = [digest({"fisher": diagonal_fisher(ctx, examples, labels=model_labels)}) for ctx in runs]
    assert len(set(found)) == 4
    assert len({digest({"fisher": diagonal_fisher(ctx, examples)}) for ctx in runs}) == 1


def test_drawn_labels_stay_inside_the_scope():
    logits = torch.tensor([[0.0, -torch.inf, 0.0, -torch.inf]]).expand(200, 4)
    drawn = model_labels(logits, torch.zeros(200, dtype=torch.long), generator("draws"))
    assert drawn.shape == (200,) and set(drawn.tolist()) == {0, 2}


def test_labels_of_a_model_that_has_diverged_are_the_examples_own():
    logits = torch.tensor([[0.0, 30.0], [float("nan"), 1.0], [float("inf"), 1.0]])
    drawn = model_labels(logits, torch.tensor([0, 1, 0]), torch.Generator().manual_seed(0))
    assert drawn.tolist() == [1, 1, 0]


@pytest.mark.parametrize("scope", ["seen", "current", "all"])
def test_rows_of_classes_that_have_not_arrived_are_zero(scope: str):
    ctx = context(seen=(0, 1, 2), classes=(0, 1))
    found = diagonal_fisher(ctx, data(classes=2), scope=scope)
    inside = [0, 1] if scope == "current" else [0, 1, 2]
    for name in ("head.weight", "head.bias"):
        assert found[name][inside].any() and not found[name][len(inside) :].any()


def test_the_network_and_what_training_sees_stay_as_they_were():
    ctx, examples = context(), data()
    state = ctx.init_state()
    live = ctx.bind(state["params"], state["buffers"])
    order = [batch.index.tolist() for batch in data().epoch(0, 8)]
    for training in (True, False):
        ctx.net.train(training)
        diagonal_fisher(ctx, examples, labels=model_labels)
        assert ctx.net.module.training is training
    params, buffers = ctx.net.take()
    assert digest({"params": params, "buffers": buffers}) == digest(state)
    assert all(param.grad is None and param.requires_grad for param in live.values())
    assert [batch.index.tolist() for batch in examples.epoch(0, 8)] == order
    assert (examples.visits.count, examples.visits.passes) == (len(examples), 2 * len(examples))


def test_examples_are_measured_without_augmentation():
    drawn = []
    x, y = data().stored(torch.arange(20))
    examples = Batches(x, y, torch.arange(20), key=(0,), prepare=lambda x, rng: drawn.append(rng) or x)
    diagonal_fisher(context(), examples)
    assert drawn == [None] * 20


def test_no_example_gives_zeros_and_one_its_own_squares():
    ctx, examples = linear()
    nothing = diagonal_fisher(ctx, examples.part(0, 0))
    assert {n: t.shape for n, t in nothing.items()} == {"head.weight": (3, 2), "head.bias": (3,)}
    assert not any(tensor.any() for tensor in nothing.values())
    ones = [diagonal_fisher(ctx, examples.part(k, k + 1))["head.weight"] for k in range(7)]
    torch.testing.assert_close(torch.stack(ones).mean(0), diagonal_fisher(ctx, examples)["head.weight"])


def test_only_what_trains_is_measured_and_what_the_logits_do_not_need_has_none():
    class Frozen(Headed):
        def __init__(self):
            super().__init__(BlobSpec().backbone(), 3)
            self.idle = nn.Parameter(torch.ones(2))
            self.body.requires_grad_(False)

    with seeded("frozen"):
        found = diagonal_fisher(context(Frozen, num_classes=3), data())
    assert found.keys() == {"head.weight", "head.bias", "idle"}
    assert found["head.weight"].any() and not found["idle"].any()


def test_it_runs_under_autocast():
    plain = diagonal_fisher(context(), data())
    half = diagonal_fisher(context(forward=Forward(precision="bf16")), data())
    assert half["head.weight"].dtype == torch.float32
    torch.testing.assert_close(half["head.bias"], plain["head.bias"], rtol=0.1, atol=1e-3)
