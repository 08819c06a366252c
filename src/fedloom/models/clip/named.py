"""Vision-language models by name: `clip_small`, and `open_clip/NAME` for any plain CLIP of open_clip's."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from fedloom.core.errors import ConfigError, closest, unknown
from fedloom.models.clip.adopted import Given, ImageTower, clip_of, image_tower_of
from fedloom.models.clip.checkpoint import (
    OPENAI,
    Design,
    design_beside,
    design_of,
    filled,
    model_of,
    weights_file,
)
from fedloom.models.clip.compact import CLIP_SMALL
from fedloom.models.clip.network import Clip
from fedloom.models.clip.packages import open_clip

log = logging.getLogger(__name__)

SMALL, LIBRARY = "clip_small", "open_clip"
OPTIONS: dict[str, Any] = {"class_words": None, "config": None}
SMALL_FILE = Path("examples/clip-small/model.safetensors")
MAKE = "make it with `fedloom pretrain-clip clip-small`"
RANDOM, PUBLISHED = "random", "pretrained:"
ABOUT = {
    SMALL: "CLIP of 7.9 M parameters for 32x32 images (extra 'vision'); `fedloom pretrain-clip clip-small` makes its "
    "weights; options class_words, and config (of random weights)",
    f"{LIBRARY}/NAME": "any plain CLIP of open_clip (extra 'vision'), such as open_clip/ViT-B-16-quickgelu, with a "
    "checkpoint as weights, or open_clip/./folder, of open_clip or a CLIP of transformers; options as of clip_small; "
    "open_clip.list_models() names all",
}


def is_clip(name: str) -> bool:
    """Whether a model's name is that of a vision-language model."""
    library, _, rest = name.partition("/")
    return name == SMALL or (library == LIBRARY and bool(rest))


@dataclass(frozen=True)
class Described:
    """A model before it is built. file: of its weights, None for random ones."""

    name: str
    design: Design
    file: Path | None

    def module(self) -> nn.Module:
        """The model; random values come from torch's global generator."""
        made = model_of(self.design, self.name)
        if self.file is not None:
            filled(made, self.file, self.design, self.name)
        return made


def described(name: str, weights: str | None, options: Mapping[str, Any]) -> Described:
    """What a name, `model.weights` and `model.options` mean.

    weights: the path of a file or folder, see `fedloom.models.clip.checkpoint`; "random"; "pretrained:TAG" for those
    that open_clip publishes; None for those of clip_small, or of the folder that the name is. options: `config`, the
    content of an `open_clip_config.json` that random weights are for; `class_words`, which is for the data.
    Raises `ConfigError` for what is unknown, missing or does not go together.
    """
    for option in options:
        if option not in OPTIONS:
            raise ConfigError(unknown(f"option of model {name}", option, OPTIONS))
    config = options.get("config")
    if config is not None and weights != RANDOM:
        raise ConfigError(
            f"model.options.config of {name} is for model.weights random; with weights, the file beside them says it"
        )
    if config is not None:
        return Described(name, design_of(_thawed(config), "model.options.config"), None)
    return _small(weights) if name == SMALL else _library(name, weights)


def _small(weights: str | None) -> Described:
    if weights == RANDOM:
        return Described(SMALL, Design(CLIP_SMALL), None)
    if weights is None:
        file = next((place for place in _places() if place.is_file()), None)
        if file is None:
            shown = " and ".join(f"'{place}'" for place in _places())
            raise ConfigError(
                f"model clip_small has no weights: there is no {shown}; name the file with model.weights (it lies in "
                f"{SMALL_FILE.parent} of FedLoom's source repository), or {MAKE}"
            )
    else:
        file = weights_file(Path(weights).expanduser(), f"{MAKE}, or name another")
    design = design_beside(file)
    if design is None:
        raise ConfigError(
            f"model.weights: there is no open_clip_config.json beside '{file}', which tells the architecture; {MAKE}"
        )
    return Described(SMALL, design, file)


def _places() -> list[Path]:
    """Where the weights of clip_small are looked for: the working directory, then the source checkout."""
    source = Path(__file__).parents[3]
    places = [Path.cwd() / SMALL_FILE, *([source.parent / SMALL_FILE] if source.name == "src" else [])]
    return list(dict.fromkeys(places))


