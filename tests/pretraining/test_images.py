"""The second stage: augmentation and mixing against brute force, and a tower that meets its texts."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from fedloom.core.errors import DataError
from fedloom.pretraining import text
from fedloom.pretraining.images import Normalize, accuracy, augmented, class_texts, mixed, train_images
from fedloom.pretraining.recipe import ImageStage, TextStage, resolve
from fedloom.pretraining.run import initial
from fedloom.pretraining.training import Watch
from fedloom.pretraining.words import TEMPLATES
from toys.pretraining import TINY

NAMES = ["red ball", "green leaf", "blue sea"]
PLAIN = Normalize((0.5, 0.5, 0.5), (0.25, 0.25, 0.25))


def draws(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def planted(each: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Noise around a colour per class."""
    y = torch.arange(3).repeat_interleave(each)
    colours = torch.tensor([[200.0, 60, 60], [60, 200, 60], [60, 60, 200]])
    x = colours[y][:, :, None, None] + 50 * torch.randn(len(y), 3, 8, 8, generator=draws(seed))
    return x.clamp(0, 255).to(torch.uint8), y


def test_pictures_are_normalised_per_channel() -> None:
    x = torch.tensor([0, 255, 51], dtype=torch.uint8).view(1, 3, 1, 1)
    found = Normalize((0.5, 0.25, 0.2), (0.5, 0.25, 0.1))(x)
    assert torch.allclose(found.flatten(), torch.tensor([-1.0, 3.0, 0.0]), atol=1e-6)


@pytest.mark.parametrize("zoom", [0.0, 0.35])
def test_augmented_pictures_pixel_by_pixel(zoom: float) -> None:
    x = torch.randn(4, 3, 6, 6, generator=draws(1))
    found = augmented(x, zoom, draws(7))
    rng = draws(7)
    side = 1 - zoom * torch.rand(4, generator=rng)
    flip = [-1.0 if u < 0.5 else 1.0 for u in torch.rand(4, generator=rng)]
    shift = 2 * torch.rand(4, 2, generator=rng) - 1
    assert -1.0 in flip and 1.0 in flip
    for n in range(4):
        room = float(1 - side[n] + 0.125)
        for row in range(6):
            for column in range(6):
                u, v = (2 * column + 1) / 6 - 1, (2 * row + 1) / 6 - 1  # centres of pixels, in [-1, 1]
                across = ((float(side[n]) * flip[n] * u + float(shift[n, 0]) * room + 1) * 6 - 1) / 2
                down = ((float(side[n]) * v + float(shift[n, 1]) * room + 1) * 6 - 1) / 2
                assert torch.allclose(found[n, :, row, column], bilinear(x[n], down, across), atol=1e-4)


def bilinear(x: torch.Tensor, down: float, across: float) -> torch.Tensor:
    total = torch.zeros(3)
    for i in range(6):
        for j in range(6):
            total += x[:, i, j] * max(0.0, 1 - abs(down - i)) * max(0.0, 1 - abs(across - j))
    return total


def test_a_mixed_batch_pixel_by_pixel() -> None:
    x, goal = torch.randn(5, 3, 8, 6, generator=draws(1)), F.one_hot(torch.tensor([0, 1, 2, 0, 1]), 3).float()
    before = x.clone()
    found, new = mixed(x, goal, 1.0, draws(11))
    assert torch.equal(x, before)
    rng = draws(11)
    torch.rand((), generator=rng)
    kept = float(torch.rand((), generator=rng))
    tall, wide = round(8 * (1 - kept) ** 0.5), round(6 * (1 - kept) ** 0.5)
    top = int(torch.randint(8 - tall + 1, (), generator=rng))
    left = int(torch.randint(6 - wide + 1, (), generator=rng))
    other = torch.randperm(5, generator=rng)
    assert 0 < tall < 8 and 0 < wide < 6
    for n in range(5):
        for row in range(8):
            for column in range(6):
                inside = top <= row < top + tall and left <= column < left + wide
                source = before[other[n]] if inside else before[n]
                assert torch.equal(found[n, :, row, column], source[:, row, column])
        share = tall * wide / 48
        assert torch.allclose(new[n], (1 - share) * goal[n] + share * goal[other[n]])
    assert torch.allclose(new.sum(1), torch.ones(5))


def test_the_share_of_mixed_batches() -> None:
    x, goal = torch.randn(4, 3, 8, 8), F.one_hot(torch.arange(4), 4).float()
    rng = draws(0)
    assert all(mixed(x, goal, 0.0, rng)[0] is x for _ in range(50))
    changed = sum(mixed(x, goal, 0.3, rng)[0] is not x for _ in range(400))
    assert 90 <= changed <= 150, "120 on average, deviation 9"


def test_class_texts_are_means_over_the_templates() -> None:
    one = initial(resolve("clip-small", {"data": {"name": "x"}}, TINY))
    found = class_texts(one, NAMES)
    with torch.no_grad():
        each = [one.encode_text(text.tokens(NAMES, t, one.context_length), normalize=True) for t in TEMPLATES]
    wanted = sum(each) / len(each)
    assert torch.allclose(found, wanted / wanted.norm(dim=1, keepdim=True), atol=1e-6)


def test_planted_pictures_meet_their_words(fake_teacher: None, no_global_draws: None) -> None:
    one = initial(resolve("clip-small", {"data": {"name": "x"}}, TINY))
    text.train_text(one, NAMES, TextStage(steps=20, batch_size=16, lr=0.02, warmup=2), 0, Watch())
    before = {name: v.clone() for name, v in one.state_dict().items()}
    (x, y), (x_test, y_test), losses = planted(40, 1), planted(30, 2), []
    options = ImageStage(epochs=6, batch_size=20, lr=0.01, warmup=3)

    def keep(trainer) -> None:
        losses.append(trainer.total - sum(losses))

    trained = train_images(one, x, y, NAMES, PLAIN, options, 0, Watch(keep=keep))
    assert trained.steps == 36 and sum(losses[-6:-1]) < 0.8 * sum(losses[:5])
    found = accuracy(one, x_test, y_test, class_texts(one, NAMES), PLAIN)
    assert found > 0.8, "chance is a third"
    still = [name for name, v in one.state_dict().items() if torch.equal(v, before[name])]
    assert set(still) == {name for name in before if not name.startswith(("visual.", "logit_scale"))}
    assert not one.visual.training


def test_accuracy_is_the_share_of_nearest_texts() -> None:
    class Flat:
        @staticmethod
        def visual(x: torch.Tensor) -> torch.Tensor:
            return x.mean((2, 3))

    x, y = planted(300, 3)  # more than a batch of the evaluation
    wrong = y.clone()
    wrong[:90] = 2
    assert accuracy(Flat(), x, y, torch.eye(3), PLAIN) == 1.0
    assert accuracy(Flat(), x, wrong, torch.eye(3), PLAIN) == pytest.approx(0.9)


def test_fewer_pictures_than_a_batch_are_refused() -> None:
    one = initial(resolve("clip-small", {"data": {"name": "x"}}, TINY))
    x, y = planted(5, 1)
    with pytest.raises(DataError, match=r"images\.batch_size is 16, but there are 15 pictures; lower it"):
        train_images(one, x, y, NAMES, PLAIN, ImageStage(batch_size=16), 0, Watch())
