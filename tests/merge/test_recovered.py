"""A part of a model completed by the server's values, and means of such models."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedloom.core import PayloadError
from fedloom.core.seeds import generator
from fedloom.merge.mean import weighted_mean
from fedloom.merge.recovered import Recovered

W = {"w": torch.arange(12.0).view(3, 4), "b": torch.arange(3.0), "n": torch.tensor(5)}
ROWS, COLUMNS = torch.tensor([0, 2]), torch.tensor([1, 2, 3])
INDEX = {"w": (ROWS, COLUMNS), "b": (ROWS,)}


def test_what_was_not_kept_is_the_servers() -> None:
    """w = (5, 6), M = (1, 0), W = (1, 2) -> (5, 2)."""
    part = {"w": torch.tensor([5.0])}
    whole = Recovered(part, {"w": (torch.tensor([0]),)}.get, {"w": torch.tensor([1.0, 2.0])}, 0)
    assert whole["w"].tolist() == [5.0, 2.0]


def test_every_dimension_has_its_own_positions_and_nothing_given_is_altered() -> None:
    part = {"w": -torch.ones(2, 3), "b": torch.tensor([7.0, 8.0]), "n": torch.tensor(9)}
    whole = Recovered(part, INDEX.get, W, 0)
    assert whole["w"].tolist() == [[0, -1, -1, -1], [4, 5, 6, 7], [8, -1, -1, -1]]
    assert whole["b"].tolist() == [7.0, 1.0, 8.0] and whole["n"] is not part["n"] and int(whole["n"]) == 9
    assert list(whole) == ["w", "b", "n"] and len(whole) == 3 and "x" not in whole
    assert torch.equal(W["w"], torch.arange(12.0).view(3, 4)) and part["w"].eq(-1).all()
    first = Recovered({"w": -torch.ones(2, 4)}, {"w": (ROWS,)}.get, W, 0)
    assert first["w"].tolist() == [[-1] * 4, [4, 5, 6, 7], [-1] * 4]


def test_a_mean_has_everybody_in_every_entry_and_is_exact_where_all_have_pruned() -> None:
    rng, weights = generator("recovered"), [1.0, 2.0, 5.0]
    old = {"w": torch.rand(4, 5, generator=rng)}
    kept = [
        (torch.arange(0, 3), torch.tensor([0, 4])),
        (torch.tensor([2, 0]), torch.arange(4)),
        (torch.arange(3), None),
    ]
    parts = [{"w": torch.rand(len(r), 5 if c is None else len(c), generator=rng)} for r, c in kept]
    trees = [Recovered(p, {"w": at}.get, old, k) for k, (p, at) in enumerate(zip(parts, kept, strict=True))]
    dense: list[Tensor] = []
    for part, (rows, columns) in zip(parts, kept, strict=True):
        dense.append(old["w"].clone())
        dense[-1][rows[:, None], torch.arange(5) if columns is None else columns] = part["w"]
    new = weighted_mean(trees, weights, old)["w"]
    expected = sum(w * t for w, t in zip(weights, dense, strict=True)) / 8
    torch.testing.assert_close(new, expected)
    assert torch.equal(new[3], old["w"][3])


@pytest.mark.parametrize(
    "value", [torch.zeros(3, 3), torch.zeros(2, 4), torch.zeros(2, 3, dtype=torch.float64), torch.zeros(6)]
)
def test_parts_that_do_not_fit_their_positions_are_refused_with_the_clients_name(value: Tensor) -> None:
    tree = Recovered({"w": value}, INDEX.get, W, 7)
    with pytest.raises(PayloadError, match="client 7: 'w'"):
        tree["w"]
