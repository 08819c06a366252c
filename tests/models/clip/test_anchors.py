"""Concept anchors: words, their vectors, clusters of them, and the prompts that start from clusters."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedloom.core import ConfigError
from fedloom.core.payload import digest
from fedloom.core.seeds import generator
from fedloom.models.clip.anchors import (
    ANCHORS,
    anchors,
    initial_pool,
    kmeans,
    noisy_pool,
    prompt_pool,
    spherical_kmeans,
    vocabulary,
    whole_words,
    word_vectors,
)
from fedloom.models.clip.words import encoded, tokenizer
from toys.clip import WORDS, toy_clip

CLIP = toy_clip(text_width=8)
TOWERS = CLIP.towers
TABLE = TOWERS.model.token_embedding.weight.detach()


def groups(*sizes: int, spread: float = 0.01) -> Tensor:
    """Vectors [sum(sizes), 6] around distant centres, group after group."""
    rng = generator("anchor groups")
    centres = 4 * torch.eye(6)[: len(sizes)] * torch.arange(1, len(sizes) + 1)[:, None]
    return torch.cat([c + spread * torch.randn(n, 6, generator=rng) for c, n in zip(centres, sizes, strict=True)])


def test_imagenets_names_are_998_and_the_whole_words_32230():
    assert len(vocabulary("imagenet", ())) == 998
    words = vocabulary("vocabulary", ())
    assert len(words) == len(whole_words()) == 32_230 and min(map(len, words)) == 3
    assert all(len(encoded(word)) == 1 for word in words[::500])
    assert 990 < len(vocabulary("torchvision", ())) <= 1000


def test_words_of_the_classes_and_of_a_file_come_in_order_and_once(tmp_path: Path):
    assert vocabulary("classes", ("cat", "dog", "cat")) == ("cat", "dog")
    file = tmp_path / "words.txt"
    file.write_text("red panda\n\n  sea \nred panda\n", encoding="utf-8")
    assert vocabulary(f"file:{file}", WORDS) == ("red panda", "sea")
    file.write_text("red panda\nsea", encoding="utf-8-sig")
    assert vocabulary(f"file:{file}", WORDS) == ("red panda", "sea"), "a byte order mark is no part of a word"


def test_a_missing_vocabulary_is_refused_in_words(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"unknown vocabulary 'imagnet'. Did you mean 'imagenet'\?.*file:PATH"):
        vocabulary("imagnet", ())
    with pytest.raises(ConfigError, match=r"file:.*none.txt cannot be read \(.*\); give a text file with one word"):
        vocabulary(f"file:{tmp_path / 'none.txt'}", ())
    (tmp_path / "empty.txt").write_text("\n \n")
    with pytest.raises(ConfigError, match="is empty; write one word per line"):
        vocabulary(f"file:{tmp_path / 'empty.txt'}", ())
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\xff")
    for name in (str(tmp_path / "bytes.txt"), "a\0b", "~no such user/words.txt", str(tmp_path)):
        with pytest.raises(ConfigError, match="cannot be read"):
            vocabulary(f"file:{name}", ())


def test_a_words_vector_is_the_mean_over_its_own_tokens():
    words = ("sea", "red maple tree", "Polar_Bear")
    found = word_vectors(TOWERS, words)
    assert found.shape == (3, 8) and not found.requires_grad
    ids = [tokenizer().encode(text) for text in ("sea", "red maple tree", "polar bear")]
    assert [len(row) for row in ids] == [1, 3, 2]
    torch.testing.assert_close(found, torch.stack([TABLE[row].sum(0) / len(row) for row in ids]))


def test_the_other_vectors_are_padded_single_or_of_length_1():
    words = ("sea", "red maple tree")
    ids = [tokenizer().encode(word) for word in words]
    filled = [[*row, 49407, *[0] * (15 - len(row))] for row in ids]
    padded = word_vectors(TOWERS, words, "padded")
    torch.testing.assert_close(padded, torch.stack([TABLE[row].sum(0) / 16 for row in filled]))
    torch.testing.assert_close(word_vectors(TOWERS, words, "single"), TABLE[ids[0]])
    unit = word_vectors(TOWERS, words, "unit")
    torch.testing.assert_close(unit.norm(dim=1), torch.ones(2))
    torch.testing.assert_close(torch.cosine_similarity(unit, word_vectors(TOWERS, words)), torch.ones(2))


def test_a_word_of_more_than_sixteen_tokens_is_cut_in_the_padded_mean():
    long = "red " * 20
    torch.testing.assert_close(word_vectors(TOWERS, [long], "padded"), TABLE[tokenizer().encode("red")])


def test_words_without_vectors_are_refused_in_words():
    with pytest.raises(ConfigError, match="the vocabulary's word '_' has no tokens; take it out"):
        word_vectors(TOWERS, ["cat", "_"])
    with pytest.raises(ConfigError, match="takes words of one token and the vocabulary has none; use 'content'"):
        word_vectors(TOWERS, ["polar bear"], "single")
    with pytest.raises(ConfigError, match="unknown word_vectors 'padd'"):
        word_vectors(TOWERS, ["cat"], "padd")


def test_anchors_are_the_means_of_clusters_by_size():
    vectors = groups(3, 9, 6)
    means = torch.stack([vectors[3:12].mean(0), vectors[12:].mean(0), vectors[:3].mean(0)])
    torch.testing.assert_close(anchors(vectors, 3, 0, "raw"), means)


def test_clusters_of_one_size_come_in_ascending_order():
    vectors = groups(4, 4, 4, spread=0)
    found = anchors(torch.cat([vectors, vectors]), 3, 5, "raw")
    assert found.tolist() == sorted(vectors.unique(dim=0).tolist())


def test_rescaled_anchors_have_the_mean_length_of_their_members():
    apart = torch.tensor([[3.0, 0.1], [0.0, 5.0]])  # one cluster: the mean is shorter than both
    raw, rescaled = anchors(apart, 1, 0, "raw")[0], anchors(apart, 1, 0)[0]
    lengths = apart.norm(dim=1)
    assert raw.norm() < lengths.min()
    assert rescaled.norm().item() == pytest.approx(lengths.mean().item(), rel=1e-6)
    assert torch.cosine_similarity(raw, rescaled, dim=0).item() == pytest.approx(1, abs=1e-6)


def test_equal_vectors_count_as_often_as_they_occur():
    vectors = torch.tensor([[0.0], [0.0], [0.0], [1.0], [100.0]])
    torch.testing.assert_close(anchors(vectors, 2, 0, "raw"), torch.tensor([[0.25], [100.0]]))


@pytest.mark.parametrize("form", sorted(ANCHORS))
def test_the_order_of_the_words_changes_no_bit_and_the_seed_fixes_them(form):
    vectors = torch.randn(60, 5, generator=generator("shuffled words"))
    found = anchors(vectors, 7, 3, form)
    assert found.shape == (7, 5) and found.dtype == torch.float32
    for turn in range(3):
        order = torch.randperm(60, generator=generator("order", turn))
        assert torch.equal(anchors(vectors[order], 7, 3, form), found)
    if form == "random":
        assert not torch.equal(anchors(vectors, 7, 4, form), found)
        assert all((row == vectors).all(1).any() for row in found)


def threaded() -> str:
    vectors = torch.randn(1500, 24, generator=generator("threads"))
    return digest({"anchors": {form: anchors(vectors, 6, 1, form) for form in ("rescaled", "spherical")}})


def test_anchors_have_the_same_bits_in_a_process_with_another_number_of_threads():
    code = "from models.clip.test_anchors import threaded; print(threaded())"
    env = {**os.environ, "OMP_NUM_THREADS": "3", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout.strip() == threaded()


def test_the_pool_is_no_larger_than_its_distinct_vectors():
    vectors = groups(3, 1, spread=0)
    assert len(anchors(vectors, 2, 0)) == 2
    for size in (0, 3):
        with pytest.raises(ConfigError, match=rf"pool_size is {size} and the vocabulary gives 2 distinct.*at most 2"):
            anchors(vectors, size, 0)
    with pytest.raises(ConfigError, match=r"pool_size is 64 and vocabulary 'classes' gives 6 .*a larger vocabulary"):
        initial_pool(TOWERS, CLIP.words, 64, 0, prompt=torch.zeros(4, 8), words="classes")


def test_k_means_reaches_the_best_of_all_partitions_of_a_few_points():
    rows = torch.randn(7, 2, generator=generator("few points"), dtype=torch.float64)
    weights = torch.tensor([1.0, 2, 1, 3, 1, 1, 2], dtype=torch.float64)

    def spread(labels: Tensor) -> float:
        total = 0.0
        for k in labels.unique():
            part, w = rows[labels == k], weights[labels == k, None]
            total += (w * (part - (w * part).sum(0) / w.sum()).square()).sum().item()
        return total

    all_of_two = [torch.tensor([(code >> i) & 1 for i in range(7)]) for code in range(1, 2**6)]
    assert spread(kmeans(rows, weights, 2, 0)) == pytest.approx(min(map(spread, all_of_two)))


def test_spherical_k_means_reaches_the_best_of_all_partitions_of_a_few_directions():
    rows = torch.randn(7, 3, generator=generator("few directions"), dtype=torch.float64)
    rows = rows * torch.arange(1, 8)[:, None]  # lengths are to have no say
    weights = torch.tensor([1.0, 2, 1, 3, 1, 1, 2], dtype=torch.float64)
    units = torch.nn.functional.normalize(rows, dim=1)

    def cosines(labels: Tensor) -> float:
        sums = [(weights[labels == k, None] * units[labels == k]).sum(0).norm().item() for k in labels.unique()]
        return sum(sums)

    all_of_two = [torch.tensor([(code >> i) & 1 for i in range(7)]) for code in range(1, 2**6)]
    found = spherical_kmeans(rows, weights, 2, 0)
    assert cosines(found) == pytest.approx(max(map(cosines, all_of_two)))


def test_spherical_clusters_are_none_empty_even_where_directions_repeat():
    rows = torch.cat([torch.eye(3) * factor for factor in (1.0, 2.0, 3.0)])
    labels = spherical_kmeans(rows, torch.ones(9), 5, 0)
    assert labels.unique().tolist() == [0, 1, 2, 3, 4]
    found = anchors(rows, 5, 0, "spherical")
    torch.testing.assert_close(found.norm(dim=1), found.sum(1))  # still along the axes
    assert found.isfinite().all()


def test_a_prompt_of_the_pool_is_a_photo_of_its_anchor_or_copies_of_it():
    found = anchors(groups(2, 3), 2, 0)
    found = torch.cat([found, found[:, :2]], 1)  # the text tower's width is 8
    pool = prompt_pool(TOWERS, found)
    assert pool.shape == (2, 4, 8)
    a, photo, of = (TABLE[tokenizer().encode(word)[0]] for word in ("a", "photo", "of"))
    for prompt, anchor in zip(pool, found, strict=True):
        torch.testing.assert_close(prompt, torch.stack([a, photo, of, anchor]), rtol=0, atol=0)
    copies = prompt_pool(TOWERS, found, "copies")
    assert copies.shape == (2, 16, 8) and all(torch.equal(copies[:, i], found) for i in range(16))


def test_the_pool_of_the_public_codes_fallback_stays_near_the_prompt():
    prompt = torch.randn(4, 8, generator=generator("prompt"))
    pool = noisy_pool(prompt, 200, 0)
    assert pool.shape == (200, 4, 8) and len(pool.unique(dim=0)) == 200
    assert (pool - prompt).std().item() == pytest.approx(0.02, rel=0.05)


def test_the_initial_pool_joins_the_parts_that_are_named():
    given = {"prompt": torch.zeros(4, 8), "words": "classes"}
    pool = initial_pool(TOWERS, CLIP.words, 3, 0, **given, vectors="unit", form="raw", layout="copies")
    found = anchors(word_vectors(TOWERS, CLIP.words, "unit"), 3, 0, "raw")
    assert torch.equal(pool, prompt_pool(TOWERS, found, "copies"))
    noise = initial_pool(TOWERS, CLIP.words, 3, 0, **given, form="noise")
    assert noise.shape == (3, 4, 8) and 0 < noise.abs().max() < 0.2
    sizes = {name: initial_pool(TOWERS, CLIP.words, 6, 0, **given, form=name).shape for name in ANCHORS}
    assert set(sizes.values()) == {torch.Size([6, 4, 8])}


def test_imagenets_names_make_64_anchors():
    pool = initial_pool(TOWERS, WORDS, 64, 0, prompt=torch.zeros(4, 8))
    assert pool.shape == (64, 4, 8) and len(pool.unique(dim=0)) == 64
