"""Sums of gates over the batches of a client."""

import torch

from fedloom.local.carries.gate_mass import GateMass


def test_gates_are_summed_over_pictures_sentences_and_batches():
    carry = GateMass()
    value = carry.init({}, None)
    gates = torch.tensor([[[0.75, 0.25], [0.0, 1.0]]])  # one layer, two pictures, two experts
    text = torch.tensor([[[0.5, 0.5]] * 3]).view(1, 3, 2)
    for _ in range(2):
        value = carry.update(value, {"image_gates": gates, "text_gates": text}, None, {})
    value = carry.close(carry.close_epoch(value))
    assert value["image"].tolist() == [[1.5, 2.5]] and value["text"].tolist() == [[3.0, 3.0]]


def test_a_tower_without_adapters_is_absent():
    assert GateMass().update({}, {"image_gates": torch.ones(1, 2, 2)}, None, {}).keys() == {"image"}
