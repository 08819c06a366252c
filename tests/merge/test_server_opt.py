"""Server optimisers: hand-computed steps, neutral settings, guards."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fedloom.core import ConfigError, PayloadError
from fedloom.merge.server_opt import FedAdagrad, FedAdam, FedAvgM, FedYogi

ALL = [FedAvgM(), FedAdagrad(), FedAdam(), FedYogi()]


def w(value: float) -> dict[str, Tensor]:
    return {"w": torch.tensor([value], dtype=torch.float64)}


def two_steps(step) -> tuple[float, float]:
    """Deltas 2 and then -1, from w = 1."""
    state = step.init(w(1.0))
    first, state = step(w(1.0), w(3.0), state)
    value = first["w"].item()
    second, _ = step(first, w(value - 1.0), state)
    return value, second["w"].item()


def test_momentum() -> None:
    first, second = two_steps(FedAvgM(lr=0.5, momentum=0.9))
    assert first == pytest.approx(1 + 0.5 * 2)
    assert second == pytest.approx(2 + 0.5 * (0.9 * 2 - 1))


def test_adagrad() -> None:
    first, second = two_steps(FedAdagrad(lr=0.5, beta1=0.0, tau=0.1))
    assert first == pytest.approx(1 + 0.5 * 2 / (math.sqrt(0.01 + 4) + 0.1))
    assert second == pytest.approx(first - 0.5 * 1 / (math.sqrt(0.01 + 4 + 1) + 0.1))


def test_adam() -> None:
    first, second = two_steps(FedAdam(lr=0.5, beta1=0.5, beta2=0.8, tau=0.1))
    v1, m1 = 0.8 * 0.01 + 0.2 * 4, 0.5 * 2
    assert first == pytest.approx(1 + 0.5 * m1 / (math.sqrt(v1) + 0.1))
    v2, m2 = 0.8 * v1 + 0.2 * 1, 0.5 * m1 - 0.5
    assert second == pytest.approx(first + 0.5 * m2 / (math.sqrt(v2) + 0.1))


def test_yogi() -> None:
    first, second = two_steps(FedYogi(lr=0.5, beta1=0.5, beta2=0.8, tau=0.1))
    v1, m1 = 0.01 + 0.2 * 4, 0.5 * 2  # v < delta^2: it grows
    assert first == pytest.approx(1 + 0.5 * m1 / (math.sqrt(v1) + 0.1))
    v2, m2 = v1 + 0.2 * 1, 0.5 * m1 - 0.5  # still below 1
    assert second == pytest.approx(first + 0.5 * m2 / (math.sqrt(v2) + 0.1))
    shrunk, state = FedYogi(beta2=0.8)(w(0.0), w(1.0), {"first.w": w(0.0)["w"], "second.w": w(5.0)["w"]})
    assert state["second.w"].item() == pytest.approx(5 - 0.2)
    assert shrunk["w"].item() > 0


@pytest.mark.parametrize("step", [FedAdagrad(tau=0.0), FedAdam(tau=0.0), FedYogi(tau=0.0), FedAvgM()])
def test_clients_that_return_the_global_model_change_nothing(step) -> None:
    old = {"w": torch.tensor([1.5, -2.0, 0.0])}
    new, state = step(old, old, step.init(old))
    assert torch.equal(new["w"], old["w"])
    assert all(torch.isfinite(t).all() for t in state.values())


def test_neutral_momentum_gives_the_merged_bits() -> None:
    old, merged = {"w": torch.tensor([1e10, 0.1])}, {"w": torch.tensor([1e-3, 0.3])}
    step = FedAvgM(lr=1.0, momentum=0.0)
    assert torch.equal(step(old, merged, step.init(old))[0]["w"], merged["w"])


@pytest.mark.parametrize("step", ALL)
def test_dtypes_counters_and_purity(step) -> None:
    old = {"w": torch.ones(2, dtype=torch.float16), "n": torch.tensor(3)}
    merged = {"w": torch.zeros(2, dtype=torch.float16), "n": torch.tensor(5)}
    state = step.init(old)
    kept = {name: t.clone() for name, t in state.items()}
    new, after = step(old, merged, state)
    assert new["w"].dtype == torch.float16 and new["n"].item() == 5
    assert after.keys() == state.keys() and all(torch.equal(state[n], kept[n]) for n in kept)
    assert all(t.dtype == torch.float16 for t in after.values())


@pytest.mark.parametrize("step", ALL)
def test_refusals(step) -> None:
    with pytest.raises(PayloadError, match=r"no state 'first\.w'"):
        step(w(0.0), w(1.0), {})
    with pytest.raises(PayloadError, match="lacks or adds"):
        step(w(0.0), {"v": torch.zeros(1)}, step.init(w(0.0)))
    with pytest.raises(ConfigError, match="lr must be greater than 0, got 0"):
        type(step)(lr=0)
    with pytest.raises(ConfigError, match="lr must be greater than 0, got nan"):
        type(step)(lr=float("nan"))


def test_option_ranges() -> None:
    for make, text in [
        (lambda: FedAvgM(momentum=1.0), r"momentum must be in \[0, 1\), got 1.0"),
        (lambda: FedAdam(beta1=-0.1), r"beta1 must be in \[0, 1\)"),
        (lambda: FedAdam(beta2=1.0), r"beta2 must be in \[0, 1\)"),
        (lambda: FedYogi(beta2=2.0), r"beta2 must be in \[0, 1\)"),
        (lambda: FedAdagrad(tau=-1.0), "tau must be at least 0"),
    ]:
        with pytest.raises(ConfigError, match=text):
            make()
