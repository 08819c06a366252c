"""A fixed-width head equals a growing head: logits, loss, gradients, a training step, old rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.core import ConfigError, Net, Stage
from fedloom.core.context import Context
from fedloom.models import Classifier, NetworkSpec
from fedloom.models.plain import Flatten

SEEN = (0, 2, 3)


def fixed(classes: int = 6) -> Classifier:
    return NetworkSpec("digits_cnn", classes, (1, 8, 8), seed=3).classifier()


def grown(wide: Classifier, seen: tuple[int, ...]) -> Classifier:
    """The same backbone with a head of the seen rows only."""
    head = nn.Linear(wide.num_features, len(seen))
    with torch.no_grad():
        head.weight.copy_(wide.head.weight[list(seen)])
        head.bias.copy_(wide.head.bias[list(seen)])
    narrow = Classifier(fixed().backbone, len(seen), head)
    narrow.backbone.load_state_dict(wide.backbone.state_dict())
    return narrow


def context(wide: Classifier, seen: tuple[int, ...]) -> Context:
    stage = Stage(0, 2, 1, seen, seen)
    return Context(Net(lambda: wide), stage, wide.num_classes)


def batch() -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(0)
    return torch.randn(5, 1, 8, 8, generator=rng), torch.tensor([0, 2, 3, 3, 2])


def test_outputs_and_declared_rows() -> None:
    wide = fixed()
    out = wide(batch()[0])
    assert out["logits"].shape == (5, 6) and out["feats"].shape == (5, 64)
    assert wide.class_rows == {"head.weight": 0, "head.bias": 0}
    params = dict(wide.named_parameters())
    assert all(params[name].shape[dim] == 6 for name, dim in wide.class_rows.items())


def test_masked_logits_loss_and_gradients_equal_those_of_the_seen_rows() -> None:
    wide = fixed()
    narrow, (x, y) = grown(wide, SEEN), batch()
    logits = context(wide, SEEN).mask_unseen(wide(x)["logits"])
    small = narrow(x)["logits"]
    torch.testing.assert_close(logits[:, list(SEEN)], small)
    loss = F.cross_entropy(logits, y)
    reference = F.cross_entropy(small, torch.tensor([0, 1, 2, 2, 1]))
    torch.testing.assert_close(loss, reference)
    loss.backward()
    reference.backward()
    for name in ("weight", "bias"):
        grad = getattr(wide.head, name).grad
        torch.testing.assert_close(grad[list(SEEN)], getattr(narrow.head, name).grad)
        assert torch.count_nonzero(grad[[1, 4, 5]]) == 0
    for a, b in zip(wide.backbone.parameters(), narrow.backbone.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_a_step_moves_seen_rows_as_in_a_growing_head_and_no_other() -> None:
    wide = fixed()
    start = wide.head.weight.detach().clone()
    narrow, (x, y) = grown(wide, SEEN), batch()
    F.cross_entropy(context(wide, SEEN).mask_unseen(wide(x)["logits"]), y).backward()
    F.cross_entropy(narrow(x)["logits"], torch.tensor([0, 1, 2, 2, 1])).backward()
    with torch.no_grad():
        for module in (wide, narrow):
            for p in module.parameters():
                p -= 0.1 * p.grad
    torch.testing.assert_close(wide.head.weight[list(SEEN)], narrow.head.weight)
    assert torch.equal(wide.head.weight[[1, 4, 5]], start[[1, 4, 5]])


def test_growth_leaves_old_logits_bit_identical() -> None:
    wide, x = fixed(), batch()[0]
    before = context(wide, SEEN).scores(x)
    after = context(wide, (0, 1, 2, 3, 4, 5)).scores(x)
    assert torch.equal(before[:, list(SEEN)], after[:, list(SEEN)])
    assert torch.isneginf(before[:, [1, 4, 5]]).all() and torch.isfinite(after).all()


def test_masked_loss_equals_cross_entropy_and_its_autograd_oracle() -> None:
    """Gradient of the logits is softmax minus one-hot on seen classes, exactly 0 elsewhere."""
    wide, (x, y) = fixed(), batch()
    logits = wide(x)["logits"].detach().requires_grad_()
    F.cross_entropy(context(wide, SEEN).mask_unseen(logits), y).backward()
    expected = torch.zeros(5, 6)
    expected[:, list(SEEN)] = logits.detach()[:, list(SEEN)].softmax(1)
    expected[torch.arange(5), y] -= 1
    torch.testing.assert_close(logits.grad, expected / 5)


def test_layout_comes_from_the_backbone() -> None:
    assert NetworkSpec("small_cnn", 2, (3, 8, 8)).classifier().memory_format == "channels_last"
    assert NetworkSpec("resnet8", 2, (3, 8, 8)).classifier().memory_format == "channels_last"


def test_refuses_no_classes() -> None:
    with pytest.raises(ConfigError, match="num_classes must be at least 1, got 0"):
        Classifier(Flatten((4,)), 0)
