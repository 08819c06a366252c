"""The user's own network: a module, a factory, or `package.module:factory`."""

from __future__ import annotations

import copy
import hashlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fedloom.core.batches import Inputs
from fedloom.core.errors import ConfigError, FedloomError, origin
from fedloom.core.moe import MoELayer, moe_layers
from fedloom.core.payload import digest
from fedloom.core.seeds import seeded
from fedloom.data.text import PrepareText
from fedloom.models.clip.adopted import checked_clip, clip_of, image_tower_of, is_clip_model
from fedloom.models.clip.network import Clip
from fedloom.models.headed import headed
from fedloom.models.moe_lm.hub import adopted
from fedloom.models.moe_lm.routed import routed
from fedloom.models.moe_lm.text import TextBackbone

EXPECTED = (
    "a classifier (module(x) gives logits [batch, classes]) or a backbone (it has the attribute num_features and "
    "module(x) gives features [batch, num_features])"
)


class _Features(nn.Module):
    """The user's backbone with the attributes that the library's own ones have."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner, self.num_features = inner, int(inner.num_features)
        self.memory_format = getattr(inner, "memory_format", "contiguous")

    @property
    def moe_layers(self) -> tuple[MoELayer, ...]:
        return moe_layers(self.inner, "inner.")

    def forward(self, x: Any) -> torch.Tensor:
        return self.inner(x)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        switch = getattr(self.inner, "set_grad_checkpointing", None)
        if switch is None:
            raise ConfigError(
                f"training.grad_checkpointing needs {type(self.inner).__name__}.set_grad_checkpointing; set it to false"
            )
        switch(enable)


@dataclass(frozen=True)
class OwnSpec:
    """Implements `fedloom.core.method.ModelSpec` for a network that the user wrote.

    source: a module, whose values are the initial ones, or a function that makes one (called with
    `num_classes=`, `input_shape=` and `vocab_size=` where it takes them); its draws are seeded. features: the network
    is a backbone, found out by `own_spec`. vocab_size: of texts, else 0. A model of `transformers` is a backbone for
    texts, whatever its head (see `fedloom.models.moe_lm.hub.adopted`). A model of open_clip's class `CLIP` is a
    vision-language model, and its image tower a backbone; words, mean, std, repeats: see `NetworkSpec`.
    """

    source: nn.Module | Callable[..., nn.Module]
    num_classes: int
    input_shape: tuple[int, ...]
    seed: int = 0
    features: bool = False
    options: tuple[tuple[str, Any], ...] = ()
    vocab_size: int = 0
    words: tuple[str, ...] = ()
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    repeats: bool = True

    def make(self) -> nn.Module:
        """A new copy of the user's module, the same values each time."""
        if isinstance(self.source, nn.Module):
            return adopted(_copied(self.source), self.input_shape, self.vocab_size)
        known = {"num_classes": self.num_classes, "input_shape": self.input_shape, "vocab_size": self.vocab_size}
        given = {k: v for k, v in known.items() if k in _takes(self.source)} | dict(self.options)
        try:
            with seeded(self.seed, "backbone"):
                module = self.source(**given)
        except FedloomError:
            raise
        except Exception as error:  # a factory is code of the user
            cause = f"{type(error).__name__}: {_first_line(error)} {origin(error, own=False)}".strip()
            raise ConfigError(
                f"model: the factory {_name(self.source)} fails when called with {', '.join(given) or 'nothing'} "
                f"({cause}); arguments besides num_classes, "
                "input_shape and vocab_size come from model.options"
            ) from error
        if not isinstance(module, nn.Module):
            raise ConfigError(f"model: the factory returned a {type(module).__name__}, not a torch module")
        return adopted(module, self.input_shape, self.vocab_size)

    def backbone(self) -> nn.Module:
        """The user's backbone; `ConfigError` when the network is a classifier."""
        if not self.features:
            raise ConfigError(
                "this method puts heads of its own on a backbone, and the model is a classifier; give the model the "
                "attribute num_features and let it return features [batch, num_features]"
            )
        module = self.make()
        if is_clip_model(module):
            return image_tower_of(*checked_clip(module), self.input_shape, (self.mean, self.std))
        return module if isinstance(module, TextBackbone) else _Features(module)

    def classifier(self) -> nn.Module:
        """The user's classifier, or a fixed-width linear head on the user's backbone."""
        if not self.features:
            made = _with_class_rows(self.make(), self.num_classes)
            return routed(made) if moe_layers(made) else made
        return headed(self.backbone(), self.num_classes, self.input_shape, self.seed)

    def clip(self) -> Clip:
        """Frozen towers around the user's model of open_clip's class `CLIP`; `ConfigError` for another."""
        module = self.make()
        if not is_clip_model(module):
            raise ConfigError(
                f"this method needs a vision-language model, and {type(module).__name__} is none; pass one of "
                "open_clip's class CLIP, or set model.name to clip_small or open_clip/NAME"
            )
        return clip_of(
            *checked_clip(module),
            input_shape=self.input_shape,
            words=self.words,
            statistics=(self.mean, self.std),
            seed=self.seed,
            repeats=self.repeats,
        )


