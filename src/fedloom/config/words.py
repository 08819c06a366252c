"""Validation errors of pydantic in one sentence each: the field, the value, the range, the closest match."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from pydantic import BaseModel, Tag, ValidationError
from pydantic.fields import FieldInfo

from fedloom.core.errors import ConfigError, closest, unknown

Loc = tuple[Any, ...]

FAR = 100  # from here on an upper bound only keeps slips of the hand away
LONG = 60  # characters of a value that are repeated in a sentence

WANTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "string_too_short": "text that is not empty",
    "none_required": "null",
    "int_parsing": "a whole number",
    "float_parsing": "a number",
    "bool_parsing": "true or false",
    "int_parsing_size": "a whole number of fewer digits",
    "dict_type": "a mapping",
    "tuple_type": "a list",
    "list_type": "a list",
    "finite_number": "a finite number",
    "string_pattern_mismatch": "of the form 'flwr:PartitionerClass'",
}


def explain(error: ValidationError, model: type[BaseModel], prefix: str = "", what: str = "key") -> ConfigError:
    """The first problem as a `ConfigError`. prefix: dotted path of the section that `model` describes."""
    problems = error.errors(include_url=False)
    first = problems[0]
    if first["type"] == "extra_forbidden":
        return _unknown_key(first["loc"], model, prefix, what)
    path, _ = locate(model, first["loc"])
    same = [p for p in problems if locate(model, p["loc"])[0] == path]
    dotted = ".".join([*filter(None, [prefix]), *map(str, path)]) or "configuration"
    return ConfigError(_sentence(dotted, first, same, model))


def shown(value: Any) -> str:
    """A value as text that fits a sentence."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to write out integers of thousands of digits
        return "a number of thousands of digits"
    return shorten(text)


def shorten(text: str) -> str:
    """Text of at most `LONG` characters."""
    return text if len(text) <= LONG else f"{text[: LONG - 3]}..."


def _sentence(dotted: str, first: Any, same: Sequence[Any], model: type[BaseModel]) -> str:
    value, kind = first["input"], first["type"]
    if kind == "missing":
        return f"{dotted} is missing: give it a value"
    if kind.startswith("union_tag"):
        expected = [t for tag in first["ctx"].get("expected_tags", "").split(", ") if (t := tag.strip("'")) != "null"]
        key = "kind" if dotted in ("stream", "partition") else "name"
        given = value.get(key) if isinstance(value, dict) else value
        if given is None:
            return f"{dotted}.{key} is missing: set it to one of {', '.join(sorted(expected))}"
        tags = [f"{tag}PartitionerClass" if tag == "flwr:" else tag for tag in expected]
        return unknown(f"{dotted}.{key}", given if isinstance(given, str) else shown(given), tags)
    if kind in ("model_type", "model_attributes_type", "dict_type", "dataclass_type"):
        return f"{dotted} must be a mapping of options, got {shown(value)}"
    if kind == "value_error" and len(same) == 1:
        return f"{dotted} {first['ctx']['error']}, got {shown(value)}"
    wanted = list(dict.fromkeys(_wanted(p, model) for p in same))
    text = f"{dotted} must be {' or '.join(wanted)}, got {shown(value)}"
    if kind == "string_type" and isinstance(value, dict):
        text += "; after a colon that is part of a name comes no space: write folder:PATH, or put it in quotes"
    if kind == "literal_error" and isinstance(value, str):
        choices = [c.strip("' ") for c in first["ctx"]["expected"].replace(" or ", ", ").split(", ")]
        text += f".{closest(value, choices)}" if closest(value, choices) else ""
    return text


def _wanted(problem: Any, model: type[BaseModel]) -> str:
    kind, ctx = problem["type"], problem.get("ctx", {})
    if kind == "literal_error":
        choices = ctx["expected"].replace(" or ", ", ").replace("'", "").split(", ")
        return f"one of {', '.join(choices)}" if len(choices) > 1 else choices[0]
    if kind in ("greater_than", "greater_than_equal", "less_than", "less_than_equal"):
        return _violated(kind, locate(model, problem["loc"])[1]) or problem["msg"].removeprefix("Input should be ")
    if kind in ("value_error", "assertion_error"):
        return str(ctx["error"]).removeprefix("must be ")
    return WANTED.get(kind) or problem["msg"].removeprefix("Input should be ")


def _violated(kind: str, bounds: Sequence[Any]) -> str:
    """The bounds in words; of a range that ends far up only the end that a value lies beyond."""
    far = any(m.le >= FAR for m in bounds if isinstance(m, Le))
    ends = (Ge, Gt) if kind.startswith("greater") else (Le, Lt)
    return span([m for m in bounds if isinstance(m, ends)] if far else bounds)


