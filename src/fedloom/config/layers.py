"""Layers of a configuration: files, recipes and overrides, merged so that a changed choice leaves no strays."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from fedloom.config.sections import CHOICES
from fedloom.core.errors import ConfigError, unknown

RECIPES = Path(__file__).parents[1] / "cli" / "recipes"

Layer = Mapping[str, Any]


class _Loader(yaml.SafeLoader):
    """Safe YAML that also reads `1e-3` as a number; YAML 1.1 wants `1.0e-3`."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)([eE][-+]?\d+)$|^[-+]?\d[\d_]*\.[\d_]*$|^[-+]?\.\d[\d_]*$"),
    list("-+0123456789."),
)


def parse(text: str, where: str) -> Any:
    """A YAML value; `where` names its origin in the error."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        reason = " ".join(str(getattr(error, "problem", None) or error).split())
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{where} is not valid YAML{line}: {reason}") from None


def read_yaml(path: Path) -> dict[str, Any]:
    """A partial configuration from a file; an empty file is an empty mapping."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ConfigError(f"configuration file '{path}' cannot be read: {reason}") from None
    found = parse(text, f"configuration file '{path}'")
    if found is not None and not isinstance(found, dict):
        raise ConfigError(f"configuration file '{path}' must be a mapping of sections, got a {type(found).__name__}")
    return found or {}


def recipe_names() -> list[str]:
    """Names of the recipes of the package, sorted."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def find(recipe: str) -> tuple[str, dict[str, Any]]:
    """(name, layer) of a recipe by name, or of a YAML file by path."""
    path = Path(recipe)
    if path.suffix in (".yaml", ".yml") or "/" in recipe:
        if path.is_dir():
            raise ConfigError(f"'{recipe}' is a folder; name a YAML file, such as '{path / 'config.yaml'}'")
        if not path.exists():
            raise ConfigError(f"configuration file '{recipe}' does not exist")
        return path.stem, read_yaml(path)
    if recipe not in recipe_names():
        raise ConfigError(f"{unknown('recipe', recipe, recipe_names())} A file of your own ends in .yaml.")
    return recipe, read_yaml(RECIPES / f"{recipe}.yaml")


def overrides(pairs: Iterable[str]) -> dict[str, Any]:
    """A layer from `a.b=value` texts with YAML values; of a key given twice the last one wins."""
    layer: dict[str, Any] = {}
    for pair in pairs:
        dotted, equals, text = pair.partition("=")
        parts = dotted.strip().split(".")
        if not equals or not all(parts):
            raise ConfigError(f"--set takes key=value with a dotted key, such as training.rounds=3; got '{pair}'")
        _put(layer, parts, parse(text, f"the value of --set {dotted.strip()}"))
    return layer


def nested(layer: Layer) -> dict[str, Any]:
    """Write dotted keys out: `{"a.b": 1}` is `{"a": {"b": 1}}`. Of a key given twice the last one wins."""
    found: dict[str, Any] = {}
    for key, value in layer.items():
        parts = key.split(".")
        if not all(parts):
            raise ConfigError(f"'{key}' is no key of the configuration; a dotted key reads as in training.rounds")
        for part in reversed(parts[1:]):
            value = {part: value}
        if parts[0] == "method" and isinstance(value, str):
            value = {"name": value}
        found = merge(found, {parts[0]: value})
    return found


def _put(layer: dict[str, Any], parts: list[str], value: Any) -> None:
    if parts[0] == "method" and isinstance(layer.get("method"), str) and len(parts) > 1:
        layer["method"] = {"name": layer["method"]}
    for part in parts[:-1]:
        if not isinstance(layer.get(part), dict):
            layer[part] = {}
        layer = layer[part]
    layer[parts[-1]] = value


def merge(low: Layer, high: Layer, path: tuple[str, ...] = ()) -> dict[str, Any]:
    """`high` over `low`, mapping by mapping. Where `high` changes a choice, options of the old one go.

    A changed method drops every lower option; a changed preset drops those that either preset sets; a changed
    kind, optimiser or schedule keeps the options that the new one has too. So an option is never left to fail,
    or to hide what was just asked for.
    """
    low = _surviving(low, high, path)
    merged = dict(low)
    for key, value in high.items():
        below = low.get(key)
        both = isinstance(value, Mapping) and isinstance(below, Mapping) and (*path, str(key)) != ("stream", "arrival")
        merged[key] = merge(below, value, (*path, str(key))) if both else value
    return merged


def _surviving(low: Layer, high: Layer, path: tuple[str, ...]) -> Layer:
    key = CHOICES.get(path)
    if key is None:
        return low
    if key in high and low.get(key) not in (None, high[key]):
        return {} if path == ("method",) else {k: v for k, v in low.items() if k in _fields(path, high[key])}
    if path == ("method",) and "preset" in high and high["preset"] != low.get("preset", "paper"):
        return _without_presets(low, high)
    return low


def _without_presets(low: Layer, high: Layer) -> Layer:
    from fedloom.methods import presets

    known = presets(low.get("name", "fedavg"))
    touched = {*known.get(high["preset"], {}), *known.get(low.get("preset", "paper"), {})}
    return {k: v for k, v in low.items() if k not in touched}


def _fields(path: tuple[str, ...], choice: Any) -> set[str]:
    from fedloom.config.sections import Config, Training
    from fedloom.config.words import tagged

    model = tagged(Training if path[0] == "training" else Config, path[-1]).get(_tag(choice))
    return set(model.model_fields) if model else set()


def _tag(choice: Any) -> str:
    return "flwr:" if isinstance(choice, str) and choice.startswith("flwr:") else str(choice)


def method_hint(key: str) -> str:
    """For a key that begins with a method's name (`fedprx.mu`): how options of a method are written."""
    from fedloom.methods import names

    head, _, rest = key.partition(".")
    near = difflib.get_close_matches(head, names(), n=1, cutoff=0.7)
    if not near:
        return ""
    meant = f"{near[0]}.{rest}" if rest else near[0]
    written = f"method.{rest or 'OPTION'} with --method {near[0]}"
    return f" Did you mean '{meant}'? Options of {near[0]} are set as {written}."
