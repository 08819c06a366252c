"""Token strings around class names: where the slots, the name and the end are."""

from __future__ import annotations

import pytest
import torch

from fedloom.core import ConfigError
from fedloom.models.clip.words import encoded, fixed, learnable, tokenizer

NAMES = ("cat", "polar bear", "aquarium_fish")


def text_of(row: torch.Tensor, eot: int) -> str:
    return tokenizer().decode(row[: eot + 1].tolist()).replace("<start_of_text>", "").replace("<end_of_text>", "")


def test_a_fixed_sentence_is_what_the_tokeniser_makes_of_it():
    found = fixed(NAMES, "a photo of a {}.", 24)
    wanted = tokenizer()([f"a photo of a {n.replace('_', ' ')}." for n in NAMES], context_length=24)
    assert torch.equal(found.ids, wanted)
    assert torch.equal(found.ids.argmax(1), found.eot) and found.slots.shape == (3, 0)


@pytest.mark.parametrize(
    ("position", "text", "slots"),
    [
        ("end", "x x x polar bear . ", [1, 2, 3]),
        ("middle", "x polar bear x x . ", [1, 4, 5]),
        ("front", "polar bear x x x . ", [3, 4, 5]),
    ],
)
def test_slots_stand_where_the_position_says(position, text, slots):
    found = learnable(NAMES, 3, 24, position)
    assert text_of(found.ids[1], int(found.eot[1])) == text
    assert found.slots[1].tolist() == slots
    assert found.ids[1, found.words[1]].tolist() == encoded("polar bear")
    assert all(int(i) == encoded("x")[0] for i in found.ids[1, found.slots[1]])


def test_some_sentences_are_cut_behind_their_longest():
    found = learnable(NAMES, 4, 24)
    part = found.of(torch.tensor([2, 0]))
    assert part.ids.shape == (2, int(found.eot[[2, 0]].max()) + 1)
    assert torch.equal(part.ids, found.ids[[2, 0], : part.ids.shape[1]]) and torch.equal(part.eot, found.eot[[2, 0]])


def test_a_name_that_does_not_fit_is_named():
    with pytest.raises(ConfigError, match="class name 'a very long name' with 4 context vectors takes 11 tokens and"):
        learnable(("cat", "a very long name"), 4, 10)
    with pytest.raises(ConfigError, match=r"must hold \{\} once"):
        fixed(NAMES, "a photo", 24)


def test_a_name_without_tokens_is_refused():
    for make in (lambda names: learnable(names, 4, 24), lambda names: fixed(names, "a photo of a {}.", 24)):
        with pytest.raises(ConfigError, match=r"class name '\\x01' has no tokens; give the class another"):
            make(("cat", "\x01"))