def _library(name: str, weights: str | None) -> Described:
    rest = name.partition("/")[2]
    folder = Path(rest).expanduser()
    if folder.is_dir():
        design = design_beside(folder)
        if design is None:
            raise ConfigError(
                f"model.name {name}: the folder holds neither open_clip_config.json nor config.json of a CLIPModel"
            )
        if weights is None:
            return Described(name, design, weights_file(folder, "put the weights there, or set model.weights"))
    else:
        config = open_clip().get_model_config(rest)
        if config is None:
            hint = closest(rest, open_clip().list_models())
            raise ConfigError(
                f"unknown open_clip model '{rest[:60]}'.{hint} open_clip.list_models() names all of them."
            )
        design = Design(config)
    if weights == RANDOM:
        return Described(name, design, None)
    if weights is None:
        raise ConfigError(
            f"model {name} needs model.weights: the path of a checkpoint, pretrained:TAG for one that open_clip "
            "publishes, or random"
        )
    if weights.startswith(PUBLISHED):
        return _published(name, rest, design, weights.removeprefix(PUBLISHED))
    file = weights_file(Path(weights).expanduser(), "give the path of a checkpoint")
    beside = design_beside(file)
    return Described(name, Design(design.architecture, beside.statistics) if beside else design, file)


def _published(name: str, rest: str, design: Design, tag: str) -> Described:
    """The weights of a tag, from open_clip's cache or by download."""
    library = open_clip()
    found = library.get_pretrained_cfg(rest, tag)
    if not found and not library.list_pretrained_tags_by_model(rest):
        raise ConfigError(
            f"model.weights: open_clip publishes no weights of {name}, so '{PUBLISHED}{tag[:60]}' is none; give the "
            "path of a local checkpoint"
        )
    if not found:
        raise ConfigError(unknown(f"tag of {name}", tag[:60], library.list_pretrained_tags_by_model(rest)))
    architecture = {**design.architecture, "quick_gelu": bool(found.get("quick_gelu"))}
    log.warning("taking the published weights %s of %s from the hub or the cache", tag, name)
    try:
        file = Path(library.download_pretrained(found))
    except Exception as error:  # of the network and the hub's client, each with errors of its own
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"model.weights: '{PUBLISHED}{tag}' of {name} cannot be had ({type(error).__name__}: {reason}); give the "
            "path of a local checkpoint"
        ) from error
    return Described(name, Design(architecture, (found.get("mean", OPENAI[0]), found.get("std", OPENAI[1]))), file)


def _thawed(value: Any) -> Any:
    """A mapping from the pairs that stand for it in a hashable value."""
    if isinstance(value, Mapping):
        return {key: _thawed(v) for key, v in value.items()}
    if not isinstance(value, tuple | list):
        return value
    pairs = value and all(isinstance(v, tuple) and len(v) == 2 and isinstance(v[0], str) for v in value)
    return {key: _thawed(v) for key, v in value} if pairs else [_thawed(v) for v in value]


def self_contained(name: str, weights: str | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of the same network with weights random: what a file that holds all of its tensors must say."""
    return {**options, "config": described(name, weights, options).design.config()}


def clip(
    name: str,
    *,
    input_shape: Sequence[int],
    words: Sequence[str],
    statistics: Given,
    weights: str | None,
    options: Mapping[str, Any],
    seed: int,
    repeats: bool,
) -> Clip:
    """The frozen towers of a model by name with what the data say; random values come from torch's global generator.

    input_shape: of one picture. words: of the classes. statistics: (mean, std) by which the pictures were normalised.
    weights, options: see `described`. seed, repeats: see `Clip`. Raises `ConfigError` for whatever does not fit.
    """
    if not is_clip(name):
        raise ConfigError(
            f"this method needs a vision-language model, and model {name} is none; set model.name to clip_small, "
            "open_clip/NAME or, for a folder with weights of open_clip or a CLIP of transformers, open_clip/./FOLDER"
        )
    found = described(name, weights, options)
    return clip_of(
        found.module(), found.design.statistics, name, input_shape=input_shape, words=words, statistics=statistics,
        seed=seed, repeats=repeats,
    )  # fmt: skip


def image_tower(
    name: str,
    *,
    input_shape: Sequence[int],
    statistics: Given,
    weights: str | None,
    options: Mapping[str, Any],
) -> ImageTower:
    """The image tower of a model by name, to be trained. Arguments and errors as of `clip`."""
    found = described(name, weights, options)
    return image_tower_of(found.module(), found.design.statistics, input_shape, statistics, name)
