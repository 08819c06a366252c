"""Options of language models, checked against the signature of what builds them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from inspect import signature
from typing import Any, get_args, get_type_hints

from fedloom.core.errors import ConfigError, unknown


def checked(model: str, options: Mapping[str, Any], build: Callable[..., Any]) -> dict[str, Any]:
    """The options as `build` takes them by keyword: mappings become the dataclasses that its hints name.

    Raises `ConfigError` in one sentence for an unknown option, a value of another type or one beyond the bounds.
    """
    hints = get_type_hints(build, include_extras=True)
    known = [
        name for name, parameter in signature(build).parameters.items() if parameter.kind == parameter.KEYWORD_ONLY
    ]
    for name in options:
        if name not in known:
            raise ConfigError(unknown(f"option of model {model}", name, known))
    return {name: _value(f"model.options.{name}", model, value, hints[name]) for name, value in options.items()}


def _value(dotted: str, model: str, value: Any, hint: Any) -> Any:
    from pydantic import ConfigDict, TypeAdapter, ValidationError

    group = next((kind for kind in (hint, *get_args(hint)) if isinstance(kind, type) and is_dataclass(kind)), None)
    if group is not None and value is not None:
        return _group(dotted, model, value, group)
    try:
        # tuples stand for lists: the options of a network are hashable
        return TypeAdapter(hint, config=ConfigDict(allow_inf_nan=False)).validate_python(
            value, strict=not isinstance(value, list | tuple)
        )
    except ValidationError as error:
        reason = error.errors()[0]["msg"]
        raise ConfigError(f"{dotted} of {model}: {reason[:1].lower()}{reason[1:]}, got {repr(value)[:60]}") from error


def _group(dotted: str, model: str, value: Any, kind: Any) -> Any:
    """A dataclass from a mapping, or from the pairs that stand for one."""
    pairs = value.items() if isinstance(value, Mapping) else value
    if not isinstance(value, Mapping | tuple) or any(not isinstance(p, tuple) or len(p) != 2 for p in pairs):
        raise ConfigError(f"{dotted} of {model} must be a mapping of options or null, got {repr(value)[:60]}")
    hints = get_type_hints(kind, include_extras=True)
    given = dict(pairs)
    for name in given:
        if name not in hints:
            raise ConfigError(unknown(f"option of {dotted}", name, hints))
    return kind(**{name: _value(f"{dotted}.{name}", model, v, hints[name]) for name, v in given.items()})
