from __future__ import annotations

import torch

from fedloom.core.seeds import generator, seed_for, seeded


def test_keys_are_told_apart_by_value_type_and_place():
    keys = [(1,), ("1",), (1.0,), (True,), (None,), (1, 1), (11,), ("1", "1"), ("a", "b"), ("b", "a"), ("a\x1fb",)]
    assert len({seed_for(*key) for key in keys}) == len(keys)
    assert all(0 <= seed_for(*key) < 2**63 for key in keys)


def test_the_streams_never_change_between_versions():
    assert seed_for(0, "batches", 1, None, 2, "train") == 7491004518841584668
    assert torch.equal(torch.rand(3, generator=generator(5, "x")), torch.rand(3, generator=generator(5, "x")))


def test_seeded_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    with seeded(3, "net"):
        one = torch.nn.Linear(2, 2)
    with seeded(3, "net"):
        two = torch.nn.Linear(2, 2)
    with seeded(4, "net"):
        other = torch.nn.Linear(2, 2)
    assert torch.equal(one.weight, two.weight) and not torch.equal(one.weight, other.weight)
    assert torch.equal(before, torch.get_rng_state())
