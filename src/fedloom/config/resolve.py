"""Layers -> one checked tree."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from fedloom.config.layers import Layer, check_keys, check_values, find, merge, method_hint, nested
from fedloom.config.options import complete, plain
from fedloom.config.sections import Config
from fedloom.config.words import explain, shorten, shown
from fedloom.core.errors import ConfigError, unknown

ENGINES = ("serial", "flower")


def resolve_source(recipe: str | Mapping[str, Any] | Config | None) -> tuple[str, dict[str, Any]]:
    """(name, layer) of what a run starts from: a recipe's name, a YAML file, a mapping or a checked tree."""
    if recipe is None:
        return "run", {}
    if isinstance(recipe, Config):
        return "run", recipe.as_dict()
    if isinstance(recipe, Mapping):
        return "run", dict(recipe)
    return find(str(recipe))


def resolve(*layers: Layer) -> Config:
    """Merge layers, later ones winning, and check the result.

    Raises `ConfigError`: one sentence with the dotted key, the value and the range or the closest match.
    """
    merged: dict[str, Any] = {}
    for layer in layers:
        merged = merge(merged, _texts(layer))
    method = merged.get("method", {})
    _refuse_unknown_sections(merged)
    if isinstance(method, str):
        method = {"name": method}
    if not isinstance(method, Mapping):
        raise ConfigError(f"method must be a mapping with a name, got {shown(method)}")
    try:
        tree = Config.model_validate_json(json.dumps({**merged, "method": dict(method)}, default=plain))
    except ValidationError as error:
        raise explain(error, Config) from None
    _check_engine(tree)
    _check_cross(tree)
    return tree.model_copy(update={"method": complete(method)})


def _texts(layer: Layer) -> dict[str, Any]:
    check_keys(layer)
    check_values(layer)
    return nested(layer)


def _refuse_unknown_sections(merged: Layer) -> None:
    strange = next((k for k in merged if k not in Config.model_fields), None)
    if strange is None:
        return
    inner = merged[strange]
    dotted = shorten(f"{strange}.{next(iter(inner))}" if isinstance(inner, Mapping) and inner else strange)
    if hint := method_hint(dotted):
        raise ConfigError(f"unknown key '{dotted}'.{hint}")


def _check_engine(tree: Config) -> None:
    engine = tree.engine
    if engine.name not in ENGINES:
        raise ConfigError(f"{unknown('engine', shorten(engine.name), ENGINES)} Set engine.name to serial.")
    if engine.name == "serial" and engine.runtime is not None:
        raise ConfigError(
            f"engine.runtime is {engine.runtime}, but the engine serial has no runtimes; "
            "set engine.name to flower, or engine.runtime to null"
        )
    if engine.name == "flower" and engine.runtime != "simulation" and engine.workers not in ("auto", 1):
        raise ConfigError(
            f"engine.workers is {engine.workers}, but a federation's nodes do the work; set it to 1 or auto"
        )


def _check_cross(tree: Config) -> None:
    cohort, clients = tree.training.cohort, tree.partition.clients
    if isinstance(cohort, int) and cohort > clients:
        raise ConfigError(
            f"training.cohort is {cohort} but there are {clients} clients; "
            "lower it, raise partition.clients, or give a fraction such as 0.5"
        )
    if tree.engine.min_replies > clients:
        raise ConfigError(f"engine.min_replies is {tree.engine.min_replies} but there are {clients} clients; lower it")
