"""The section `model` and what the data are -> the network of a run."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedloom.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fedloom.config import Config
    from fedloom.core import Method, ModelSpec
    from fedloom.data.source import Source

log = logging.getLogger(__name__)


def default_model(source: Source, method: Method) -> str:
    """The model that `auto` stands for."""
    if method.needs_clip:
        return "clip_small"
    if source.text is not None:
        return "switch_encoder"
    if len(source.input_shape) != 3:
        return "mlp"
    return "digits_cnn" if min(source.input_shape[1:]) < 16 else "small_cnn"


def vocab_size(source: Source) -> int:
    """Number of token ids, 0 where the data are no texts."""
    return 0 if source.text is None else source.text.vocab_size


def own_tokenizer(name: str) -> str | None:
    """What `data.tokenizer` is by default: that of a model of `transformers`, None where the model has none of its own.

    name: `model.name`.
    """
    library, _, rest = name.partition("/")
    if library != "transformers" or not rest:
        return None
    folder = Path(rest).expanduser()
    return rest if not folder.is_dir() or (folder / "tokenizer.json").is_file() else None


def with_words(config: Config, source: Source, method: Method, model: Any = None) -> Config:
    """The configuration with the words of the classes as a list in `model.options.class_words`, where they are needed.

    So every process, and whatever a run leaves, has the same words, whether or not it can read the data. Classes of the
    same words are warned of.
    """
    from fedloom.data.words import class_words
    from fedloom.models.clip.named import is_clip

    name, options = config.model.name, config.model.options
    needed = method.needs_clip and (is_clip(name) or model is not None or ":" in name)
    given = options.get("class_words")
    if not needed and (given is None or not is_clip(name)):
        return config
    words = class_words(source.class_names, given, data=config.data.name, root=config.data.root)
    _warn_of_equals(source.class_names, words)
    changed = config.model.model_copy(update={"options": {**options, "class_words": list(words)}})
    return config.model_copy(update={"model": changed})


def _warn_of_equals(names: Sequence[str], words: Sequence[str]) -> None:
    first: dict[str, str] = {}
    for name, word in zip(names, words, strict=True):
        if (other := first.setdefault(word.lower(), name)) is not name:
            log.warning(
                "classes '%s' and '%s' have the same word '%s', so no text tells them apart; give them different ones "
                "with model.options.class_words",
                other, name, word,
            )  # fmt: skip
            return


def network(
    config: Config,
    num_classes: int,
    input_shape: tuple[int, ...],
    model: Any = None,
    *,
    vocab_size: int = 0,
    statistics: tuple[Sequence[float], Sequence[float]] = ((), ()),
) -> ModelSpec:
    """The network of the section `model`, or the user's own.

    The configuration must be resolved (see `with_words`). vocab_size: of texts, 0 for images and vectors. statistics:
    (mean, std) by which pictures are normalised.
    """
    from fedloom.methods import load_attribute
    from fedloom.models.clip.named import is_clip
    from fedloom.models.spec import NetworkSpec
    from fedloom.own_model import own_spec

    part = config.model
    options, words = dict(part.options), None
    if model is not None or ":" in part.name or is_clip(part.name):
        words = options.pop("class_words", None)
    mean, std = map(tuple, statistics)
    seen: Any = {"words": tuple(words or ()), "mean": mean, "std": std, "repeats": config.data.augment == "none"}
    if model is None and part.name.startswith("object:"):
        raise ConfigError(
            f"model.name '{part.name}' stands for a network that was passed from Python; pass model= again "
            "from Python (`fedloom.load_run(DIR, model=network)`), or name a factory as 'package.module:attribute'"
        )
    if model is None and ":" in part.name:
        model = load_attribute(part.name, "model.name")
    if model is None:
        pairs = tuple(options.items())
        return NetworkSpec(part.name, num_classes, input_shape, config.seed, part.weights, pairs, vocab_size, **seen)
    if part.weights is not None:
        raise ConfigError("model.weights is for models by name; load the weights into the model that you pass")
    found = own_spec(model, num_classes, input_shape, config.seed, vocab_size=vocab_size, **options)
    return replace(found, **seen)
