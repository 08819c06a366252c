"""Concept anchors: words of a vocabulary, clustered in the text tower's embedding space, start a pool of prompts.

Source: Guo, Chen and Cui, "Fed-Duet: Dual Expert-Orchestrated Framework for Continual Federated Vision-Language
Learning" (ICLR 2026). Words w with vectors e_w [d_t] -> K centroids c_k of k-means -> prompt k = [a, photo, of, c_k].
Decisions where the paper is silent: the words are ImageNet's class names; e_w is the mean over the name's own tokens;
k-means++ with ten starts of at most 300 steps; c_k gets the mean length of its members, since a mean of vectors that
point apart is shorter than any of them and no token looks like it.

Every table here holds the alternatives of one of these decisions. The result depends on the set of words, not on their
order, and has the same bits in every process of a machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.core.errors import ConfigError, pick, unknown
from fedloom.core.seeds import generator, seed_for
from fedloom.models.clip.packages import open_clip
from fedloom.models.clip.towers import Towers
from fedloom.models.clip.words import encoded, tokenizer

STARTS, STEPS = 10, 300  # of k-means
PADDED = 16  # positions that the public code takes the mean of
NOISE = 0.02
FILE = "file:"


def imagenet_names(classes: Sequence[str]) -> Sequence[str]:
    """open_clip's 1,000 names of ImageNet's classes, of which 998 are distinct."""
    names: Sequence[str] = open_clip().IMAGENET_CLASSNAMES
    return names


def torchvision_names(classes: Sequence[str]) -> Sequence[str]:
    """torchvision's 1,000 names of ImageNet's classes."""
    from torchvision.models import ResNet18_Weights

    names: Sequence[str] = ResNet18_Weights.IMAGENET1K_V1.meta["categories"]
    return names


def whole_words(classes: Sequence[str] = ()) -> Sequence[str]:
    """The 32,230 words of three letters or more that are one token of CLIP's vocabulary, most frequent first."""
    whole = (token.removesuffix("</w>") for token in tokenizer().encoder if token.endswith("</w>"))
    return [word for word in whole if len(word) >= 3 and word.isascii() and word.isalpha()]


def own_words(classes: Sequence[str]) -> Sequence[str]:
    """Those of the data's classes."""
    return classes


Vocabulary = Callable[[Sequence[str]], Sequence[str]]
VOCABULARIES: dict[str, Vocabulary] = {
    "imagenet": imagenet_names,
    "torchvision": torchvision_names,
    "vocabulary": whole_words,
    "classes": own_words,
}


def vocabulary(name: str, classes: Sequence[str]) -> tuple[str, ...]:
    """Distinct words in order: those of a vocabulary by name, or of a file with one word per line, `file:PATH`.

    classes: words of the data's classes. Raises `ConfigError` for an unknown name and an unreadable or empty file.
    """
    if name.startswith(FILE):
        return tuple(dict.fromkeys(_lines(name.removeprefix(FILE))))
    if name not in VOCABULARIES:
        raise ConfigError(unknown("vocabulary", name, (*VOCABULARIES, f"{FILE}PATH")))
    return tuple(dict.fromkeys(VOCABULARIES[name](classes)))


def _lines(path: str) -> list[str]:
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8-sig")
    except (OSError, ValueError, RuntimeError) as error:  # also a null byte, bytes that are no text, no such home
        raise ConfigError(
            f"vocabulary {FILE}{path} cannot be read ({error}); give a text file with one word per line"
        ) from error
    if not (found := [line.strip() for line in text.splitlines() if line.strip()]):
        raise ConfigError(f"vocabulary {FILE}{path} is empty; write one word per line into it")
    return found


Vectors = Callable[[Tensor, Sequence[list[int]]], Tensor]


def content_mean(table: Tensor, ids: Sequence[list[int]]) -> Tensor:
    """Mean embedding [W, d_t] over the tokens of every word alone."""
    return torch.stack([table[word].mean(0) for word in ids])


def padded_mean(table: Tensor, ids: Sequence[list[int]]) -> Tensor:
    """Mean [W, d_t] over the 16 positions behind SOT, those of EOT and of padding among them, as in the public code."""
    eot = tokenizer().eot_token_id
    return content_mean(table, [[*word, eot, *[0] * PADDED][:PADDED] for word in ids])


def single_tokens(table: Tensor, ids: Sequence[list[int]]) -> Tensor:
    """Embeddings [W', d_t] of the words that are one token; `ConfigError` where none is."""
    if not (found := [word for word in ids if len(word) == 1]):
        raise ConfigError("word_vectors 'single' takes words of one token and the vocabulary has none; use 'content'")
    return content_mean(table, found)


