"""Backbones by name: feature extractors [batch, ...] -> [batch, num_features].

Every backbone has `num_features`, `memory_format` ("contiguous" or "channels_last": the layout that measured
fastest for it) and `set_grad_checkpointing(enable)`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from fedloom.core.errors import ConfigError, unknown
from fedloom.models.clip import named
from fedloom.models.foreign import timm_backbone, torchvision_backbone
from fedloom.models.moe_lm.block import MoEMlp
from fedloom.models.moe_lm.hub import transformers_backbone
from fedloom.models.moe_lm.named import moe_decoder, switch_encoder
from fedloom.models.moe_lm.options import checked
from fedloom.models.moe_lm.text import check_inputs, with_aliases
from fedloom.models.plain import DigitsCnn, Flatten, Mlp, SmallCnn
from fedloom.models.resnet import resnet18, thin
from fedloom.models.weights import load_weights

WIDEST = 65536  # of a layer; the memory of a machine ends near it


@dataclass(frozen=True)
class Entry:
    """build: called with the input shape and the options. about: one line for listings. images: needs [C, H, W].

    text: reads token ids; build is then also called with the size of the vocabulary.
    """

    build: Callable[..., nn.Module]
    about: str
    images: bool = True
    text: bool = False


ENTRIES = {
    "linear": Entry(Flatten, "no hidden layer: the head on the flattened input", images=False),
    "mlp": Entry(Mlp, "fully connected layers with ReLU; option hidden, default [128]", images=False),
    "moe_mlp": Entry(
        MoEMlp,
        "mixture-of-experts layers on vectors, an example is one token; options width, inner, experts, top_k, layers",
        images=False,
    ),
    "switch_encoder": Entry(
        switch_encoder,
        "texts: the encoder of Switch Transformers, small and untrained (extra 'llm'); options hidden, inner, layers, "
        "heads, experts, sparse_step, capacity, dropout, jitter, gate_std, aux, dtype, lora",
        images=False,
        text=True,
    ),
    "moe_decoder": Entry(
        moe_decoder,
        "texts: a causal mixture of experts, small and untrained (extra 'llm'); options architecture, hidden, inner, "
        "layers, heads, experts, top_k, dropout, tied, score, aux, dtype, lora",
        images=False,
        text=True,
    ),
    "small_cnn": Entry(SmallCnn, "two convolutions and a hidden layer, 0.55 M parameters on 3x32x32; option width"),
    "digits_cnn": Entry(DigitsCnn, "two convolutions and a hidden layer for 8x8 grey images; option width"),
    "resnet8": Entry(
        partial(thin, depth=8, groups=None),
        "ResNet-8 for small images, batch normalisation; options stem_stride, width",
    ),
    "resnet8_gn": Entry(
        partial(thin, depth=8), "ResNet-8 with group normalisation; options groups, stem_stride, width"
    ),
    "resnet20": Entry(
        partial(thin, depth=20, groups=None),
        "ResNet-20 for small images, batch normalisation; options stem_stride, width",
    ),
    "resnet20_gn": Entry(
        partial(thin, depth=20), "ResNet-20 with group normalisation; options groups, stem_stride, width"
    ),
    "resnet18": Entry(
        partial(resnet18, groups=None), "ResNet-18, 3x3 stem, batch normalisation; options stem_stride, width"
    ),
    "resnet18_gn": Entry(resnet18, "ResNet-18, 3x3 stem, group normalisation; options groups, stem_stride, width"),
}
ALIASES = {"resnet18_cifar": "resnet18"}
FOREIGN = {"torchvision": torchvision_backbone, "timm": timm_backbone}


def names() -> dict[str, str]:
    """Every name and one line about it."""
    listed = {name: entry.about for name, entry in ENTRIES.items()}
    listed |= {alias: f"another name of {name}" for alias, name in ALIASES.items()}
    listed["transformers/NAME"] = (
        "texts: a model of the hub or a local folder (extra 'llm'), such as transformers/./folder"
    )
    listed |= named.ABOUT
    listed["torchvision/NAME"] = "any classifier of torchvision.models without its last layer, such as resnet18"
    listed["timm/NAME"] = "any backbone of timm (extra 'vision'), such as vit_tiny_patch16_224"
    return listed


def backbone(
    name: str,
    *,
    input_shape: Sequence[int],
    weights: str | None = None,
    vocab_size: int = 0,
    statistics: tuple[Sequence[float], Sequence[float]] = ((), ()),
    **options: Any,
) -> nn.Module:
    """Build a backbone; initial values are drawn from torch's global generator (see `seeds.seeded`).

    input_shape: of one example, [C, H, W] or [d]; of texts [S], of questions with options [2, C, S], with the number of
    token ids as vocab_size (0: no texts). weights: path of a local state dict; for
    torchvision and timm also published ones, for transformers its own or "random", for clip_small and open_clip/NAME
    see `fedloom.models.clip.named.described`. statistics: (mean, std) by which pictures were normalised, which a
    vision-language model undoes. options: those of the network.
    Raises `ConfigError` for anything that does not fit.
    """
    if not input_shape or any(not isinstance(n, int) or n < 1 for n in input_shape):
        raise ConfigError(f"input_shape must hold positive integers, got {list(input_shape)}")
    library, _, rest = str(name).partition("/")
    if library == "transformers" and rest:
        return transformers_backbone(
            rest, input_shape=input_shape, vocab_size=vocab_size, weights=weights, options=options
        )
    if library in FOREIGN and rest:
        _need_images(name, input_shape)
        return FOREIGN[library](rest, input_shape=input_shape, weights=weights, options=options)
    key = ALIASES.get(name, name)
    if key not in ENTRIES and not named.is_clip(name):
        raise ConfigError(unknown("model", str(name)[:60], names()))
    entry, known = ENTRIES.get(key), defaults(key)
    if entry is not None and entry.text:
        return _text_backbone(name, entry, input_shape, vocab_size, weights, options)
    if vocab_size:
        raise ConfigError(f"model {name} cannot read texts; use switch_encoder, moe_decoder or transformers/NAME")
    if entry is None:
        return named.image_tower(name, input_shape=input_shape, statistics=statistics, weights=weights, options=options)
    if entry.images:
        _need_images(name, input_shape)
    for option, value in options.items():
        if option not in known:
            raise ConfigError(unknown(f"option of model {name}", option, known))
        _check_option(name, option, value)
    module = entry.build(input_shape, **options)
    if weights is not None:
        load_weights(module, weights)
    return module


def _text_backbone(
    name: str,
    entry: Entry,
    input_shape: Sequence[int],
    vocab_size: int,
    weights: str | None,
    options: Mapping[str, Any],
) -> nn.Module:
    check_inputs(name, input_shape, vocab_size)
    module = entry.build(tuple(input_shape), vocab_size, **checked(name, options, entry.build))
    if weights is not None:
        load_weights(module, weights, convert=with_aliases)
    return module


def defaults(name: str) -> dict[str, Any]:
    """Options of a backbone and their default values; empty for those of other libraries and of the user."""
    entry = ENTRIES.get(ALIASES.get(name, name))
    if entry is None:
        return dict(named.OPTIONS) if named.is_clip(name) else {}
    fixed = {"input_shape", "vocab_size", *getattr(entry.build, "keywords", {})}
    return {p.name: p.default for p in inspect.signature(entry.build).parameters.values() if p.name not in fixed}


def _check_option(name: str, option: str, value: Any) -> None:
    """Options of these networks are whole numbers, `hidden` a list of them; `groups` may be null."""
    many = option == "hidden" and isinstance(value, list | tuple)
    fits = all(isinstance(v, int) and not isinstance(v, bool) for v in (value if many else [value]))
    if value is None and option == "groups":
        return
    if not fits:
        what = "a list of whole numbers" if option == "hidden" else "a whole number"
        raise ConfigError(f"model.options.{option} of {name} must be {what}, got {repr(value)[:60]}")
    if any(v > WIDEST for v in (value if many else [value])):
        raise ConfigError(f"model.options.{option} of {name} must be at most {WIDEST}, got {repr(value)[:60]}")


def _need_images(name: str, input_shape: Sequence[int]) -> None:
    if len(input_shape) != 3:
        raise ConfigError(
            f"model {name} needs images [C, H, W], got input_shape {list(input_shape)}; use mlp or linear for vectors"
        )
