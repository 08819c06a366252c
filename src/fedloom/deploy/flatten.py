"""The configuration as Flower's run config, which knows dotted keys and four kinds of values, and back."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from fedloom.config import Config, resolve
from fedloom.config.layers import parse
from fedloom.config.sections import CHOICES
from fedloom.config.words import shorten, shown
from fedloom.core.errors import ConfigError
from fedloom.engine.files import yaml_text

Scalar = bool | int | float | str
MARK = "yaml:"
RUN = "run"  # the section of a run config that is no part of the configuration
LARGEST_INT = 2**63 - 1  # Flower sends signed integers of 64 bits


class Deployment(NamedTuple):
    """What an app says beside the configuration.

    name: of the app. out: run folder, empty for a new one. resume: whether to continue the run in `out`. events:
    file for progress as JSON lines, empty for none.
    """

    name: str = "run"
    out: str = ""
    resume: bool = False
    events: str = ""


def flatten(tree: Mapping[str, Any]) -> dict[str, Scalar]:
    """Write nested JSON values as dotted keys; every leaf has one, and `unflatten` gives the tree again.

    Null, lists, empty mappings, mappings with other keys than ASCII identifiers, integers of more than 64 bits and
    texts that begin with `yaml:` become the text `yaml:<value in YAML's flow style>`.
    Raises `ConfigError` for a top-level key that is no identifier.
    """
    strange = next((key for key in tree if not _is_word(key)), None)
    if strange is not None:
        raise ConfigError(f"key {shown(strange)} cannot be sent to Flower; use ASCII letters, digits and underscores")
    flat: dict[str, Scalar] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value and all(map(_is_word, value)):
            flat |= {f"{key}.{inner}": leaf for inner, leaf in flatten(value).items()}
        else:
            flat[key] = value if _travels(value) else MARK + _flow(value)
    return flat


def unflatten(flat: Mapping[str, Scalar]) -> dict[str, Any]:
    """The tree that `flatten` was given.

    Raises `ConfigError` for a text after `yaml:` that is no YAML and for a key that lies below a value.
    """
    tree: dict[str, Any] = {}
    for dotted, value in flat.items():
        *path, last = dotted.split(".")
        at = tree
        for part in path:
            at = at.setdefault(part, {})
            if not isinstance(at, dict):
                raise ConfigError(
                    f"run config: '{shorten(dotted)}' lies below a key that has a value; drop one of them"
                )
        if last in at:
            raise ConfigError(f"run config: '{shorten(dotted)}' has a value and keys below it; drop one of them")
        if isinstance(value, str) and value.startswith(MARK):
            at[last] = parse(value[len(MARK) :], f"run config: the text of {shorten(dotted)}")
        else:
            at[last] = value
    return tree


def run_config(config: Config, deployment: Deployment) -> dict[str, Scalar]:
    """Everything that an app's pyproject.toml says under `[tool.flwr.app.config]`."""
    tree = config.as_dict()
    return flatten({**tree, RUN: {**deployment._asdict(), "choices": _choices(flatten(tree))}})


def read_run_config(flat: Mapping[str, Scalar]) -> tuple[Config, Deployment]:
    """The checked configuration and the rest of a run config, overrides of `flwr run -c` included.

    Raises `ConfigError`: one sentence, also where an override changes a choice whose options the app does not have.
    """
    tree = unflatten(flat)
    run = tree.pop(RUN, {})
    if not isinstance(run, dict):
        raise ConfigError(f"run config: {RUN} must have keys such as {RUN}.out, got {shown(run)}")
    _refuse_other_choices(run.pop("choices", {}), _choices(flat))
    return resolve(tree), _deployment(run)


def _is_word(key: Any) -> bool:
    return isinstance(key, str) and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", key) is not None


def _travels(value: Any) -> bool:
    if isinstance(value, str):
        return not value.startswith(MARK)
    if isinstance(value, int):
        return -LARGEST_INT <= value <= LARGEST_INT
    return isinstance(value, float)


def _flow(value: Any) -> str:
    return yaml_text(value, default_flow_style=True, width=math.inf).removesuffix("...\n").rstrip("\n")


def _choices(flat: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """The keys that decide which other keys there are, or what those mean."""
    keys = ["method.preset", *(".".join((*path, key)) for path, key in CHOICES.items())]
    return {key: flat[key] for key in keys if key in flat}


def _refuse_other_choices(made: Any, asked: Mapping[str, Scalar]) -> None:
    """An app has the options of its own method, optimiser and so on, and an override cannot bring others."""
    if not isinstance(made, Mapping):
        raise ConfigError(f"run config: {RUN}.choices must be left as the app has it, got {shown(made)}")
    for key, value in asked.items():
        if made.get(key, value) != value:
            option = f"--method {value}" if key == "method.name" else f"--set {key}={value}"
            raise ConfigError(
                f"{key} is {made[key]} in this app and cannot become {shown(value)}, for its options would not fit; "
                f"make a new app with `fedloom deploy RECIPE {option}`"
            )


def _deployment(run: Mapping[str, Any]) -> Deployment:
    known = Deployment()._asdict()
    for key, value in run.items():
        if key not in known:
            raise ConfigError(f"run config: unknown key '{RUN}.{shorten(key)}'; known are {', '.join(known)}")
        if type(value) is not type(known[key]):
            wanted = "true or false" if isinstance(known[key], bool) else "text in quotes"
            raise ConfigError(f"{RUN}.{key} must be {wanted}, got {shown(value)}")
    return Deployment(**run)
