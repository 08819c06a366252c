"""Sets of experts: coverage, budget, floors of top-k, and swaps that similar clients suggest."""

from __future__ import annotations

import pytest
import torch

from fedloom.core import ConfigError
from fedloom.select.experts import Covering, covering, most_used, recommended, within_budget


def scores(*rows):
    return torch.tensor(rows)


def chosen(mask):
    return [row.nonzero().flatten().tolist() for row in mask]


@pytest.mark.parametrize(("rho", "expected"), [(0.5, [0]), (0.6, [0]), (0.61, [0, 2]), (0.9, [0, 2]), (1.0, [0, 1, 2])])
def test_the_smallest_set_reaches_rho(rho, expected):
    assert chosen(covering(scores([0.6, 0.1, 0.3, 0.0]), rho)) == [expected]


def test_coverage_is_of_what_was_processed_when_a_capacity_drops_tokens():
    assert chosen(covering(scores([0.3, 0.15, 0.05, 0.0]), 0.9)) == [[0, 1]]


def test_no_smaller_set_covers_rho_than_the_one_that_is_chosen():
    rows = torch.rand(20, 6, generator=torch.Generator().manual_seed(0))
    shares = rows / rows.sum(1, keepdim=True)
    for row, mask in zip(shares, covering(rows, 0.8), strict=True):
        sizes = [
            bits.bit_count() for bits in range(64) if float(row[[e for e in range(6) if bits >> e & 1]].sum()) >= 0.8
        ]
        assert int(mask.sum()) == min(sizes) and float(row[mask].sum()) >= 0.8 - 1e-6


def test_equal_scores_prefer_the_lower_index():
    assert chosen(covering(scores([0.25, 0.25, 0.25, 0.25]), 0.5)) == [[0, 1]]
    assert chosen(most_used(scores([1.0, 2.0, 2.0], [0.0, 0.0, 0.0]), [1, 2])) == [[1], [0, 1]]


def test_the_budget_is_filled_over_all_layers_by_descending_score():
    use = scores([0.7, 0.2, 0.1, 0.0], [0.4, 0.3, 0.25, 0.05])
    everything = use > 0
    assert chosen(within_budget(use, everything, 4, [1, 1])) == [[0], [0, 1, 2]]
    assert chosen(within_budget(use, everything, 5, [1, 1])) == [[0, 1], [0, 1, 2]]


def test_every_layer_keeps_its_top_k_whatever_the_budget():
    use = scores([0.9, 0.1, 0.0, 0.0], [0.4, 0.3, 0.2, 0.1])
    assert chosen(within_budget(use, use > 0, 1, [2, 2])) == [[0, 1], [0, 1]]
    assert chosen(Covering(0.5, 0.25)(use, [1, 1])) == [[0], [0]]


def test_a_layer_with_less_use_than_top_k_keeps_top_k_experts():
    assert chosen(Covering(0.9, 1.0)(scores([1.0, 0.0, 0.0]), [2])) == [[0, 1]]


def test_half_of_all_experts_is_the_default_budget():
    mask = Covering()(torch.full((2, 8), 0.125), [1, 1])
    assert int(mask.sum()) == 8
    assert int(Covering(budget=1.0)(torch.full((2, 8), 0.125), [1, 1]).sum()) == 16


@pytest.mark.parametrize("options", [{"rho": 0.0}, {"rho": 1.5}, {"budget": 0.0}])
def test_shares_out_of_range_are_refused_in_words(options):
    with pytest.raises(ConfigError, match=f"{next(iter(options))} must be above 0"):
        Covering(**options)


def three_clients():
    """Client 0 is like client 1 and unlike client 2; one layer of four experts, each client holds two."""
    use = torch.tensor([[[0.6, 0.3, 0.1, 0.0]], [[0.5, 0.0, 0.5, 0.0]], [[0.0, 0.0, 0.0, 1.0]]])
    held = torch.tensor([[[1, 1, 0, 0]], [[1, 0, 1, 0]], [[0, 0, 0, 1]]]).bool()
    return use, held


def test_a_client_swaps_its_least_used_expert_for_what_similar_clients_use():
    use, held = three_clients()
    new, taken = recommended(use, held, [1])
    assert chosen(new[0]) == [[0, 2]]  # 0.3 < 0.5, the use of client 1, whose weight is the only one above 0
    assert float(taken[0, 0, 2]) == pytest.approx(0.5)
    assert chosen(new[1]) == [[0, 2]]  # client 0 uses expert 1 by 0.3, less than the 0.5 of either that it holds
    assert torch.equal(new[2], held[2]) and torch.equal(taken[1:], use[1:])


def test_the_proposal_is_the_mean_weighted_by_the_cosine_of_the_flattened_use():
    use = torch.rand(4, 2, 3, generator=torch.Generator().manual_seed(1))
    held = torch.zeros(4, 2, 3, dtype=torch.bool)
    held[:, :, 0] = True
    use[:, :, 0] = 0
    flat = use.double().flatten(1)
    alike = torch.nn.functional.cosine_similarity(flat[0], flat[1:], dim=1)
    proposal = (alike[:, None] * flat[1:]).sum(0) / alike.sum()
    new, taken = recommended(use, held, [1, 1])
    best = int(proposal.argmax())
    assert bool(new[0].flatten()[best]) and float(taken[0].flatten()[best]) == pytest.approx(float(proposal[best]))


def test_repeated_recommendations_settle():
    use, held = torch.rand(5, 2, 6, generator=torch.Generator().manual_seed(2)), torch.zeros(5, 2, 6, dtype=torch.bool)
    held[:, :, :3] = True
    for _ in range(40):
        before = held
        use, held = recommended(use, held, [1, 1])[::-1]
    assert torch.equal(before, held)
    assert held.flatten(1).sum(1).tolist() == [6] * 5


def test_a_swap_leaves_no_layer_with_fewer_than_top_k():
    use = torch.tensor([[[0.1, 0.0, 0.9], [0.5, 0.5, 0.0]], [[0.0, 0.0, 1.0], [0.0, 0.0, 1.0]]])
    held = torch.tensor([[[1, 0, 1], [1, 1, 0]], [[0, 0, 1], [0, 0, 1]]]).bool()
    assert chosen(recommended(use, held, [1, 1])[0][0]) == [[2], [0, 1, 2]]
    assert chosen(recommended(use, held, [2, 1])[0][0]) == [[0, 2], [1, 2]]  # expert 0 of layer 0 may not go


def test_without_anybody_alike_or_anything_to_gain_nothing_is_swapped():
    use, held = three_clients()
    assert torch.equal(recommended(use[2:], held[2:], [1])[0], held[2:])
    assert torch.equal(recommended(use, torch.ones_like(held), [1])[0], torch.ones_like(held))
