"""The pictures of a recipe, and the words for their classes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedloom.core.errors import ConfigError, DataError
from fedloom.data import load_source
from fedloom.data.source import Source
from fedloom.data.words import class_words
from fedloom.models.clip.words import encoded
from fedloom.pretraining.recipe import Recipe
from fedloom.pretraining.words import TEMPLATES

HELD_OUT = 0.01  # of data without a test part


class Pictures(NamedTuple):
    """x: uint8 [n, 3, H, W]; y: int64 [n]; words: of every class, as they stand in a sentence."""

    name: str
    fingerprint: str
    x: Tensor
    y: Tensor
    words: tuple[str, ...]


def read(recipe: Recipe) -> tuple[Pictures, list[Pictures]]:
    """(training pictures, test pictures of every data set of `zeroshot`), of the size that the image tower sees.

    Raises `DataError` or `ConfigError` for data that are missing, no colour pictures, trained on as a whole and tested
    on nevertheless, or with class names that do not fit into the text tower.
    """
    own = _source(recipe, recipe.data.name, HELD_OUT)
    x, y = own.x_train, own.y_train
    if recipe.data.whole:
        x, y = torch.cat([x, own.x_test]), torch.cat([y, own.y_test])
    tests = []
    for name in recipe.zeroshot:
        source = own if name == recipe.data.name else _source(recipe, name)
        if recipe.data.whole and source.name == own.name:
            raise ConfigError(
                f"zeroshot names '{name[:60]}', which data.whole trains on as a whole; take it away from either"
            )
        tests.append(_pictures(recipe, source, source.x_test, source.y_test))
    return _pictures(recipe, own, x, y), tests


def _source(recipe: Recipe, name: str, fraction: float = 0.2) -> Source:
    size = recipe.model.vision_cfg.image_size
    source = load_source(name, root=recipe.data.root, image_size=size, test_fraction=fraction)
    shape, dtype = tuple(source.x_train.shape[1:]), source.x_train.dtype
    if shape != (3, size, size) or dtype != torch.uint8:
        raise DataError(
            f"data '{name[:60]}' has inputs of shape {list(shape)} and {str(dtype).removeprefix('torch.')}; a CLIP "
            f"learns from 8-bit colour pictures, [3, {size}, {size}]"
        )
    return source


def _pictures(recipe: Recipe, source: Source, x: Tensor, y: Tensor) -> Pictures:
    words = class_words(source.class_names, data=source.name, root=recipe.data.root)
    most = recipe.model.text_cfg.context_length
    for template in TEMPLATES:
        for word in words:
            taken = len(encoded(template.format(word))) + 2
            if taken > most:
                raise ConfigError(
                    f"class name '{word[:60]}' of '{source.name}' in '{template}' takes {taken} tokens; the text tower "
                    f"reads {most}: raise model.text_cfg.context_length"
                )
    return Pictures(source.name, source.fingerprint, x, y, words)
