"""What can be set: every option of a method and every key of the tree, with defaults and allowed values.

Everything is read off the schema, so that what is listed is what is checked.
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel, PlainValidator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined, to_jsonable_python

from fedloom.config.options import schema
from fedloom.config.sections import CHOICES, Config
from fedloom.config.words import models_of, span

REFER = {
    "data.name": "a data set (`fedloom list datasets`), folder:PATH, parquet:PATH or domains:NAME,NAME",
    "model.name": "auto, a model (`fedloom list models`) or package.module:factory",
    "engine.name": "serial",
}
WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): "null"}


class Setting(NamedTuple):
    """A dotted key. default: as YAML, None where a value must be given. allowed: in words."""

    key: str
    default: str | None
    allowed: str


class Group(NamedTuple):
    """Settings that belong together. title: their section, with key and value of the choice that they belong to."""

    title: str
    about: str
    settings: Sequence[Setting]


def method_settings(name: str) -> list[Setting]:
    """The options of a method, without `name` and `preset`."""
    return [_setting(f"method.{key}", field) for key, field in schema(name).model_fields.items()]


def tree_settings() -> list[Group]:
    """Every key of the tree in its order; a section with a choice has one group per choice."""
    plain = {key: field for key, field in Config.model_fields.items() if not models_of(field.annotation)}
    sections = [group for key, field in Config.model_fields.items() for group in _groups((key,), field)]
    top = [_setting(key, field) for key, field in plain.items() if key != "method"]
    method = Setting("method.name", "fedavg", "a method, or package.module:attribute; `fedloom list methods NAME`")
    preset = Setting("method.preset", "paper", "a preset of the method")
    return [Group("method", "The method and its options.", [method, preset]), *sections, Group("", "", top)]


def _groups(path: tuple[str, ...], field: FieldInfo) -> list[Group]:
    found = []
    choice = CHOICES.get(path)
    for model in models_of(field.annotation):
        dotted = ".".join(path)
        leaves = {k: f for k, f in model.model_fields.items() if k != choice and not models_of(f.annotation)}
        own = [_setting(f"{dotted}.{key}", inner) for key, inner in leaves.items()]
        default = " (default)" if isinstance(field.default, model) and type(field.default) is model else ""
        title = f"{dotted}.{choice}={_chosen(model, choice)}{default}" if choice else dotted
        found.append(Group(title, " ".join((model.__doc__ or "").split()), own))
        for key, inner in model.model_fields.items():
            found += _groups((*path, key), inner)
    return found


def _chosen(model: type[BaseModel], choice: str) -> str:
    default = model.model_fields[choice].default
    return "flwr:PartitionerClass" if default is PydanticUndefined else str(default)


def _setting(key: str, field: FieldInfo) -> Setting:
    default = field.get_default(call_default_factory=True) if not field.is_required() else PydanticUndefined
    text = None if default is PydanticUndefined else _yaml(default)
    return Setting(key, text, REFER.get(key) or allowed(field.annotation, field.metadata))


def _yaml(value: Any) -> str:
    value = to_jsonable_python(value)
    return value if isinstance(value, str) else json.dumps(value)


def allowed(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """The values that a type with bounds admits, in words: "a whole number at least 1"."""
    check = next((m for m in metadata if isinstance(m, PlainValidator)), None)
    if check is not None:
        return _refusal(check)
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return allowed(arguments[0], arguments[1:])
    if origin is typing.Literal:
        return " | ".join(map(str, arguments))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(allowed(part) for part in arguments))
    if origin in (list, tuple):
        parts = dict.fromkeys(allowed(part) for part in arguments if part is not Ellipsis)
        return f"a list of: {' or '.join(parts)}"
    if origin is dict:
        return "a mapping"
    pattern = next((p for m in metadata if (p := getattr(m, "pattern", None))), None)
    words = "flwr:PartitionerClass" if pattern else WORDS.get(annotation, "any value")
    return " ".join(filter(None, [words, span(metadata)]))


def _refusal(check: PlainValidator) -> str:
    """A validator's own words, from what it says to a value that nobody could mean."""
    try:
        check.func(object())  # type: ignore[call-arg]
    except ValueError as error:
        return str(error).removeprefix("must be ")
    return "any value"
