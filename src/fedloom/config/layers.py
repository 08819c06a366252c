"""Layers of a configuration: files, recipes and overrides, merged so that a changed choice leaves no strays."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from fedloom.config.sections import CHOICES, NAMED
from fedloom.config.words import shorten, shown
from fedloom.core.errors import ConfigError, closest, unknown

RECIPES = Path(__file__).parents[1] / "cli" / "recipes"

Layer = Mapping[str, Any]
DEEP, MANY = 50, 10**6  # levels and values of a configuration; lists of themselves have no end


class _Loader(yaml.SafeLoader):
    """Safe YAML that also reads `1e-3` as a number (YAML 1.1 wants `1.0e-3`) and refuses a key given twice."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """A mapping; of two equal keys YAML would drop the first without a word."""
        keys = [(key.tag, key.value) for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        twice = next((key for key, _ in node.value if keys.count((key.tag, key.value)) > 1), None)
        if twice is not None and twice.value != "<<":
            raise yaml.constructor.ConstructorError(
                None, None, f"the key '{twice.value}' is given twice; keep one of them", twice.start_mark
            )
        return super().construct_mapping(node, deep)


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
    except RecursionError:
        raise ConfigError(f"{where} is not valid YAML: it is nested too deeply; no value needs over {DEEP}") from None
    except (ValueError, OverflowError, AttributeError) as error:  # a number of 5,000 digits, the 31st of February
        reason = str(error).split(";")[0]
        raise ConfigError(f"{where} is not valid YAML: a value cannot be read ({reason}); correct it") from None


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
    """Names of the recipes of the package, sorted; those of a study are `<study>/<name>`."""
    return sorted(path.relative_to(RECIPES).with_suffix("").as_posix() for path in RECIPES.rglob("*.yaml"))


def find(recipe: str) -> tuple[str, dict[str, Any]]:
    """(name, layer) of a recipe by name, or of a YAML file by path.

    A file may hold the key `base`: a recipe's name, or the path of another file from its own folder, over which its
    own values go.
    """
    name, path = located(recipe)
    layer = read_yaml(path)
    if "methods" in layer:
        raise ConfigError(f"'{path}' names methods to compare; call `fedloom compare` or `fedloom sweep` with it")
    return name, _based(layer, path, (path,))


def _based(layer: dict[str, Any], path: Path, above: tuple[Path, ...]) -> dict[str, Any]:
    if "base" not in layer:
        return layer
    base = layer.pop("base")
    if not isinstance(base, str) or not base:
        raise ConfigError(f"base of '{path}' must be a recipe's name or the path of a YAML file, got {shown(base)}")
    below = RECIPES / f"{base}.yaml" if base in recipe_names() else path.parent / base
    try:
        found, again = below.is_file(), below.resolve() in (seen.resolve() for seen in above)
    except (OSError, RuntimeError, ValueError):  # too long a name, a loop of links, a null byte
        found = again = False
    if again:
        raise ConfigError(f"base of '{path}' leads back to '{below}'; remove one of them")
    if not found:
        near = closest(base, recipe_names())
        raise ConfigError(
            f"base of '{path}' is {shown(base)}, which is neither a recipe nor a YAML file beside it; correct it.{near}"
        )
    layers = [_based(read_yaml(below), below, (*above, below)), layer]
    for part in layers:
        check_keys(part)
        check_values(part)
    return merge(*(nested(part) for part in layers))


def located(recipe: str) -> tuple[str, Path]:
    """(name, file) of a recipe or of a YAML file. Raises `ConfigError` for what is neither."""
    path = Path(recipe)
    names = recipe_names()
    if recipe in names:
        return recipe, RECIPES / f"{recipe}.yaml"
    head, slash, _ = recipe.partition("/")
    studies = {study for study, within, _ in (name.partition("/") for name in names) if within}
    if path.suffix in (".yaml", ".yml") or (slash and head not in studies):
        try:
            path.stat()
        except (OSError, ValueError) as error:  # too long a name, a null byte
            missing = isinstance(error, FileNotFoundError)
            reason = "does not exist" if missing else f"cannot be read: {getattr(error, 'strerror', None) or error}"
            raise ConfigError(f"configuration file '{shorten(recipe)}' {reason}") from None
        if path.is_dir():
            raise ConfigError(f"'{recipe}' is a folder; name a YAML file, such as '{path / 'config.yaml'}'")
        return path.stem, path
    raise ConfigError(f"{unknown('recipe', shorten(recipe), names)} A file of your own ends in .yaml.")


def overrides(pairs: Iterable[str]) -> dict[str, Any]:
    """A layer from `a.b=value` texts with YAML values; of a key given twice the last one wins."""
    layer: dict[str, Any] = {}
    for pair in pairs:
        dotted, equals, text = pair.partition("=")
        parts = dotted.strip().split(".")
        if not equals or not all(parts) or len(parts) > DEEP:
            raise ConfigError(
                f"--set takes key=value with a dotted key, such as training.rounds=3; got '{shorten(pair)}'"
            )
        value = parse(text, f"the value of --set {shorten(dotted.strip())}")
        if isinstance(value, str) and tuple(parts) in NAMED:
            parts.append(NAMED[tuple(parts)])
        _put(layer, parts, value)
    return layer


def nested(layer: Layer) -> dict[str, Any]:
    """Write dotted keys out: `{"a.b": 1}` is `{"a": {"b": 1}}`. Of a key given twice the last one wins."""
    found: dict[str, Any] = {}
    for key, value in layer.items():
        parts = key.split(".")
        if not all(parts) or len(parts) > DEEP:
            raise ConfigError(
                f"'{shorten(key)}' is no key of the configuration; a dotted key reads as in training.rounds"
            )
        for part in reversed(parts[1:]):
            value = {part: value}
        found = merge(found, {parts[0]: _named(value, (parts[0],))})
    return found


def check_keys(layer: Mapping[Any, Any]) -> None:
    """Raise `ConfigError` for a key that is no text."""
    bad = next((key for key in layer if not isinstance(key, str)), None)
    if bad is not None:
        raise ConfigError(f"keys of the configuration must be text, got {shown(bad)}")


def check_values(layer: Layer) -> None:
    """Raise `ConfigError` for what no configuration file can hold: odd keys, broken text, endless values."""
    left = MANY
    open_values: list[tuple[str, Any, int]] = [(str(key), value, 1) for key, value in layer.items()]
    while open_values:
        path, value, depth = open_values.pop()
        left -= 1
        if depth > DEEP or left < 0:
            raise ConfigError(f"{shorten(path)} is nested too deeply or refers to itself; write its values out")
        if isinstance(value, str) and not _is_text(value):
            raise ConfigError(f"{shorten(path)} holds characters that are no text (lone surrogates); write it anew")
        if isinstance(value, int) and not -(2**64) < value < 2**64:
            raise ConfigError(f"{shorten(path)} is a number of more than 64 bits; give a smaller one")
        if isinstance(value, Mapping):
            _check_keys(path, value)
            open_values += [(f"{path}.{key}", inner, depth + 1) for key, inner in value.items()]
        elif isinstance(value, list | tuple):
            open_values += [(path, inner, depth + 1) for inner in value]


def _check_keys(path: str, value: Mapping[Any, Any]) -> None:
    for key in value:
        if isinstance(key, bool) or not isinstance(key, str | int) or (isinstance(key, str) and not _is_text(key)):
            raise ConfigError(f"keys of {shorten(path)} must be text, got {shown(key)}; put it in quotes")


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _named(value: Any, path: tuple[str, ...]) -> Any:
    """A bare name stands for a section with that choice: `optimizer: adamw` is `optimizer: {name: adamw}`."""
    if isinstance(value, str) and path in NAMED:
        return {NAMED[path]: value}
    if isinstance(value, Mapping) and path == ("training",):
        return {key: _named(inner, (*path, str(key))) for key, inner in value.items()}
    return value


def _put(layer: dict[str, Any], parts: list[str], value: Any) -> None:
    for part in parts[:-1]:
        if not isinstance(layer.get(part), dict):
            layer[part] = {}
        layer = layer[part]
    layer[parts[-1]] = value


def merge(low: Layer, high: Layer, path: tuple[str, ...] = ()) -> dict[str, Any]:
    """`high` over `low`, mapping by mapping. Where `high` changes a choice, options of the old one go.

    A changed method drops every lower option; a changed preset drops those that either preset sets; a changed
    kind, optimiser, schedule or model keeps the options that the new one has too. So an option is never left to fail,
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
    if path == ("model",):
        return _same_model(low, high)
    if key is None:
        return low
    if key in high and low.get(key) not in (None, high[key]):
        return {} if path == ("method",) else {k: v for k, v in low.items() if k in _fields(path, high[key])}
    if path == ("method",) and "preset" in high and high["preset"] != low.get("preset", "paper"):
        return _without_presets(low, high)
    return low


def _same_model(low: Layer, high: Layer) -> Layer:
    """The section `model` below another choice of network: its weights go, and options that the new one lacks."""
    options = low.get("options")
    if "name" not in high or low.get("name") in (None, high["name"]):
        return low
    from fedloom.models.registry import defaults

    known = defaults(str(high["name"]))
    kept = {k: v for k, v in options.items() if k in known} if isinstance(options, Mapping) else {}
    return {k: v for k, v in low.items() if k not in ("options", "weights")} | ({"options": kept} if kept else {})


def _without_presets(low: Layer, high: Layer) -> Layer:
    from fedloom.methods import presets

    name, chosen = low.get("name", "fedavg"), (high["preset"], low.get("preset", "paper"))
    if not all(isinstance(text, str) for text in (name, *chosen)):
        return low  # refused in words when the tree is checked
    known = presets(name)
    touched = {option for preset in chosen for option in known.get(preset, {})}
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
    if head == near[0]:
        meant = f"method.{rest}" if rest else f"method.name={head}"
    written = f"method.{rest or 'OPTION'} with --method {near[0]}"
    return f" Did you mean '{meant}'? Options of {near[0]} are set as {written}."
