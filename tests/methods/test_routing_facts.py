"""Tables on routing: numbers by hand, and what is left out of them."""

from __future__ import annotations

import math

import pytest
import torch

from fedloom.core.moe import MoELayer
from fedloom.merge.routing import Agreement
from fedloom.merge.semantic import Region
from fedloom.methods.alignment import Agreed
from fedloom.methods.routing_facts import blank_history, history_tables, longer_history, region_numbers, routing_tables


def layers(count: int) -> list[MoELayer]:
    return [MoELayer(f"blocks.{k}", ((), ()), (), 1, 3) for k in range(count)]


def consensus(depth: int = 1) -> dict[str, torch.Tensor]:
    """Of three clients the first and the last have a record."""
    each = torch.zeros(3, depth, 2)
    means, count, weights = each.clone(), each.clone(), each.clone()
    means[0], means[2] = torch.tensor([0.75, 0.25]), torch.tensor([0.5, 0.5])
    count[0], count[2] = torch.tensor([30.0, 10.0]), torch.tensor([5.0, 5.0])
    weights[0], weights[2] = torch.tensor([0.5, 1.0]), torch.tensor([0.5, 0.0])
    rest = {"overlap": each, "margin": each, "routing": torch.full((depth, 2), 0.5)}
    return {"means": means, "count": count, "weights": weights, "known": torch.tensor([True, False, True]), **rest}


def region() -> Region:
    """Clients 7 and 4: both use expert 0, client 4 alone expert 1."""
    found = Region.empty(2, layers(1))
    found.prior[:, 0, 0], found.prior[1, 0, 1] = 1.0, 1.0
    found.similarity[0, 0] = torch.tensor([[1.0, 0.6], [0.6, 1.0]])
    found.direction[0, 0] = torch.tensor([[1.0, 0.5], [0.5, 1.0]])
    found.similarity[0, 1, 1, 1] = found.direction[0, 1, 1, 1] = 1.0
    found.gates[0, 0] = torch.eye(2)
    return found


def test_numbers_of_a_region_are_means_over_the_experts_that_both_use_by_ascending_client():
    found = region_numbers(region(), [7, 4])
    assert found["clients"].tolist() == [4, 7]
    torch.testing.assert_close(found["similarity"], torch.tensor([[[1.0, 0.6], [0.6, 1.0]]]))
    torch.testing.assert_close(found["direction"], torch.tensor([[[1.0, 0.5], [0.5, 1.0]]]))
    assert found["kappa"].tolist() == pytest.approx([0.3]) and found["rejected"].tolist() == [1.0]
    swapped = Region(*(t.flip(0) for t in region()[:1]), *(t.flip(2, 3) for t in region()[1:4]), *region()[4:])
    swapped = swapped._replace(prior=region().prior.flip(0))
    again = region_numbers(swapped, [4, 7])
    assert all(torch.equal(again[name], value) for name, value in found.items())


def test_tables_hold_the_clients_that_have_a_record():
    found = {table.title: table for table in routing_tables(consensus(), region_numbers(region(), [0, 2]), layers(1))}
    routing = found["Routing distribution, layer 1 of 1"]
    assert (routing.rows, routing.columns, routing.values) == ([0, 2], [0, 1], [[0.75, 0.25], [0.5, 0.5]])
    assert found["Expert load, layer 1 of 1"].values == [[0.75, 0.25], [0.5, 0.5]]
    assert found["Similarity of the experts' inputs, layer 1 of 1"].values == [[1.0, 0.6], [0.6, 1.0]]
    by_layer = dict(zip(found["Routing by layer"].columns, found["Routing by layer"].values[0], strict=True))
    quarter = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert by_layer["gate entropy of the clients' means"] == pytest.approx((quarter + math.log(2)) / 2, abs=1e-6)
    assert by_layer["gate entropy of the consensus"] == pytest.approx(math.log(2), abs=1e-6)
    assert by_layer["entropy of the weights"] == pytest.approx(math.log(2) / 2, abs=1e-6)
    assert by_layer["load, coefficient of variation"] == pytest.approx(0.25, abs=1e-6)
    assert by_layer["kappa"] == pytest.approx(0.3, abs=1e-6) and by_layer["rejected pairs"] == 1


def test_before_the_first_round_there_is_nothing_to_tell():
    assert routing_tables({**consensus(), "known": torch.zeros(3, dtype=torch.bool)}, {}, layers(1)) == []


def test_of_many_layers_some_are_drawn_the_first_and_the_last_among_them():
    titles = [table.title for table in routing_tables(consensus(12), {}, layers(12))]
    drawn = [title for title in titles if title.startswith("Routing distribution")]
    assert drawn == [f"Routing distribution, layer {k} of 12" for k in (1, 5, 8, 12)]


def test_the_history_has_a_row_per_round_and_gaps_where_nothing_came_together():
    weights = torch.tensor([[[0.5, 1.0]], [[0.5, 0.0]]], dtype=torch.float64)
    agreed = Agreed([], torch.ones(2), Agreement(**dict.fromkeys(Agreement._fields, weights)))
    history = longer_history(blank_history(), agreed, region_numbers(region(), [7, 4]), 0)
    history = longer_history(history, None, None, 1)
    tables = history_tables(history)
    assert [table.rows for table in tables] == [[0, 1]] * 3 and [table.values[1] for table in tables] == [[None]] * 3
    expected = [math.log(2) / 2, 0.3, 1.0]
    assert [table.values[0][0] for table in tables] == pytest.approx(expected, abs=1e-6)
    assert history_tables(blank_history()) == []


def test_of_many_rounds_fifty_are_shown_first_and_last_among_them():
    history = blank_history()
    for number in range(120):
        history = longer_history(history, None, region_numbers(region(), [7, 4]), number)
    _, table, _ = [None, *history_tables(history)]
    assert len(table.rows) == 50 and table.rows[0] == 0 and table.rows[-1] == 119