def own_spec(
    source: Any, num_classes: int, input_shape: tuple[int, ...], seed: int, *, vocab_size: int = 0, **options: Any
) -> OwnSpec:
    """Find out, with inputs of zeros, what the user's network is; `ConfigError` says what was expected.

    vocab_size: number of token ids where inputs are texts, which the network gets as the mapping of
    `fedloom.data.text.PrepareText`; 0 for images and vectors.
    """
    if not callable(source):
        raise ConfigError(f"model must be a name, {EXPECTED} or a function that makes one, got {repr(source)[:60]}")
    given = tuple(sorted(options.items()))
    spec = OwnSpec(source, num_classes, tuple(input_shape), seed, options=given, vocab_size=vocab_size)
    module = spec.make().eval()
    if is_clip_model(module):
        return replace(spec, features=True)
    _check_parameters(module)
    if isinstance(module, TextBackbone):
        return replace(spec, features=True)
    try:
        with torch.no_grad():
            out = module(_zeros(spec))
    except Exception as error:  # any failure of the user's forward is told in one sentence
        what = "texts, a mapping of input_ids and attention_mask," if vocab_size else "inputs"
        raise ConfigError(
            f"model: {type(module).__name__} fails on {what} of shape [2, {', '.join(map(str, input_shape))}] "
            f"({type(error).__name__}: {_first_line(error)})"
        ) from error
    out = out["logits"] if isinstance(out, dict) and "logits" in out else out
    shape = tuple(out.shape) if isinstance(out, torch.Tensor) else None
    if shape == (2, getattr(module, "num_features", None)):
        return replace(spec, features=True)
    if shape == (2, num_classes):
        return spec
    found = f"a tensor of shape {list(shape)}" if shape else f"a {type(out).__name__}"
    raise ConfigError(
        f"model must be {EXPECTED}; for 2 inputs and {num_classes} classes, {type(module).__name__} returned {found}"
    )


def _zeros(spec: OwnSpec) -> Inputs:
    """Two inputs, for texts the token 0 everywhere."""
    if not spec.vocab_size:
        return torch.zeros(2, *spec.input_shape)
    return PrepareText()(torch.zeros(2, *spec.input_shape, dtype=torch.int32))


def _check_parameters(module: nn.Module) -> None:
    name, found = type(module).__name__, list(module.named_parameters())
    lazy = next((n for n, p in (*found, *module.named_buffers()) if is_lazy(p)), None)
    if lazy is not None:
        raise ConfigError(
            f"model: '{lazy}' of {name} has no values yet (a lazy layer); call the model once on an input, or give "
            "the layer its width"
        )
    odd = next((n for n, p in found if p.is_meta or not p.dtype.is_floating_point), None)
    if odd is not None:
        raise ConfigError(f"model: parameter '{odd}' of {name} holds no floating-point values; give it some")
    if not any(p.requires_grad for _, p in found):
        raise ConfigError(f"model: {name} has no trainable parameter; give it one, or unfreeze some (requires_grad)")


def _copied(module: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(module)
    except Exception as error:  # modules may hold anything
        raise ConfigError(
            f"model: {type(module).__name__} cannot be copied ({type(error).__name__}: {_first_line(error)}); pass a "
            "function that makes it"
        ) from error


def _takes(source: Any) -> Mapping[str, Any]:
    try:
        return inspect.signature(source).parameters
    except (TypeError, ValueError):  # functions written in C have no signature
        return {}


def _name(source: Any) -> str:
    return str(getattr(source, "__qualname__", type(source).__name__))


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:200]


def identity(source: Any) -> str:
    """A name for the record and the hash: class or function, and a digest of a module's initial values."""
    if isinstance(source, nn.Module):
        if not is_clip_model(source):
            _check_parameters(source)
        values = digest({"state": {k: v for k, v in source.state_dict().items() if isinstance(v, torch.Tensor)}})
        sha = hashlib.sha256(f"{source!r}{values}".encode()).hexdigest()
        return f"object:{type(source).__name__}-{sha[:16]}"
    return f"object:{getattr(source, '__module__', '')}.{getattr(source, '__qualname__', type(source).__name__)}"


def _with_class_rows(module: nn.Module, num_classes: int) -> nn.Module:
    """Name the rows of the last linear layer of width `num_classes`, unless the module names them itself."""
    if not hasattr(module, "class_rows"):
        heads = [n for n, m in module.named_modules() if isinstance(m, nn.Linear) and m.out_features == num_classes]
        prefix = f"{heads[-1]}." if heads and heads[-1] else ""
        names = {n for n, _ in module.named_parameters()} if heads else set()
        module.class_rows = {f"{prefix}{n}": 0 for n in ("weight", "bias") if f"{prefix}{n}" in names}
    return module
