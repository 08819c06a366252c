"""Mixed logits by their formula, at the ends of the gate, and what the gate reads."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedloom.core import ConfigError
from fedloom.models.mixing import GATE_INPUTS, MixingGate, mixed


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


COMMON, PERSONAL, INPUTS = drawn(5, 3), drawn(5, 3, seed=1), drawn(5, 4, seed=2)


def gate(bias: float, scale: float = 0.0) -> dict[str, torch.Tensor]:
    return {"weight": scale * drawn(4, seed=3), "bias": torch.tensor(bias)}


def test_logits_are_the_weighted_sum_of_both():
    logits, share = mixed(COMMON, PERSONAL, INPUTS, gate(0.3, 1.0))
    g = 1 / (1 + torch.exp(-(INPUTS @ gate(0.3, 1.0)["weight"] + 0.3)))
    torch.testing.assert_close(share, g)
    torch.testing.assert_close(logits, g[:, None] * COMMON + (1 - g[:, None]) * PERSONAL)


def test_a_gate_of_one_gives_the_global_and_of_zero_the_personal_logits_bit_for_bit():
    assert torch.equal(mixed(COMMON, PERSONAL, INPUTS, gate(200.0))[0], COMMON)
    assert torch.equal(mixed(COMMON, PERSONAL, INPUTS, gate(-200.0))[0], PERSONAL)


@pytest.mark.parametrize("bias", [-3.0, 0.0, 0.1, 3.0])
def test_where_both_are_equal_the_gate_does_not_matter(bias: float):
    assert torch.equal(mixed(COMMON, COMMON, INPUTS, gate(bias, 1.0))[0], COMMON)


def test_an_empty_gate_and_one_at_its_start_weigh_both_alike():
    half = torch.full((5,), 0.5)
    empty = mixed(COMMON, PERSONAL, INPUTS, {})
    start = MixingGate(4)({"common": COMMON, "personal": PERSONAL, "inputs": INPUTS})
    assert torch.equal(empty[1], half) and torch.equal(start["gates"], half)
    assert torch.equal(empty[0], start["logits"])
    torch.testing.assert_close(empty[0], (COMMON + PERSONAL) / 2)


def test_the_gradient_reaches_the_gate():
    net = MixingGate(4)
    net({"common": COMMON, "personal": PERSONAL, "inputs": INPUTS})["logits"].square().sum().backward()
    mean = (COMMON + PERSONAL) / 2  # d loss / d score = 2 mean (common - personal) g (1 - g), g = 1/2
    per_example = (2 * mean * (COMMON - PERSONAL)).sum(1) / 4
    torch.testing.assert_close(net.weight.grad, per_example @ INPUTS)
    torch.testing.assert_close(net.bias.grad, per_example.sum())


def test_vectors_and_images_are_read_flat():
    images = drawn(2, 1, 3, 3)
    found = GATE_INPUTS["inputs"](nn.Identity(), images, {"logits": torch.zeros(2, 3)})
    assert torch.equal(found, images.flatten(1))


class Text(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Embedding(7, 4), nn.Embedding(3, 2)


def test_of_text_the_gate_reads_the_mean_embedding_without_padding_over_all_options():
    net = Text()
    ids = torch.tensor([[1, 2, 0], [3, 5, 6]])
    mask = torch.tensor([[1, 1, 0], [0, 0, 0]]).bool()
    found = GATE_INPUTS["inputs"](net, {"input_ids": ids, "attention_mask": mask}, {})
    torch.testing.assert_close(found[0], (net.first.weight[1] + net.first.weight[2]) / 2)
    assert torch.equal(found[1], torch.zeros(4)) and not found.requires_grad
    options = {"input_ids": ids[None], "attention_mask": mask[None]}
    torch.testing.assert_close(GATE_INPUTS["inputs"](net, options, {}), found[:1])


def test_what_cannot_be_read_is_refused_in_words():
    ids = {"input_ids": torch.zeros(1, 2, dtype=torch.long), "attention_mask": torch.ones(1, 2)}
    with pytest.raises(ConfigError, match=r"no nn\.Embedding; set gate_input to features"):
        GATE_INPUTS["inputs"](nn.Linear(2, 2), ids, {})
    with pytest.raises(ConfigError, match=r"not \['a'\]"):
        GATE_INPUTS["inputs"](Text(), {"a": ids["input_ids"]}, {})
    with pytest.raises(ConfigError, match="gate_input is features, and Linear gives none"):
        GATE_INPUTS["features"](nn.Linear(2, 2), ids, {"logits": COMMON})
    with pytest.raises(ConfigError, match=r"some of shape \[1, 2, 3\]"):
        GATE_INPUTS["features"](nn.Linear(2, 2), ids, {"feats": torch.zeros(1, 2, 3)})
