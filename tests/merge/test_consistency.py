"""Sign histories, the masks that follow from them, and the steps of weights that follow distances."""

from __future__ import annotations

import pytest
import torch

from fedloom.merge.consistency import ConsistencyMasks, consistency_mask, diversity_step, sign_history


def rounds(n: int) -> torch.Tensor:
    return torch.tensor(n)


def test_signs_plus_plus_minus_minus_in_numbers() -> None:
    history, kept, after = torch.zeros(1), [], []
    for t, sign in enumerate([1.0, 1.0, -1.0, -1.0]):
        update = torch.tensor([sign])
        kept.append(bool(consistency_mask(update, history, rounds(t), 0.3)))
        history = sign_history(update, history, rounds(t))
        after.append(float(history))
    assert kept == [True, True, False, True]  # the third has c = 0, the fourth c = 1/3
    assert after == pytest.approx([1, 1, 2 / 3, 1 / 2])
    assert history.dtype == torch.float32


def test_a_zero_counts_as_positive_for_the_mask_and_for_the_history() -> None:
    zero = torch.zeros(2)
    assert consistency_mask(zero, torch.tensor([0.5, 0.2]), rounds(4), 0.3).tolist() == [True, False]
    assert sign_history(zero, torch.tensor([0.5, 0.0]), rounds(3)).tolist() == [0.625, 0.25]


def test_the_threshold_itself_is_not_enough_and_one_below_zero_keeps_everything() -> None:
    update, history = torch.tensor([1.0, -1.0]), torch.tensor([0.5, 1.0])
    assert consistency_mask(update, history, rounds(2), 0.5).tolist() == [False, False]
    assert consistency_mask(update, history, rounds(2), 0.25).tolist() == [True, False]
    assert consistency_mask(update, history, rounds(2), -1.0).all()


def test_rows_without_a_past_are_kept_and_start_their_own_history() -> None:
    update, taken = torch.full((3, 2), -1.0), torch.tensor([0, 1, 3]).view(3, 1)
    history = torch.tensor([[0.9, 0.9], [1.0, 1.0], [2 / 3, 1.0]])
    assert consistency_mask(update, history, taken, 0.3).tolist() == [[True, True], [False, False], [True, False]]
    expected = torch.tensor([[0.0, 0.0], [0.5, 0.5], [0.5, 0.75]])
    torch.testing.assert_close(sign_history(update, history, taken), expected)


def test_what_is_observed_is_the_masked_distance_tensor_by_tensor_and_the_new_history() -> None:
    old = {"a": torch.tensor([1.0, 1.0, 1.0]), "b": torch.tensor(2.0), "n": torch.tensor(5)}
    tree = {"a": torch.tensor([4.0, 5.0, -9.0]), "b": torch.tensor(4.0), "n": torch.tensor(3)}
    history = {"a": torch.zeros(3), "b": torch.tensor(0.5), "n": torch.tensor(1.0)}
    masks = ConsistencyMasks(old, tree, history, dict.fromkeys(old, rounds(2)), 0.3)
    assert masks["a"].tolist() == [True, True, False] and bool(masks["b"]) and len(masks) == 3
    new, distance = masks.observed()
    assert distance == pytest.approx(5 + 2 + 2)  # ||(-3, -4, masked)|| + |-2| + |2|, not the norm of all together
    torch.testing.assert_close(new["a"], torch.tensor([0.0, 0.0, 1 / 3]))
    assert (float(new["b"]), float(new["n"])) == pytest.approx((1 / 3, 1.0))
    assert history["a"].tolist() == [0, 0, 0]


def test_the_first_round_keeps_everything_and_sets_the_history_to_the_signs() -> None:
    old, tree = {"a": torch.zeros(2)}, {"a": torch.tensor([-1.0, 1.0])}
    masks = ConsistencyMasks(old, tree, {}, {"a": rounds(0)}, 0.9)
    assert masks["a"].all() and masks.observed()[0]["a"].tolist() == [1.0, 0.0]


def test_weights_follow_distances_in_numbers() -> None:
    weight, step = torch.full((2,), 0.5, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    seen = []
    for distances in ((3.0, 1.0), (1.0, 1.0)):
        step = diversity_step(torch.tensor(distances, dtype=torch.float64), step, beta=0.4)
        weight = weight + step
        seen.append((step.tolist(), weight.tolist(), (weight / weight.sum()).tolist()))
    (step1, weight1, used1), (step2, weight2, used2) = seen
    assert step1 == pytest.approx([0.3, 0.1]) and weight1 == pytest.approx([0.8, 0.6])
    assert used1 == pytest.approx([0.5714, 0.4286], abs=5e-5)
    assert step2 == pytest.approx([0.38, 0.26]) and weight2 == pytest.approx([1.18, 0.86])
    assert used2 == pytest.approx([0.5784, 0.4216], abs=5e-5)


def test_a_step_scales_with_the_share_of_the_cohort_and_is_even_without_any_distance() -> None:
    old = torch.tensor([0.2, 0.0], dtype=torch.float64)
    some, none = torch.tensor([1.0, 3.0], dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    assert diversity_step(some, old, beta=0.4, share=0.5).tolist() == pytest.approx([0.17, 0.15])
    assert diversity_step(none, old, beta=0.4).tolist() == pytest.approx([0.32, 0.2])
