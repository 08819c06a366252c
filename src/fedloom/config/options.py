"""Options of a method: a schema derived from the signature of its factory."""

from __future__ import annotations

import difflib
import inspect
import json
import typing
import warnings
from collections.abc import Mapping
from dataclasses import is_dataclass
from functools import partial
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, create_model
from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError
from pydantic_core import PydanticSerializationError

from fedloom.config.values import LARGEST
from fedloom.config.words import explain, shorten, shown
from fedloom.core.errors import ConfigError, unknown

RESERVED = ("name", "preset")
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
    for parameter in _parameters(name):
        if parameter.name == INJECTED or parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        if parameter.name in RESERVED:
            raise ConfigError(
                f"method '{name}' has a parameter '{parameter.name}', which is a key of the section itself; rename it"
            )
        hint = hints.get(parameter.name, _kind_of(parameter.default))
        required = parameter.default is parameter.empty
        if _expressible(hint, parameter.default):
            _check_default(name, parameter, hint)
            fields[parameter.name] = (hint, ... if required else parameter.default)
        elif required:
            raise ConfigError(f"method '{name}' needs '{parameter.name}' ({hint}), which a configuration cannot give")
    return _model(name, fields)


def _parameters(name: str) -> list[inspect.Parameter]:
    from fedloom.methods import load

    try:
        return list(inspect.signature(load(name)).parameters.values())
    except (TypeError, ValueError) as error:  # functions written in C, say
        raise ConfigError(f"method.name '{name}' has no signature that could be read ({error})") from error


def _model(name: str, fields: Mapping[str, Any]) -> type[BaseModel]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # a field may be called as an attribute of pydantic's models
            return create_model(f"options of {name}", __config__=STRICT, **fields)
    except (NameError, TypeError, ValueError, PydanticUserError) as error:
        raise ConfigError(f"method '{name}': a parameter's name cannot be an option ({error}); rename it") from error


def _kind_of(default: Any) -> Any:
    """The type of a parameter without annotation: that of a collection that JSON does not know, else any."""
    return type(default) if isinstance(default, tuple | set | frozenset) else Any


def _check_default(name: str, parameter: inspect.Parameter, hint: Any) -> None:
    if parameter.default is parameter.empty or parameter.default is None:
        return
    try:
        TypeAdapter(hint, config=None if _is_model(hint) else STRICT).validate_python(parameter.default)
    except ValidationError as error:
        reason = error.errors(include_url=False)[0]["msg"]
        raise ConfigError(
            f"method '{name}': the default of '{parameter.name}' is {shown(parameter.default)}, which its type "
            f"refuses ({reason}); correct the default or the type"
        ) from None


def _is_model(hint: Any) -> bool:
    return inspect.isclass(hint) and (issubclass(hint, BaseModel) or is_dataclass(hint))


def takes_local(name: str) -> bool:
    """Whether the factory wants the training loop."""
    return any(p.name == INJECTED or p.kind is p.VAR_KEYWORD for p in _parameters(name))


def complete(section: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in a `method` section: name, preset, then every option (explicit over preset over default).

    Raises `ConfigError` for an unknown method, preset or option and for a value out of range.
    """
    from fedloom.methods import presets

    given = dict(section)
    name, preset = given.pop("name", "fedavg"), given.pop("preset", "paper")
    if not isinstance(name, str) or not name:
        raise ConfigError(f"method.name must be the name of a method, got {shown(name)}")
    if len(name) > 255:
        raise ConfigError(f"method.name '{shorten(name)}' is too long for a name; give one of up to 255 characters")
    model = schema(name)
    known = presets(name)
    if not isinstance(preset, str) or preset not in known:
        raise ConfigError(unknown(f"preset of {name}", shorten(str(preset)), known))
    try:
        filled = model.model_validate_json(json.dumps({**known[preset], **given}, default=plain))
    except ValidationError as error:
        raise _of_other_methods(error, model, name) or explain(error, model, "method", f"option of {name}") from None
    options = filled.model_dump(mode="json")
    # Sets in sorted order: their own differs from process to process, and the hash of a run with it.
    options |= {key: sorted(options[key], key=repr) for key, value in filled if isinstance(value, set | frozenset)}
    _check_size(options, "method")
    return {"name": name, "preset": preset, **options}


def _check_size(value: Any, path: str) -> None:
    """Raise `ConfigError` for a number that no method can work with: 32-bit training overflows, counts fill memory."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _check_size(inner, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for inner in value:
            _check_size(inner, path)
    elif isinstance(value, int | float) and abs(value) > LARGEST:
        raise ConfigError(f"{path} must be in [-{LARGEST:g}, {LARGEST:g}], got {shown(value)}")


def _of_other_methods(error: ValidationError, model: type[BaseModel], name: str) -> ConfigError | None:
    """For an option that this method lacks and others have: which ones."""
    from fedloom.methods import names

    first = error.errors(include_url=False)[0]
    option = str(first["loc"][0]) if first["loc"] else ""
    if first["type"] != "extra_forbidden" or difflib.get_close_matches(option, model.model_fields, cutoff=0.75):
        return None
    others = [other for other in names() if other != name and option in schema(other).model_fields]
    if not others:
        return None
    known = ", ".join(sorted(model.model_fields)) or "none"
    return ConfigError(
        f"unknown option of {name} 'method.{option}': it is an option of {', '.join(others)}. Known here: {known}."
    )


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
    target = factory.func if isinstance(factory, partial) else factory
    if inspect.isclass(target):
        target = target.__init__
    elif not hasattr(target, "__annotations__"):
        target = type(target).__call__
    try:
        return typing.get_type_hints(target, include_extras=True)
    except Exception as error:  # annotations are code of the user
        raise ConfigError(f"method '{name}': a type in its signature cannot be resolved ({error})") from error


def _expressible(hint: Any, default: Any) -> bool:
    """Whether plain values can give the type, and the default if there is one."""
    try:
        adapter = TypeAdapter(hint)
        if default is not inspect.Parameter.empty:
            adapter.dump_json(default, warnings=False)
    except (PydanticSchemaGenerationError, PydanticSerializationError, PydanticUserError):
        return False
    return True
