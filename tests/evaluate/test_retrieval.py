"""Recall at 1 between pictures and class texts, by hand and by brute force."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from fedloom.evaluate.retrieval import Retrieval, retrieval


def test_both_directions_by_hand():
    """Three pictures of class 3 and one of class 8; one of class 3 lies on the text of class 8, nearest of all."""
    feats = torch.tensor([[4.0, 0.0], [1.0, 0.1], [0.0, 9.0], [0.2, 1.0]])
    labels, texts, classes = torch.tensor([3, 3, 3, 8]), torch.tensor([[1.0, 0.0], [0.0, 0.5]]), torch.tensor([3, 8])
    assert retrieval(feats, labels, texts, classes) == Retrieval(0.75, 0.5, 4, 2)


def test_it_is_the_brute_force_over_all_pairs():
    rng = torch.Generator().manual_seed(1)
    classes = torch.tensor([9, 0, 4, 7])
    labels = classes[torch.randint(4, (50,), generator=rng)]
    texts, feats = torch.randn(4, 3, generator=rng), torch.randn(50, 3, generator=rng)
    cosines = [[float(F.cosine_similarity(f, t, dim=0)) for t in texts] for f in feats]
    pictures = [classes[row.index(max(row))] == label for row, label in zip(cosines, labels, strict=True)]
    best = [max(range(50), key=lambda b, c=c: cosines[b][c]) for c in range(4)]
    found = retrieval(feats, labels, texts, classes)
    assert found.image_to_text == sum(map(bool, pictures)) / 50
    assert found.text_to_image == sum(bool(labels[b] == c) for b, c in zip(best, classes, strict=True)) / 4


def test_a_class_without_a_picture_is_missed_and_no_picture_has_no_recall():
    texts = torch.eye(2)
    assert retrieval(texts[:1], torch.tensor([0]), texts, torch.tensor([0, 1])).text_to_image == 0.5
    none = retrieval(torch.zeros(0, 2), torch.zeros(0, dtype=torch.long), texts, torch.tensor([0, 1]))
    assert none == Retrieval(None, None, 0, 2)


def test_what_does_not_fit_is_refused_in_words():
    with pytest.raises(ValueError, match=r"pictures have features of \[2\], texts of \[3\]"):
        retrieval(torch.ones(1, 2), torch.tensor([0]), torch.ones(1, 3), torch.tensor([0]))
    with pytest.raises(ValueError, match="a picture of class 5, which has no text"):
        retrieval(torch.ones(2, 2), torch.tensor([0, 5]), torch.ones(1, 2), torch.tensor([0]))
