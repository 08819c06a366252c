"""Phrases that a text tower learns from: names of classes, words of the vocabulary, and sentences around them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from fedloom.models.clip.packages import open_clip
from fedloom.models.clip.words import tokenizer

# Names sit at different positions in them, so that positions beyond those of a short sentence are learnt as well.
TEMPLATES = (
    "a photo of a {}.",
    "{}",
    "a picture of the {}.",
    "a blurry photo of a {}.",
    "a small photo of one {}.",
    "this is a {}.",
    "there is a {} in the scene.",
    "a bad photo of a {}.",
    "an image that shows a {} from close by.",
    "a {} on a plain background.",
    "a drawing of a {}.",
    "in this old photo, taken from far away, one can see a {} and hardly anything else.",
)
SENTENCE = TEMPLATES[0]  # what the teacher reads


def phrases(names: Sequence[str], words: int) -> list[str]:
    """Distinct phrases in order: the given names, those of ImageNet's classes, whole words of the vocabulary.

    words: how many of the vocabulary's whole words of three letters or more, most frequent first.
    """
    whole = (token.removesuffix("</w>") for token in tokenizer().encoder if token.endswith("</w>"))
    usable = (word for word in whole if len(word) >= 3 and word.isascii() and word.isalpha())
    return list(dict.fromkeys([*names, *open_clip().IMAGENET_CLASSNAMES, *islice(usable, words)]))
