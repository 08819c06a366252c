"""Steps, their learning rate, and going on with the same bits."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from fedloom.core.errors import RunError
from fedloom.pretraining.training import EVERY, Trainer, Watch, warm_cosine


def trainer(parameters: list[nn.Parameter], steps: int = 6, **changes: object) -> Trainer:
    options = {"lr": 0.1, "weight_decay": 0.5, "warmup": 2, "steps": steps, "seed": 4, **changes}
    return Trainer("images", "loss", parameters, parameters[1:], **options)


def two() -> list[nn.Parameter]:
    return [nn.Parameter(torch.tensor([[1.0, -2.0]])), nn.Parameter(torch.tensor([3.0]))]


def test_the_rate_rises_in_a_line_and_falls_in_half_a_cosine() -> None:
    factor = warm_cosine(4, 14)
    assert [factor(step) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert factor(9) == pytest.approx(0.5)
    assert factor(13) == pytest.approx(0.5 * (1 + math.cos(0.9 * math.pi)))
    assert factor(14) == pytest.approx(0.0)
    assert warm_cosine(0, 10)(0) == 1.0


def test_two_steps_by_hand() -> None:
    parameters = two()
    one = trainer(parameters, steps=2, warmup=2)
    gradient = [torch.tensor([[30.0, 40.0]]), torch.tensor([0.0])]
    one.run(lambda step: sum((p * g).sum() for p, g in zip(parameters, gradient, strict=True)), Watch())
    expected = [torch.tensor([[1.0, -2.0]]), torch.tensor([3.0])]
    for rate in (0.05, 0.1):  # Adam's step for an unchanging gradient is its sign; only the matrix decays
        expected[0] = expected[0] * (1 - rate * 0.5) - rate
    assert torch.allclose(parameters[0], expected[0], atol=1e-6)
    assert torch.equal(parameters[1], expected[1])


def test_gradients_are_clipped_to_length_1() -> None:
    lengths = []
    parameters = two()
    one = trainer(parameters, steps=1)

    def keep(of: Trainer) -> None:
        lengths.append(float(torch.cat([p.grad.flatten() for p in of.parameters]).norm()))

    one.run(lambda step: 100 * parameters[0].sum() + parameters[1].sum(), Watch(keep=keep))
    assert lengths == [pytest.approx(1.0, abs=1e-5)]


def noisy(one: Trainer, parameters: list[nn.Parameter]):
    def loss(step: int) -> torch.Tensor:
        if step % 3 == 0:
            one.memory["order"] = torch.randn(2, generator=one.rng)
        gap = parameters[0] * one.memory["order"] - torch.rand((), generator=one.rng)
        return gap.square().sum() + parameters[1].square().sum()

    return loss


@pytest.mark.parametrize("stop", [1, 2, 3, 5])
def test_going_on_after_any_step_gives_the_same_bits(stop: int) -> None:
    whole, parts = two(), two()
    one = trainer(whole)
    one.run(noisy(one, whole), Watch())
    kept: list[dict] = []

    def keep(of: Trainer) -> None:
        if of.step == stop:
            kept.append(copy.deepcopy({"values": [p.detach() for p in parts], "trainer": of.state()}))
            raise KeyboardInterrupt

    broken = trainer(parts)
    with pytest.raises(KeyboardInterrupt):
        broken.run(noisy(broken, parts), Watch(keep=keep))
    again = [nn.Parameter(value) for value in kept[0]["values"]]
    later = trainer(again)
    later.load(kept[0]["trainer"])
    later.run(noisy(later, again), Watch())
    assert later.step == 6 and all(torch.equal(a, b) for a, b in zip(whole, again, strict=True))
    assert later.loss == one.loss and torch.equal(later.rng.get_state(), one.rng.get_state())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stops_before_it_does_harm(bad: float) -> None:
    parameters, seen = two(), []
    one = trainer(parameters)

    def loss(step: int) -> torch.Tensor:
        return parameters[0].square().sum() * (bad if step == 2 else 1.0)

    with pytest.raises(
        RunError, match=rf"stage images became {bad} in step 3.*--set images\.lr=0\.05 --force"
    ) as caught:
        one.run(loss, Watch(keep=lambda of: seen.append(of.step)))
    assert seen == [1, 2] and caught.value.exit_code == 1
    assert all(bool(torch.isfinite(p).all()) for p in parameters)


def test_lines_come_every_200_steps_and_at_the_end_with_the_mean_since_the_last() -> None:
    parameters, lines = two(), []
    one = trainer(parameters, steps=EVERY + 10, lr=1e-6)
    one.run(lambda step: parameters[0].sum() * 0 + float(step), Watch(tell=lines.append))
    assert [line.rpartition(",")[0] for line in lines] == [
        "images: step 200 of 210, loss 99.500",
        "images: step 210 of 210, loss 204.500",
    ]
    assert lines[-1].endswith("0 s left")
