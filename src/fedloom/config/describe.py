"""What can be set: every option of a method and every key of the tree, with defaults, allowed values and meanings.

Everything but the meanings is read off the schema, so that what is listed is what is checked.
"""

from __future__ import annotations

import inspect
import json
import types
import typing
from collections.abc import Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel, PlainValidator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined, to_jsonable_python

from fedloom.config.meanings import explained, option_meanings, told
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
    """A dotted key. default: as YAML, None where a value must be given. allowed: in words. about: what it means."""

    key: str
    default: str | None
    allowed: str
    about: str


class Group(NamedTuple):
    """Settings that belong together. title: their section, with key and value of the choice that they belong to."""

    title: str
    about: str
    settings: Sequence[Setting]


def method_settings(name: str) -> list[Setting]:
    """The options of a method, without `name` and `preset`."""
    meanings = option_meanings(name)
    return [_setting(f"method.{key}", field, meanings[key]) for key, field in schema(name).model_fields.items()]


def tree_settings() -> list[Group]:
    """Every key of the tree in its order; a section with a choice has one group per choice."""
    plain = {key: field for key, field in Config.model_fields.items() if not models_of(field.annotation)}
    sections = [group for key, field in Config.model_fields.items() for group in _groups((key,), field)]
    top = explained(inspect.getdoc(Config) or "", plain).meanings
    rest = [_setting(key, field, top.get(key, "")) for key, field in plain.items() if key != "method"]
    named = "a method, or package.module:attribute; `fedloom list methods NAME`"
    method = Setting("method.name", "fedavg", named, _told("method.name"))
    preset = Setting("method.preset", "paper", "a preset of the method", _told("method.preset"))
    return [Group("method", "The method and its options.", [method, preset]), *sections, Group("", "", rest)]


def _groups(path: tuple[str, ...], field: FieldInfo) -> list[Group]:
    found = []
    choice = CHOICES.get(path)
    for model in models_of(field.annotation):
        dotted = ".".join(path)
        leaves = {k: f for k, f in model.model_fields.items() if k != choice and not models_of(f.annotation)}
        about, meanings = explained(model.__doc__ or "", leaves)
        own = [_setting(f"{dotted}.{key}", inner, meanings.get(key, "")) for key, inner in leaves.items()]
        default = " (default)" if isinstance(field.default, model) and type(field.default) is model else ""
        title = f"{dotted}.{choice}={_chosen(model, choice)}{default}" if choice else dotted
        found.append(Group(title, about, own))
        for key, inner in model.model_fields.items():
            found += _groups((*path, key), inner)
    return found


def _chosen(model: type[BaseModel], choice: str) -> str:
    default = model.model_fields[choice].default
    return "flwr:PartitionerClass" if default is PydanticUndefined else str(default)


def _told(key: str) -> str:
    return told().get(key, "")


def _setting(key: str, field: FieldInfo, about: str) -> Setting:
    default = field.get_default(call_default_factory=True) if not field.is_required() else PydanticUndefined
    text = None if default is PydanticUndefined else _yaml(default)
    return Setting(key, text, REFER.get(key) or allowed(field.annotation, field.metadata), about or _told(key))


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
