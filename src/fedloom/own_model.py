"""The user's own network: a module, a factory, or `package.module:factory`."""

from __future__ import annotations

import copy
import hashlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fedloom.core.errors import ConfigError, FedloomError, origin
from fedloom.core.payload import digest
from fedloom.core.seeds import seeded
from fedloom.models.heads import Classifier

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
    `num_classes=` and `input_shape=` where it takes them); its draws are seeded. features: the network is a
    backbone, found out by `own_spec`.
    """

    source: nn.Module | Callable[..., nn.Module]
    num_classes: int
    input_shape: tuple[int, ...]
    seed: int = 0
    features: bool = False
    options: tuple[tuple[str, Any], ...] = ()

    def make(self) -> nn.Module:
        """A new copy of the user's module, the same values each time."""
        if isinstance(self.source, nn.Module):
            return _copied(self.source)
        known = {"num_classes": self.num_classes, "input_shape": self.input_shape}
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
                f"({cause}); arguments besides num_classes and "
                "input_shape come from model.options"
            ) from error
        if not isinstance(module, nn.Module):
            raise ConfigError(f"model: the factory returned a {type(module).__name__}, not a torch module")
        return module

    def backbone(self) -> nn.Module:
        """The user's backbone; `ConfigError` when the network is a classifier."""
        if not self.features:
            raise ConfigError(
                "this method puts heads of its own on a backbone, and the model is a classifier; give the model the "
                "attribute num_features and let it return features [batch, num_features]"
            )
        return _Features(self.make())

    def classifier(self) -> nn.Module:
        """The user's classifier, or a fixed-width linear head on the user's backbone."""
        if not self.features:
            return _with_class_rows(self.make(), self.num_classes)
        body = self.backbone()
        with seeded(self.seed, "head"):
            return Classifier(body, self.num_classes)


def own_spec(source: Any, num_classes: int, input_shape: tuple[int, ...], seed: int, **options: Any) -> OwnSpec:
    """Find out, with one input of zeros, what the user's network is; `ConfigError` says what was expected."""
    if not callable(source):
        raise ConfigError(f"model must be a name, {EXPECTED} or a function that makes one, got {repr(source)[:60]}")
    spec = OwnSpec(source, num_classes, tuple(input_shape), seed, options=tuple(sorted(options.items())))
    module = spec.make().eval()
    _check_parameters(module)
    try:
        with torch.no_grad():
            out = module(torch.zeros(2, *input_shape))
    except Exception as error:  # any failure of the user's forward is told in one sentence
        raise ConfigError(
            f"model: {type(module).__name__} fails on inputs of shape [2, {', '.join(map(str, input_shape))}] "
            f"({type(error).__name__}: {_first_line(error)})"
        ) from error
    out = out["logits"] if isinstance(out, dict) and "logits" in out else out
    shape = tuple(out.shape) if isinstance(out, torch.Tensor) else None
    if shape == (2, getattr(module, "num_features", None)):
        return OwnSpec(source, num_classes, spec.input_shape, seed, True, spec.options)
    if shape == (2, num_classes):
        return spec
    found = f"a tensor of shape {list(shape)}" if shape else f"a {type(out).__name__}"
    raise ConfigError(
        f"model must be {EXPECTED}; for 2 inputs and {num_classes} classes, {type(module).__name__} returned {found}"
    )


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