def span(metadata: Sequence[Any]) -> str:
    """Bounds in words: `in (0, 1]`, `at least 0`, `above 0`; empty when there are none."""
    low = next(
        (
            (_plainly(m.ge), "[") if isinstance(m, Ge) else (_plainly(m.gt), "(")
            for m in metadata
            if isinstance(m, Ge | Gt)
        ),
        None,
    )
    high = next(
        (
            (_plainly(m.le), "]") if isinstance(m, Le) else (_plainly(m.lt), ")")
            for m in metadata
            if isinstance(m, Le | Lt)
        ),
        None,
    )
    if low and high:
        return f"in {low[1]}{low[0]}, {high[0]}{high[1]}"
    if low:
        return f"{'at least' if low[1] == '[' else 'above'} {low[0]}"
    if high:
        return f"{'at most' if high[1] == ']' else 'below'} {high[0]}"
    return ""


def _plainly(bound: Any) -> str:
    return f"{bound:g}" if isinstance(bound, float) else str(bound)


def locate(model: type[BaseModel], loc: Loc) -> tuple[Loc, list[Any]]:
    """Split pydantic's location into the user's path (tags and union members left out) and the bounds there."""
    path: list[Any] = []
    at: Any = model
    bounds: list[Any] = []
    for part in loc:
        if isinstance(part, int):
            path.append(part)
            continue
        tagged = next((m for m in models_of(at) if _tag_of(m, at) == part), None)
        if tagged is not None:
            at = tagged
            continue
        fields = {n: f for m in models_of(at) for n, f in m.model_fields.items()}
        if part in fields:
            path.append(part)
            at, bounds = _annotation(fields[part]), _bounds(fields[part])
        elif not path or models_of(at):
            path.append(part)
    return tuple(path), bounds


def keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every dotted key of the tree, options of all choices included."""
    for name, field in model.model_fields.items():
        dotted = f"{prefix}{name}"
        yield dotted
        for inner in models_of(_annotation(field)):
            yield from keys(inner, f"{dotted}.")


def _unknown_key(loc: Loc, model: type[BaseModel], prefix: str, what: str) -> ConfigError:
    path, _ = locate(model, loc)
    dotted = ".".join([*filter(None, [prefix]), *map(str, path)])
    siblings = _siblings(model, loc)
    known = sorted({f"{prefix}.{k}" if prefix else k for k in keys(model)})
    leaves = [k for k in known if k.rsplit(".", 1)[-1] == path[-1] and k != dotted]
    near = [f"{dotted.rsplit('.', 1)[0]}.{s}" if "." in dotted else s for s in siblings]
    spelt = difflib.get_close_matches(str(path[-1]), siblings, n=1, cutoff=0.75)
    if spelt:
        hint = f" Did you mean '{near[siblings.index(spelt[0])]}'?"
    else:
        hint = f" Did you mean '{leaves[0]}'?" if leaves else closest(dotted, [k for k in known if k != dotted])
    return ConfigError(f"unknown {what} '{dotted}'.{hint} Known here: {', '.join(siblings) or 'none'}.")


def _siblings(model: type[BaseModel], loc: Loc) -> list[str]:
    at: Any = model
    for part in loc[:-1]:
        tagged = next((m for m in models_of(at) if _tag_of(m, at) == part), None)
        fields = {n: f for m in models_of(at) for n, f in m.model_fields.items()}
        at = tagged if tagged is not None else _annotation(fields[part]) if part in fields else at
    return sorted({n for m in models_of(at) for n in m.model_fields})


def _annotation(field: FieldInfo) -> Any:
    return field.annotation


def _bounds(field: FieldInfo) -> list[Any]:
    found = list(field.metadata)
    for member in _members(field.annotation):
        found += getattr(member, "__metadata__", ())
    return [m for m in found if isinstance(m, Ge | Gt | Le | Lt | MinLen | MaxLen)]


def _members(annotation: Any) -> list[Any]:
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return [m for arg in typing.get_args(annotation) for m in _members(arg)]
    if origin is tuple or origin is list:
        return [m for arg in typing.get_args(annotation) for m in _members(arg)]
    return [annotation]


def models_of(annotation: Any) -> list[type[BaseModel]]:
    """The models that a field's type holds, members of unions one by one."""
    found = []
    for member in _members(annotation):
        bare = typing.get_args(member)[0] if typing.get_origin(member) is typing.Annotated else member
        if isinstance(bare, type) and issubclass(bare, BaseModel):
            found.append(bare)
    return found


def _tag_of(model: type[BaseModel], annotation: Any) -> str | None:
    for member in _members(annotation):
        if typing.get_origin(member) is typing.Annotated and typing.get_args(member)[0] is model:
            return next((m.tag for m in member.__metadata__ if isinstance(m, Tag)), None)
    return None


def tagged(model: type[BaseModel], field: str) -> dict[str, type[BaseModel]]:
    """The models of a tagged union by tag."""
    annotation = _annotation(model.model_fields[field])
    return {tag: inner for inner in models_of(annotation) if (tag := _tag_of(inner, annotation)) is not None}
