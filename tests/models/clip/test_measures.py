"""Agreement of pictures and class texts, by hand and through the network."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from fedloom.evaluate.measures import summed, values
from fedloom.models.clip.measures import agreement
from fedloom.models.clip.network import ClipNetwork
from fedloom.models.clip.words import learnable
from toys.clip import LENGTH, toy_clip

AXES = torch.eye(3)


def test_pictures_on_their_texts_have_the_margin_of_orthogonal_classes():
    found = agreement(5 * AXES, 2 * AXES, torch.tensor([4, 7, 9]), torch.tensor([4, 7, 9]))
    assert found == {"alignment": (3.0, 3.0), "matched_cosine": (3.0, 3.0)}, "lengths do not count"


def test_a_shared_direction_raises_the_matched_cosine_and_not_the_alignment():
    cone = F.normalize(AXES.double() + 5.0, dim=-1)
    found = values(agreement(cone, cone, torch.arange(3), torch.arange(3)))
    assert found["matched_cosine"] == pytest.approx(1.0)
    between = float(cone[0] @ cone[1])
    assert found["alignment"] == pytest.approx(1 - between) and between > 0.97


def test_the_score_is_the_mean_over_matched_pairs_minus_the_mean_over_all_others():
    rng = torch.Generator().manual_seed(0)
    feats, texts = torch.randn(40, 6, generator=rng), torch.randn(5, 6, generator=rng)
    shown, y = torch.tensor([1, 3, 4, 6, 8]), torch.tensor([1, 3, 4, 6, 8]).repeat(8)
    pairs = [(F.cosine_similarity(f, t, dim=0), int(label) == c) for f, label in zip(feats, y, strict=True)
             for t, c in zip(texts, shown.tolist(), strict=True)]  # fmt: skip
    same, other = (torch.stack([cos for cos, own in pairs if own is kind]).mean() for kind in (True, False))
    parts = [agreement(feats[k : k + 7], texts, shown, y[k : k + 7]) for k in range(0, 40, 7)]
    found = values(summed(parts))
    assert found["alignment"] == pytest.approx(float(same - other), abs=1e-6)
    assert found["matched_cosine"] == pytest.approx(float(same), abs=1e-6)


def test_pictures_of_classes_that_are_not_shown_do_not_count_and_one_class_has_no_margin():
    found = agreement(AXES, AXES[:1], torch.tensor([2]), torch.tensor([2, 0, 1]))
    assert found == {"alignment": (0.0, 0.0), "matched_cosine": (1.0, 1.0)}
    assert values(found) == {"alignment": None, "matched_cosine": 1.0}


def test_the_network_measures_the_classes_that_it_shows():
    clip = toy_clip()
    network = ClipNetwork(clip, learnable(clip.words, 2, LENGTH), context=torch.randn(2, 8)).eval()
    network.show([5, 2, 3])
    x, y = torch.randn(9, 2), torch.tensor([2, 3, 5] * 3)
    with torch.no_grad():
        out = network(x)
    found = network.measures(out, y)
    cosines = out["logits"] / clip.towers.scale
    want = sum(float(cosines[b, c] - cosines[b, [k for k in (2, 3, 5) if k != c]].mean()) for b, c in enumerate(y))
    assert found["alignment"] == (pytest.approx(want, abs=1e-4), 9.0)
