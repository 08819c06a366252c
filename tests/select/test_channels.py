"""Masks from scores against brute force and the worked numbers, what clients re-open, signatures and schedules."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.core import ConfigError, PayloadError
from fedloom.select.channels import (
    REACTIVATIONS,
    SCHEDULES,
    THRESHOLDS,
    Refresh,
    flops_aware,
    group_mean,
    l1_scores,
    per_group,
    quantile,
    raw,
    raw_global,
    relative,
    restrict,
    share,
    signature,
)

SIZES = (4, 6, 10)


def draw(seed: int, sizes=SIZES, *, spread: bool = True) -> torch.Tensor:
    """Scores whose groups differ by orders of magnitude."""
    rng = torch.Generator().manual_seed(seed)
    parts = [
        torch.rand(n, generator=rng, dtype=torch.float64) * (10.0 ** (-2 * g if spread else 0))
        for g, n in enumerate(sizes)
    ]
    return torch.cat(parts)


def bools(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.bool)


def vector(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def kept_by_hand(values, sizes, count, least):
    """The best of every group up to its least number, then the best of all others; ties to the lowest index."""
    chosen, start = set(), 0
    for size, low in zip(sizes, least, strict=True):
        chosen |= set(sorted(range(start, start + size), key=lambda j: (-values[j], j))[:low])
        start += size
    rest = sorted(set(range(start)) - chosen, key=lambda j: (-values[j], j))
    chosen |= set(rest[: max(0, count - len(chosen))])
    return [j in chosen for j in range(start)]


def test_the_two_clients_of_the_specification_keep_the_second_channel():
    """Two clients of equal size with F (3, 3) and (1, 7): F^(g) = (2, 5), and half of two channels is (0, 1)."""
    domains = 30 / 40 * vector(4, 1) + 10 / 40 * vector(0, 9)
    assert domains.tolist() == [3, 3]
    merged = (domains + vector(1, 7)) / 2
    assert merged.tolist() == [2, 5]
    for threshold in (group_mean, raw_global, per_group):
        assert torch.equal(threshold(merged, [2], 0.5), bools(0, 1))


@pytest.mark.parametrize("name", ["group_mean", "raw_global"])
@settings(deadline=None)
@given(seed=st.integers(0, 1000), keep=st.floats(0.01, 1), min_share=st.floats(0, 0.5))
def test_global_thresholds_keep_exactly_the_best_of_brute_force(name, seed, keep, min_share):
    scores = draw(seed)
    scores = (scores * 50).round() / 50 if seed % 3 == 0 else scores  # ties and zeros
    mask = THRESHOLDS[name](scores, SIZES, keep, min_share=min_share)
    least = [max(1, math.ceil(min_share * n - 1e-9)) for n in SIZES]
    values = scores
    if name == "group_mean":
        values = torch.cat([g / g.mean() if g.any() else g for g in scores.split(SIZES)])
    count = max(round(keep * 20), sum(least))
    assert mask.dtype == torch.bool and int(mask.sum()) == count
    assert mask.tolist() == kept_by_hand(values.tolist(), SIZES, count, least)


@settings(deadline=None)
@given(seed=st.integers(0, 1000), keep=st.floats(0.01, 1))
def test_per_group_keeps_the_same_widths_whatever_the_scores(seed, keep):
    mask = per_group(draw(seed), SIZES, keep)
    assert [int(part.sum()) for part in mask.split(SIZES)] == [math.ceil(keep * n - 1e-9) for n in SIZES]
    for part, scores in zip(mask.split(SIZES), draw(seed).split(SIZES), strict=True):
        assert not (~part).any() or scores[part].min() >= scores[~part].max()


def test_a_raw_threshold_empties_layers_down_to_the_floor_where_the_group_mean_spreads_them():
    scores = draw(0, (100, 100, 100))
    counts = {
        n: [int(p.sum()) for p in THRESHOLDS[n](scores, (100,) * 3, 0.3).split(100)]
        for n in ("raw_global", "group_mean")
    }
    assert counts["raw_global"] == [80, 5, 5]
    assert all(20 <= count <= 40 for count in counts["group_mean"])


def test_scores_per_operation_turn_the_order_of_two_layers_round():
    scores, cost = vector(4, 3, 2, 1), vector(8, 8, 1, 1)
    assert torch.equal(raw_global(scores, (2, 2), 0.75, min_share=0.0), bools(1, 1, 1, 0))
    assert torch.equal(flops_aware(scores, (2, 2), 0.75, cost, min_share=0.0), bools(1, 0, 1, 1))
    assert torch.equal(flops_aware(scores, (2, 2), 0.75, torch.ones(4), min_share=0.0), bools(1, 1, 1, 0))


@pytest.mark.parametrize("name", sorted(THRESHOLDS))
def test_every_threshold_breaks_ties_by_the_lowest_index_and_is_defined_for_zeros(name: str):
    cost = torch.ones(8)
    for scores in (torch.zeros(8), torch.full((8,), 2.5)):
        assert (
            torch.equal(THRESHOLDS[name](scores, (4, 4), 0.5, cost), bools(1, 1, 1, 0, 1, 0, 0, 0))
            or name == "per_group"
        )
    assert torch.equal(per_group(torch.zeros(8), (4, 4), 0.5), bools(1, 1, 0, 0, 1, 1, 0, 0))


@pytest.mark.parametrize("name", sorted(THRESHOLDS))
@settings(deadline=None)
@given(seed=st.integers(0, 100))
def test_keeping_all_gives_ones_whatever_the_scores(name: str, seed: int):
    scores = draw(seed) * (seed % 3)
    assert bool(THRESHOLDS[name](scores, SIZES, 1.0, torch.ones(20)).all())


@pytest.mark.parametrize("name", sorted(THRESHOLDS))
def test_no_group_falls_below_its_floor_even_where_that_keeps_more_than_asked_for(name: str):
    scores = torch.cat([torch.ones(40), torch.zeros(41), torch.zeros(3)])
    mask = THRESHOLDS[name](scores, (40, 41, 3), 0.01, torch.ones(84), min_share=0.05)
    assert [int(part.sum()) for part in mask.split((40, 41, 3))] == [2, 3, 1]


def test_shares_that_are_whole_numbers_are_not_rounded_up():
    assert int(per_group(torch.rand(100), [100], 0.07).sum()) == 7  # 0.07 * 100 is 7.000000000000001
    assert int(raw_global(torch.zeros(100), [100], 0.01, min_share=0.07).sum()) == 7


@pytest.mark.parametrize("name", sorted(THRESHOLDS))
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
def test_scores_that_are_no_scores_are_refused(name: str, bad: float):
    scores = torch.tensor([1.0, bad])
    with pytest.raises(PayloadError, match=r"scores of channels must be finite and not negative, got .* for channel 1"):
        THRESHOLDS[name](scores, [2], 1.0, torch.ones(2))
    for reopen in REACTIVATIONS.values():
        with pytest.raises(PayloadError, match="finite and not negative"):
            reopen(scores, bools(1, 0), [2], 1.0, 0.1)


def test_options_that_do_not_fit_are_refused_in_words():
    scores = torch.ones(4)
    for keep in (0.0, 1.5, float("nan")):
        with pytest.raises(ConfigError, match=r"keep must be a share of the channels in \(0, 1\]"):
            group_mean(scores, [4], keep)
    with pytest.raises(ConfigError, match="min_keep must be a share of a group's channels"):
        per_group(scores, [4], 0.5, min_share=1.1)
    with pytest.raises(ConfigError, match=r"sizes \(2, 3\) need scores \[5\], got \(4,\)"):
        group_mean(scores, (2, 3), 0.5)
    with pytest.raises(ConfigError, match="'flops_aware' needs the cost of every channel"):
        flops_aware(scores, [4], 0.5)
    for cost in (torch.ones(3), torch.zeros(4), torch.zeros(0)):
        with pytest.raises(ConfigError, match="cost of channels must be 4 finite numbers above 0"):
            flops_aware(scores, [4], 0.5, cost)
    for phi in (-1.0, float("nan")):
        with pytest.raises(ConfigError, match="phi must be at least 0"):
            relative(scores, scores > 0, [4], phi, 0.1)
    with pytest.raises(ConfigError, match="react_max must be a share"):
        raw(scores, scores > 0, [4], 1.0, 2.0)


MASK = bools(1, 1, 0, 0, 1, 0, 0, 0)
OWN = vector(2, 4, 3, 3.5, 0.1, 0.2, 0.09, 0.11)


def test_relative_compares_with_the_kept_channels_of_the_own_group():
    """The means of the kept channels are 3 and 0.1."""
    assert torch.equal(relative(OWN, MASK, (4, 4), 1.0, 1.0), bools(0, 0, 0, 1, 0, 1, 0, 1))
    assert torch.equal(relative(OWN, MASK, (4, 4), 1.5, 1.0), bools(0, 0, 0, 0, 0, 1, 0, 0))


def test_raw_and_share_compare_with_one_number():
    assert torch.equal(raw(OWN, MASK, (4, 4), 0.1, 1.0), bools(0, 0, 1, 1, 0, 1, 0, 1))
    total = float(OWN.sum())
    assert torch.equal(share(OWN, MASK, (4, 4), 3.2 / total, 1.0), bools(0, 0, 0, 1, 0, 0, 0, 0))
    assert torch.equal(share(7 * OWN, MASK, (4, 4), 3.2 / total, 1.0), bools(0, 0, 0, 1, 0, 0, 0, 0))


def test_a_quantile_counts_the_pruned_channels_of_all_groups():
    assert torch.equal(quantile(OWN, MASK, (4, 4), 0.8, 1.0), bools(0, 0, 0, 1, 0, 0, 0, 0))
    assert torch.equal(quantile(OWN, MASK, (4, 4), 0.4, 1.0), bools(0, 0, 1, 1, 0, 1, 0, 0))
    assert not quantile(OWN, MASK, (4, 4), 1.0, 1.0).any()


@pytest.mark.parametrize("name", sorted(REACTIVATIONS))
@settings(deadline=None)
@given(seed=st.integers(0, 300), react_max=st.floats(0, 1), phi=st.floats(0, 3))
def test_reopened_channels_lie_outside_the_mask_below_the_cap_and_shrink_with_phi(name, seed, react_max, phi):
    scores = draw(seed, spread=False) * (draw(seed + 1, spread=False) > 0.3)
    mask = raw_global(draw(seed + 2, spread=False), SIZES, 0.5)
    opened = REACTIVATIONS[name](scores, mask, SIZES, phi, react_max)
    assert opened.dtype == torch.bool and not (opened & mask).any() and bool((scores[opened] > 0).all())
    for part, size in zip(opened.split(SIZES), SIZES, strict=True):
        assert int(part.sum()) <= math.ceil(round(react_max * size, 9))
    uncapped = REACTIVATIONS[name](scores, mask, SIZES, phi, 1.0)
    assert not (opened & ~uncapped).any()
    assert not (REACTIVATIONS[name](scores, mask, SIZES, phi + 0.5, 1.0) & ~uncapped).any()
    for part, may, own in zip(opened.split(SIZES), uncapped.split(SIZES), scores.split(SIZES), strict=True):
        left = may & ~part
        assert not left.any() or not part.any() or own[part].min() >= own[left].max(), "the largest first"


@pytest.mark.parametrize("name", sorted(REACTIVATIONS))
def test_infinite_phi_reopens_none_and_zero_every_channel_with_a_positive_score(name: str):
    scores, mask = draw(4) * (draw(5, spread=False) > 0.3), raw_global(draw(6), SIZES, 0.4)
    scores[0] = 0.0
    assert not REACTIVATIONS[name](scores, mask, SIZES, math.inf, 1.0).any()
    assert torch.equal(REACTIVATIONS[name](scores, mask, SIZES, 0.0, 1.0), ~mask & (scores > 0))
    for phi in (0.0, math.inf):
        assert not REACTIVATIONS[name](torch.zeros(20), mask, SIZES, phi, 1.0).any()
        assert not REACTIVATIONS[name](torch.ones(20), torch.ones(20, dtype=torch.bool), SIZES, phi, 1.0).any()


def test_the_cap_is_rounded_up_and_ties_go_to_the_lowest_index():
    scores, mask = torch.ones(12), bools(1, *[0] * 11)
    assert torch.equal(raw(scores, mask, [12], 0.5, 0.1), bools(0, 1, 1, *[0] * 9))
    assert not raw(scores, mask, [12], 0.5, 0.0).any()


def test_the_signature_is_on_the_simplex_over_the_mask_and_does_not_know_the_scale():
    fisher, mask = vector(5, 3, 7, 2), bools(1, 1, 0, 1)
    v, valid = signature(fisher, mask)
    assert torch.equal(v, vector(0.5, 0.3, 0, 0.2)) and bool(valid)
    torch.testing.assert_close(signature(100 * fisher, mask)[0], v, rtol=1e-15, atol=0)


def test_a_signature_of_nothing_is_uniform_and_says_so():
    fisher = torch.stack([vector(0, 0, 9, 0), vector(0, 1, 9, 0)])
    v, valid = signature(fisher, bools(1, 1, 0, 0))
    assert torch.equal(v, torch.stack([vector(0.5, 0.5, 0, 0), vector(0, 1, 0, 0)])) and valid.tolist() == [False, True]


@settings(deadline=None)
@given(seed=st.integers(0, 100))
def test_signatures_have_the_gradient_of_a_ratio_and_none_where_they_say_nothing(seed: int):
    rng = torch.Generator().manual_seed(seed)
    fisher = (torch.rand(2, 5, generator=rng, dtype=torch.float64) + 0.1) * vector(1, 0)[:, None]
    fisher.requires_grad_()
    mask, along = bools(1, 0, 1, 1, 0), torch.rand(5, generator=rng, dtype=torch.float64)
    v, _ = signature(fisher, mask)
    (grad,) = torch.autograd.grad((v * along).sum(), fisher)
    total = fisher[0][mask].sum().detach()
    expected = torch.where(mask, (along - (v[0] * along).sum().detach()) / total, 0.0)
    torch.testing.assert_close(grad[0], expected)
    assert not grad[1].any()


def test_a_prototype_follows_its_mask():
    p = torch.stack([vector(0.5, 0.3, 0.2, 0), vector(0, 0, 1, 0)])
    moved = restrict(p, bools(1, 1, 0, 1))
    torch.testing.assert_close(moved, torch.stack([vector(0.625, 0.375, 0, 0), vector(1, 1, 0, 1) / 3]))


def test_masks_are_made_every_round_by_default_and_the_first_is_in_force_in_the_second():
    refresh = SCHEDULES["every"]
    assert [refresh.warm(t) for t in range(3)] == [True, False, False]
    assert all(refresh.due(t, 4) for t in range(4))


def test_the_stable_schedule_warms_up_refreshes_every_five_rounds_and_freezes_at_half():
    refresh = SCHEDULES["stable"]
    assert [t for t in range(40) if refresh.warm(t)] == [0, 1, 2, 3, 4]
    assert [t for t in range(40) if refresh.due(t, 40)] == [4, 9, 14, 19]


def test_one_shot_makes_a_single_mask():
    assert [t for t in range(20) if SCHEDULES["one_shot"].due(t, 20)] == [0]
    assert [t for t in range(20) if Refresh(warmup=3, freeze=0.0).due(t, 20)] == [2]
    assert [t for t in range(6) if SCHEDULES["stable"].due(t, 6)] == [4], "the first mask is made in any case"


def test_schedules_that_cannot_be_kept_are_refused():
    for given_ in ({"warmup": 0}, {"every": 0}):
        with pytest.raises(ConfigError, match="warmup >= 1 and every >= 1"):
            Refresh(**given_)
    for freeze in (-0.1, 1.5, float("nan")):
        with pytest.raises(ConfigError, match=r"freeze must be a share of the rounds in \[0, 1\]"):
            Refresh(freeze=freeze)


def test_the_l1_norm_of_a_channel_counts_the_weights_of_every_layer_that_makes_it():
    params = {
        "a": torch.tensor([[1.0, -2.0], [0.0, 3.0]]),
        "b": torch.tensor([[[-4.0]], [[5.0]]]),
        "c": -torch.ones(3, 1),
    }
    assert l1_scores(params, [("a", "b"), ("c",)]).tolist() == [7.0, 8.0, 1.0, 1.0, 1.0]
    assert l1_scores(params, [("a",)]).dtype == torch.float64
