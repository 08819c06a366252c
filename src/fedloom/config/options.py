"""Options of a method: a schema derived from the signature of its factory."""

from __future__ import annotations

import inspect
import json
import typing
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, create_model
from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError
from pydantic_core import PydanticSerializationError

from fedloom.config.words import explain
from fedloom.core.errors import ConfigError, unknown

INJECTED = "local"  # the parameter that gets the training loop built from the section `training`
STRICT = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())


def schema(name: str) -> type[BaseModel]:
    """A pydantic model with one field per option of the method's factory, constraints included.

    A parameter with a default whose type plain values cannot express (a callable part, say) is left to Python
    and is no option; without a default it is an error that names it.
    """
    from fedloom.methods import load

    factory = load(name)
    if not callable(factory):
        raise ConfigError(f"method.name '{name}' is a {type(factory).__name__}; it must be a function or a class")
    fields: dict[str, Any] = {}
    hints = _hints(factory, name)
    for parameter in inspect.signature(factory).parameters.values():
        if parameter.name == INJECTED or parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        hint = hints.get(parameter.name, Any)
        required = parameter.default is parameter.empty
        if _expressible(hint, parameter.default):
            fields[parameter.name] = (hint, ... if required else parameter.default)
        elif required:
            raise ConfigError(f"method '{name}' needs '{parameter.name}' ({hint}), which a configuration cannot give")
    return create_model(f"options of {name}", __config__=STRICT, **fields)


def takes_local(name: str) -> bool:
    """Whether the factory wants the training loop."""
    from fedloom.methods import load

    return INJECTED in inspect.signature(load(name)).parameters


def complete(section: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in a `method` section: name, preset, then every option (explicit over preset over default).

    Raises `ConfigError` for an unknown method, preset or option and for a value out of range.
    """
    from fedloom.methods import presets

    given = dict(section)
    name, preset = given.pop("name", "fedavg"), given.pop("preset", "paper")
    if not isinstance(name, str) or not name:
        raise ConfigError(f"method.name must be the name of a method, got {name!r}")
    model = schema(name)
    known = presets(name)
    if preset not in known:
        raise ConfigError(unknown(f"preset of {name}", str(preset), known))
    try:
        filled = model.model_validate_json(json.dumps({**known[preset], **given}, default=plain))
    except ValidationError as error:
        raise explain(error, model, "method", f"option of {name}") from None
    return {"name": name, "preset": preset, **filled.model_dump(mode="json")}


def arguments(section: Mapping[str, Any]) -> dict[str, Any]:
    """Typed keyword arguments for the factory from a completed `method` section."""
    model = schema(section["name"])
    given = {k: v for k, v in section.items() if k not in ("name", "preset")}
    typed = model.model_validate_json(json.dumps(given, default=plain))
    return {name: getattr(typed, name) for name in model.model_fields}


def plain(value: Any) -> Any:
    """JSON fallback: NumPy and torch scalars and arrays as plain values, all else as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _hints(factory: Any, name: str) -> dict[str, Any]:
    target = factory.__init__ if inspect.isclass(factory) else factory
    try:
        return typing.get_type_hints(target, include_extras=True)
    except NameError as error:
        raise ConfigError(f"method '{name}': a type in its signature cannot be resolved ({error})") from error


def _expressible(hint: Any, default: Any) -> bool:
    """Whether plain values can give the type, and the default if there is one."""
    try:
        adapter = TypeAdapter(hint)
        if default is not inspect.Parameter.empty:
            adapter.dump_json(default)
    except (PydanticSchemaGenerationError, PydanticSerializationError, PydanticUserError):
        return False
    return True