def unit_mean(table: Tensor, ids: Sequence[list[int]]) -> Tensor:
    """`content_mean`, each scaled to length 1."""
    return torch.nn.functional.normalize(content_mean(table, ids), dim=1)


VECTORS: dict[str, Vectors] = {
    "content": content_mean,
    "padded": padded_mean,
    "single": single_tokens,
    "unit": unit_mean,
}


def word_vectors(towers: Towers, words: Sequence[str], form: str = "content") -> Tensor:
    """Vectors [W, d_t] of words by their token embeddings, on the CPU in fp32; `single` gives fewer than words.

    form: see `VECTORS`. Raises `ConfigError` for a word without tokens.
    """
    ids = [encoded(word) for word in words]
    for word, found in zip(words, ids, strict=True):
        if not found:
            raise ConfigError(f"the vocabulary's word {word!r} has no tokens; take it out")
    return pick("word_vectors", form, VECTORS)(_table(towers), ids)


def _table(towers: Towers) -> Tensor:
    table: Tensor = towers.model.token_embedding.weight
    return table.detach().float().cpu()


# (distinct rows [M, d_t] in ascending order, float64; how often each occurs [M]; K; seed) -> K vectors
Choose = Callable[[Tensor, Tensor, int, int], Tensor]


def raw_centroids(rows: Tensor, counts: Tensor, size: int, seed: int) -> Tensor:
    """Means of the clusters of `kmeans`, the largest cluster first."""
    return _means(rows, counts, kmeans(rows, counts, size, seed), size)[0]


def rescaled_centroids(rows: Tensor, counts: Tensor, size: int, seed: int) -> Tensor:
    """The same, each scaled to the mean length of its members."""
    return _lengthened(*_means(rows, counts, kmeans(rows, counts, size, seed), size))


def spherical_centroids(rows: Tensor, counts: Tensor, size: int, seed: int) -> Tensor:
    """Mean directions of the clusters of `spherical_kmeans`, each scaled to the mean length of its members."""
    return _lengthened(*_means(rows, counts, spherical_kmeans(rows, counts, size, seed), size, unit=True))


def random_words(rows: Tensor, counts: Tensor, size: int, seed: int) -> Tensor:
    """Some of the vectors, in ascending order."""
    drawn = torch.randperm(len(rows), generator=generator(seed, "random words"))[:size]
    return rows[drawn.sort().values]


ANCHORS: dict[str, Choose] = {
    "rescaled": rescaled_centroids,
    "raw": raw_centroids,
    "spherical": spherical_centroids,
    "random": random_words,
}


def anchors(vectors: Tensor, size: int, seed: int, form: str = "rescaled", source: str = "the vocabulary") -> Tensor:
    """K = `size` anchors [K, d_t], fp32, from word vectors [W, d_t]: largest cluster first, then in ascending order.

    form: see `ANCHORS`. source: what the sentence of an error calls the words. Raises `ConfigError` unless K is between
    1 and the number of distinct vectors.
    """
    rows, counts = torch.unique(vectors.double(), dim=0, return_counts=True)
    if not 1 <= size <= len(rows):
        raise ConfigError(
            f"pool_size is {size} and {source} gives {len(rows)} distinct word vectors; set pool_size to at least 1 "
            f"and at most {len(rows)}, or take a larger vocabulary"
        )
    return pick("anchors", form, ANCHORS)(rows, counts, size, seed).float()


def kmeans(rows: Tensor, weights: Tensor, size: int, seed: int) -> Tensor:
    """Cluster ids int64 [M] of rows [M, d] that count by weights [M]; k-means++, ten starts, empty clusters re-seeded.

    One thread: the sums of several come in any order, and so do the last bits. Raises `ConvergenceWarning` of
    scikit-learn for fewer than `size` distinct rows.
    """
    from sklearn.cluster import KMeans
    from threadpoolctl import threadpool_limits

    with threadpool_limits(1):
        model = KMeans(size, init="k-means++", n_init=STARTS, max_iter=STEPS, random_state=_short(seed))
        found = model.fit(rows.double().numpy(), sample_weight=weights.double().numpy())
    return torch.from_numpy(found.labels_).long()


def spherical_kmeans(rows: Tensor, weights: Tensor, size: int, seed: int) -> Tensor:
    """The same for directions: a row belongs to the centre of largest cosine, a centre is its members' mean direction.

    Source: Dhillon and Modha, "Concept decompositions for large sparse text data using clustering" (Machine Learning
    2001), section 3.
    """
    from sklearn.cluster import kmeans_plusplus
    from threadpoolctl import threadpool_limits

    units = torch.nn.functional.normalize(rows.double(), dim=1).numpy()
    counts, rng = weights.double().numpy(), np.random.RandomState(_short(seed))
    with threadpool_limits(1):
        starts = [kmeans_plusplus(units, size, sample_weight=counts, random_state=rng)[0] for _ in range(STARTS)]
        fits = [_turned(units, counts, centres) for centres in starts]
    return torch.from_numpy(max(fits, key=lambda fit: fit[0])[1]).long()


