"""Stored token ids become what networks read, without the padding that no row needs."""

import torch

from fedloom.data.text import PrepareText


def test_padding_is_masked_and_cut_to_the_longest_row():
    stored = torch.tensor([[5, 6, -1, -1, -1], [7, 0, 9, -1, -1]], dtype=torch.int32)
    found = PrepareText()(stored)
    assert found["input_ids"].tolist() == [[5, 6, 0], [7, 0, 9]] and found["input_ids"].dtype == torch.int64
    assert found["attention_mask"].tolist() == [[True, True, False], [True, True, True]]
    assert "scored" not in found
    assert PrepareText()(found) is found


def test_questions_also_tell_what_is_scored():
    ids = [[[1, 2, 3, -1], [1, 2, -1, -1]]]
    scored = [[[0, 0, 4, 0], [0, 7, 0, 0]]]
    found = PrepareText()(torch.tensor([[ids[0], scored[0]]], dtype=torch.int32))
    assert found["input_ids"].tolist() == [[[1, 2, 3], [1, 2, 0]]]
    assert found["attention_mask"].tolist() == [[[True, True, True], [True, True, False]]]
    assert found["scored"].tolist() == [[[0, 0, 4], [0, 7, 0]]] and found["scored"].dtype == torch.int64
