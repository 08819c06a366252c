"""Adaptive pruning against brute force over all masks, the worked numbers, and the limits that hold for any input."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.core import ConfigError
from fedloom.select.unstructured import Reconfiguration, greedy, steady

seeds = st.integers(0, 10_000)


def vector(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def bools(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.bool)


def draw(seed: int, *sizes: int) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return {f"layer{k}": torch.randn(size, generator=rng) for k, size in enumerate(sizes)}


def count(masks) -> int:
    return sum(int(mask.sum()) for mask in masks.values())


def test_the_candidates_of_the_specification():
    """Kept: g^2 of 6 in a time of 3, Gamma 2. Of 5, 2.5 and 1.9 the first joins, Gamma is 2.75, and nobody else."""
    gains, stay = vector(2.0, 4.0, 5.0, 2.5, 1.9), bools(1, 1, 0, 0, 0)
    assert greedy(gains, torch.ones(5), stay, fixed=1.0, most=5).tolist() == [True, True, True, False, False]


def test_times_decide_and_gamma_follows():
    """Ratios 3 and 2 of gains 3 and 8: Gamma goes from 1 to 5 / 3, then to 13 / 7, above 1.8."""
    gains, times = vector(2.0, 3.0, 8.0, 1.8), vector(1.0, 1.0, 4.0, 1.0)
    kept = greedy(gains, times, bools(1, 0, 0, 0), fixed=1.0, most=4)
    assert kept.tolist() == [True, True, True, False]


@settings(deadline=None)
@given(seeds, st.integers(1, 8), st.floats(0, 3))
def test_no_other_mask_around_what_stays_has_a_larger_gamma(seed: int, n: int, fixed: float):
    rng = torch.Generator().manual_seed(seed)
    gains, times = torch.rand(n, generator=rng).double() ** 3, torch.rand(n, generator=rng).double() + 0.1
    stay = torch.rand(n, generator=rng) < 0.3

    def gamma(mask: torch.Tensor) -> float:
        time = fixed + float(times[mask].sum())
        return float(gains[mask].sum()) / time if time else 0.0

    others = (torch.tensor(bits) | stay for bits in itertools.product((False, True), repeat=n))
    best = max(gamma(mask) for mask in others)
    assert gamma(greedy(gains, times, stay, fixed, n)) == pytest.approx(best)


@settings(deadline=None)
@given(seeds, st.integers(0, 12))
def test_a_limit_takes_the_best_ratios_first_and_ties_by_index(seed: int, most: int):
    rng = torch.Generator().manual_seed(seed)
    gains, stay = torch.randint(0, 4, (12,), generator=rng).double(), torch.rand(12, generator=rng) < 0.2
    kept = greedy(gains, torch.ones(12), stay, fixed=20.0, most=most)
    every = greedy(gains, torch.ones(12), stay, fixed=20.0, most=12)
    ranked = sorted((j for j in range(12) if every[j] and not stay[j]), key=lambda j: (-gains[j], j))
    joined = set(ranked[: max(0, most - int(stay.sum()))])
    assert {j for j in range(12) if kept[j]} == joined | {j for j in range(12) if stay[j]}


def test_without_anybody_inside_whoever_gains_joins_only_if_it_raises_gamma():
    assert greedy(vector(1.0, 0.0, 3.0), torch.ones(3), bools(0, 0, 0), 0.0, 3).tolist() == [False, False, True]
    assert not greedy(torch.zeros(3), torch.ones(3), bools(0, 0, 0), 0.0, 3).any()


def test_of_every_layer_the_smallest_active_weights_become_candidates():
    weights = {"a": vector(0.1, -5.0, 0.3, 0.0, 4.0), "b": vector(9.0, -8.0)}
    masks = {"a": bools(1, 1, 1, 0, 1), "b": bools(1, 1)}
    stay = Reconfiguration(share=0.5).staying(weights, masks, age=0)
    assert stay["a"].tolist() == [False, True, False, False, True] and stay["b"].tolist() == [True, False]
    stay = Reconfiguration(share=0.5, half_life=10.0).staying(weights, masks, age=10)  # 25 % of 4 and of 2
    assert stay["a"].tolist() == [False, True, True, False, True] and stay["b"].tolist() == [True, True]


def test_equal_weights_give_way_from_the_last_on():
    stay = Reconfiguration(share=0.5).staying({"a": torch.ones(4)}, {"a": bools(1, 1, 1, 1)}, age=0)
    assert stay["a"].tolist() == [True, True, False, False]


def test_without_decay_and_without_gains_outside_the_mask_stays():
    weights, masks = draw(0, 30, 20), {name: w > 0 for name, w in draw(1, 30, 20).items()}
    gains = {name: w.square() * masks[name] for name, w in draw(2, 30, 20).items()}
    times = {"layer0": 1.0, "layer1": 4.0}
    for age in range(3):
        new = Reconfiguration(share=0.0)(weights, masks, gains, times, age)
        assert all(torch.equal(new[name], masks[name]) for name in masks)


def test_a_reconfiguration_is_the_greedy_choice_over_all_layers_together():
    rule, times = Reconfiguration(share=0.4, fixed=0.05), {"layer0": 1.0, "layer1": 3.0}
    weights, gains = draw(0, 10, 15), {name: w.square() for name, w in draw(1, 10, 15).items()}
    masks = {name: w > 0 for name, w in draw(2, 10, 15).items()}
    stay = rule.staying(weights, masks, 0)
    flat = [torch.cat([tree["layer0"], tree["layer1"]]) for tree in (gains, stay)]
    spread = torch.tensor([1.0] * 10 + [3.0] * 15)
    expected = greedy(flat[0], spread, flat[1], 0.05 * float(spread.sum()), 25)
    new = rule(weights, masks, gains, times, 0)
    assert torch.equal(torch.cat([new["layer0"], new["layer1"]]), expected)
    turned = rule(weights, dict(reversed(masks.items())), gains, times, 0)
    assert all(torch.equal(turned[name], new[name]) for name in masks), "the order of the layers decides"


@settings(deadline=None)
@given(seeds, st.floats(0.01, 1.0), st.floats(0.0, 1.0), st.floats(0.0, 5.0))
def test_the_density_never_exceeds_its_limit(seed: int, density: float, share: float, fixed: float):
    rule, times = Reconfiguration(share, fixed=fixed, max_density=density), {"layer0": 2.0, "layer1": 1.0}
    weights = draw(seed, 33, 20)
    masks, limit = rule.initial(weights), math.floor(density * 53 + 1e-9)
    for age in range(4):
        assert count(masks) <= limit
        gains = {name: w.square() ** 3 for name, w in draw(seed + age, 33, 20).items()}
        masks = rule(weights, masks, gains, times, age)


def test_the_first_masks_hold_the_largest_weights_of_every_layer():
    masks = Reconfiguration(max_density=0.29).initial({"a": torch.arange(100).float() - 50, "b": vector(1.0, 2.0)})
    assert masks["a"].nonzero().flatten().tolist() == [*range(15), *range(86, 100)]
    assert masks["b"].tolist() == [False, False]
    assert Reconfiguration().initial({"a": torch.zeros(2, 3)})["a"].all()


def test_a_size_is_steady_after_five_small_changes_in_a_row():
    sizes = [100, 80, 73, 70, 69, 69]
    assert not steady(sizes) and steady([*sizes, 69])
    assert not steady([100, 90, 90, 90, 90, 90]), "a change of 10 % is not less than 10 %"
    assert steady([100, 91, 91, 91, 91, 91]) and not steady([100, 91, 91, 91, 91])


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"share": 1.5}, r"adjust_share in \[0, 1\]"),
        ({"half_life": 0.0}, "half_life above 0"),
        ({"fixed": -1.0}, "fixed_time of at least 0"),
        ({"max_density": 0.0}, r"max_density must be a share of the weights in \(0, 1\], got 0.0"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, told: str):
    with pytest.raises(ConfigError, match=told):
        Reconfiguration(**options)
