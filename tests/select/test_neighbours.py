"""Which other clients' vectors a client is given: three prompts by hand, and what holds of every draw."""

import torch

from fedloom.core.seeds import generator
from fedloom.select.neighbours import NEIGHBOURS, drawn, nearest

KNOWN = torch.ones(3, dtype=torch.bool)


def test_the_nearest_of_three_prompts_are_the_nearest_by_l2():
    prompts = torch.tensor([[0.0, 0.0], [3.0, 4.0], [6.0, 0.0]]).view(3, 2, 1)  # 0-1: 5, 0-2: 6, 1-2: 5
    assert nearest(prompts, KNOWN, 0, 1, 0).tolist() == [1]
    assert nearest(prompts, KNOWN, 2, 1, 0).tolist() == [1]
    assert nearest(prompts, KNOWN, 1, 1, 0).tolist() == [0], "of equal distances the first"
    moved = prompts - torch.tensor([0.0, 1.0]).view(2, 1) * (torch.arange(3) == 1).view(3, 1, 1) * 10  # 0-1: sqrt(45)
    assert nearest(moved, KNOWN, 0, 1, 0).tolist() == [2]


def test_close_vectors_far_from_zero_are_told_apart():
    vectors = 1e4 + torch.tensor([[0.0], [0.02], [0.01]])
    assert nearest(vectors, KNOWN, 0, 1, 0).tolist() == [2]


def test_nobody_is_their_own_neighbour_and_unknown_ones_are_nobodys():
    vectors = torch.randn(7, 3, generator=generator("neighbours"))
    known = torch.tensor([True, False, True, True, False, True, True])
    for choose in NEIGHBOURS.values():
        for client in range(7):
            for count in range(8):
                found = choose(vectors, known, client, count, seed=count).tolist()
                others = {0, 2, 3, 5, 6} - {client}
                assert set(found) <= others and found == sorted(set(found)) and len(found) == min(count, len(others))


def test_a_draw_is_the_seeds_and_even():
    vectors, known = torch.zeros(6, 1), torch.ones(6, dtype=torch.bool)
    counts = torch.zeros(6)
    for seed in range(500):
        found = drawn(vectors, known, 2, 2, seed)
        assert torch.equal(found, drawn(vectors, known, 2, 2, seed))
        counts[found] += 1
    assert counts[2] == 0 and (counts[[0, 1, 3, 4, 5]] - 200).abs().max() < 50
