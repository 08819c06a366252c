"""What `fedloom pretrain-clip` trains: one strict tree from a recipe and from `--set`; all defaults live here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Le
from pydantic import ValidationError

from fedloom.config.layers import Layer, check_keys, check_values, merge, nested, read_yaml
from fedloom.config.values import Count, Fraction, Natural, NonNegative, Pixels, Positive, Section, Seed
from fedloom.config.words import explain, shorten
from fedloom.core.errors import ConfigError, unknown
from fedloom.models.clip.compact import CLIP_SMALL

RECIPES = Path(__file__).parent / "recipes"
VOCABULARY = 49408  # entries of open_clip's tokeniser


class Data(Section):
    """Pictures with classes. name, root: as in `fedloom.config.sections.Data`.

    whole: train on the test part too, for data that come without one; else 1 % of such data is held out.
    """

    name: str
    root: str | None = None
    whole: bool = False


class Vision(Section):
    """The image tower, in open_clip's words. head_width: of one attention head."""

    image_size: Pixels
    patch_size: Pixels
    layers: Count
    width: Count
    head_width: Count


class Texts(Section):
    """The text tower, in open_clip's words."""

    context_length: Count
    vocab_size: Annotated[int, Ge(VOCABULARY), Le(10**6)]
    width: Count
    heads: Count
    layers: Count


class Stem(Section):
    """Convolutions in place of the patch embedding; see `fedloom.models.clip.compact.ConvStem`."""

    widths: tuple[Count, ...]
    blocks: tuple[Natural, ...]


class Architecture(Section):
    """A configuration in open_clip's form. stem: null is open_clip's own patch embedding."""

    embed_dim: Count
    vision_cfg: Vision
    text_cfg: Texts
    stem: Stem | None = None


class TextStage(Section):
    """The text tower's training. words: of the tokeniser's vocabulary, learnt beside the names of classes.

    warmup: steps until the learning rate is reached, from which half a cosine leads to 0.
    """

    steps: Count = 2000
    batch_size: Count = 512
    lr: Positive = 0.002
    weight_decay: NonNegative = 0.01
    words: Natural = 16000
    warmup: Natural = 100


class ImageStage(Section):
    """The image tower's training. scale: of the logits at the start; it is learnt. warmup: as of the text tower.

    cutmix: share of the batches that are mixed. zoom: largest part of a picture's side that an enlargement cuts away.
    """

    epochs: Count = 24
    batch_size: Count = 128
    lr: Positive = 0.001
    weight_decay: NonNegative = 0.05
    label_smoothing: Fraction = 0.05
    scale: Positive = 20.0
    cutmix: Fraction = 0.5
    zoom: Fraction = 0.35
    warmup: Natural = 500


class Recipe(Section):
    """The whole tree. zeroshot: data sets whose test parts the finished model classifies."""

    data: Data
    zeroshot: tuple[str, ...] = ()
    seed: Seed = 0
    model: Architecture
    text: TextStage = TextStage()
    images: ImageStage = ImageStage()

    def as_dict(self) -> dict[str, Any]:
        """The tree as plain JSON values, defaults included; resolving it again gives the same tree."""
        return self.model_dump(mode="json")


def recipe_names() -> list[str]:
    """Names of the package's recipes for pretraining, sorted."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def resolve(recipe: str, *layers: Layer) -> Recipe:
    """The checked tree of a recipe by name or of a YAML file, with layers over it; the last one wins.

    What nobody says of `model` is as in `CLIP_SMALL`. Raises `ConfigError`: one sentence with the dotted key, the
    value and the range.
    """
    merged: dict[str, Any] = {"model": dict(CLIP_SMALL)}
    for layer in (read_yaml(_located(recipe)), *layers):
        check_keys(layer)
        check_values(layer)
        merged = merge(merged, nested(layer))
    try:
        tree = Recipe.model_validate_json(json.dumps(merged, default=str))
    except ValidationError as error:
        raise explain(error, Recipe) from None
    _check_shapes(tree.model)
    return tree


def _located(recipe: str) -> Path:
    if recipe in recipe_names():
        return RECIPES / f"{recipe}.yaml"
    if Path(recipe).suffix not in (".yaml", ".yml"):
        found = unknown("recipe for pretraining", shorten(recipe), recipe_names())
        raise ConfigError(f"{found} A file of your own ends in .yaml.")
    return Path(recipe)


def _check_shapes(model: Architecture) -> None:
    vision, text, stem = model.vision_cfg, model.text_cfg, model.stem
    for whole, size, part, wanted in (
        ("vision_cfg.image_size", vision.image_size, "vision_cfg.patch_size", vision.patch_size),
        ("vision_cfg.width", vision.width, "vision_cfg.head_width", vision.head_width),
        ("text_cfg.width", text.width, "text_cfg.heads", text.heads),
    ):
        if size % wanted:
            raise ConfigError(f"model.{whole} is {size}, which model.{part}, {wanted}, does not divide; change either")
    if stem is not None and len(stem.widths) != len(stem.blocks) + 1:
        raise ConfigError(
            f"model.stem has {len(stem.widths)} widths and {len(stem.blocks)} blocks; give one width more than blocks"
        )