def _turned(units: Any, counts: Any, centres: Any) -> tuple[float, Any]:
    """Sum of cosines and labels after Lloyd's steps on the sphere; an empty cluster gets the row that fits worst."""
    labels = None
    for _ in range(STEPS):
        cosines = units @ centres.T
        before, labels = labels, cosines.argmax(1)
        fit = cosines[np.arange(len(units)), labels]
        for empty in np.setdiff1d(np.arange(len(centres)), labels):
            worst = np.where(np.bincount(labels, minlength=len(centres))[labels] > 1, fit, np.inf).argmin()
            labels[worst], fit[worst] = empty, 1.0
        if before is not None and np.array_equal(before, labels):
            break
        sums = np.zeros_like(centres)
        np.add.at(sums, labels, counts[:, None] * units)
        centres = sums / np.maximum(np.linalg.norm(sums, axis=1, keepdims=True), np.finfo(float).tiny)
    return float((counts * fit).sum()), labels


def _short(seed: int) -> int:
    return seed_for(seed, "anchors") % 2**32


def _means(rows: Tensor, counts: Tensor, labels: Tensor, size: int, unit: bool = False) -> tuple[Tensor, Tensor]:
    """Means [K, d] and mean lengths [K] of the clusters' members, in the order of `anchors`; unit: of directions."""
    lengths = torch.linalg.vector_norm(rows, dim=1)
    points = torch.nn.functional.normalize(rows, dim=1) if unit else rows
    sizes = torch.zeros(size).double().index_add_(0, labels, counts.double())
    means = torch.zeros(size, rows.shape[1]).double().index_add_(0, labels, counts[:, None] * points) / sizes[:, None]
    norms = torch.zeros(size).double().index_add_(0, labels, counts * lengths) / sizes
    order = sorted(range(size), key=lambda k: (-sizes[k].item(), means[k].tolist()))
    return means[order], norms[order]


def _lengthened(means: Tensor, norms: Tensor) -> Tensor:
    return torch.nn.functional.normalize(means, dim=1) * norms[:, None]


Layout = Callable[[Tensor, Tensor], Tensor]


def a_photo_of(table: Tensor, found: Tensor) -> Tensor:
    """[K, 4, d_t]: the embeddings of "a", "photo" and "of", then the anchor."""
    template = table[encoded("a photo of")]
    return torch.cat([template.expand(len(found), *template.shape), found[:, None]], 1)


def sixteen_copies(table: Tensor, found: Tensor) -> Tensor:
    """[K, 16, d_t]: the anchor at every position, as in the public code."""
    return found[:, None].repeat(1, PADDED, 1)


LAYOUTS: dict[str, Layout] = {"template": a_photo_of, "copies": sixteen_copies}


def prompt_pool(towers: Towers, found: Tensor, form: str = "template") -> Tensor:
    """Context vectors [K, n, d_t] of prompts, one per anchor [K, d_t]; the class name follows them in a sentence.

    form: see `LAYOUTS`.
    """
    return pick("layout", form, LAYOUTS)(_table(towers), found)


def noisy_pool(prompt: Tensor, size: int, seed: int) -> Tensor:
    """[K, n, d_t]: one prompt [n, d_t] and noise of deviation 0.02, the public code's silent fallback.

    The code takes it where its file of words is not found; such a pool knows no concepts.
    """
    noise = torch.randn(size, *prompt.shape, generator=generator(seed, "noisy pool"))
    return prompt.detach().float().cpu() + NOISE * noise


def initial_pool(
    towers: Towers,
    classes: Sequence[str],
    size: int,
    seed: int,
    *,
    prompt: Tensor,
    words: str = "imagenet",
    vectors: str = "content",
    form: str = "rescaled",
    layout: str = "template",
) -> Tensor:
    """The server's pool [K, n, d_t] before the first round, from names of the parts above.

    classes: words of the data's classes. form: of `ANCHORS`, or "noise" for `noisy_pool` of `prompt` [n, d_t].
    About a second for ImageNet's names, two minutes for all 32,230 whole words in 512 dimensions.
    """
    if form == "noise":
        return noisy_pool(prompt, size, seed)
    known = word_vectors(towers, vocabulary(words, classes), vectors)
    return prompt_pool(towers, anchors(known, size, seed, form, f"vocabulary '{words}'"), layout)
