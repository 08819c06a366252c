"""What a comparison sets over its recipe, for its record."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from fedloom.config import Config, resolve
from fedloom.config.digest import NEUTRAL
from fedloom.config.layers import merge, nested
from fedloom.config.options import plain
from fedloom.own_model import identity

APART = ("method", "seed")  # what methods and seeds of a comparison tell


def by_section(layer: Mapping[str, Any]) -> dict[str, Any]:
    """A layer whose keys, dotted or not, all begin with a section; `ConfigError` for any other, as in `fedloom.run`.

    So none can have the name of an argument of `fedloom.comparison.planned.plan`. data, model and engine are there.
    """
    if stray := {key: value for key, value in layer.items() if key.partition(".")[0] not in Config.model_fields}:
        resolve(stray)
    return {"data": None, "model": None, "engine": None, **layer}


def settings(source: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted key -> value of what goes over the recipe, sorted; without what cannot change a result.

    source: the recipe; a mapping in its place counts as set, except for its method and seed. given: keywords of
    `fedloom.api.configure`; a network of the user's own is told by its name, own data are the data set of the runs.
    """
    written = nested(source) if isinstance(source, Mapping) else {}
    below = {key: value for key, value in written.items() if key not in APART}
    layer = {key: _section(key, value) for key, value in given.items()}
    whole = merge(below, nested({key: value for key, value in layer.items() if value is not None}))
    kept = {path: value for path, value in _leaves(whole) if path[:2] not in NEUTRAL and path[0] != "tracker"}
    return {".".join(path): json.loads(json.dumps(value, default=plain)) for path, value in sorted(kept.items())}


def _section(key: str, value: Any) -> Any:
    """A name stands for a section with that name, an own network for its name, own data for nothing."""
    if key not in ("data", "model", "engine") or value is None or isinstance(value, Mapping):
        return value
    if isinstance(value, str):
        return {"name": value}
    return {"name": identity(value)} if key == "model" else None


def _leaves(tree: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in tree.items():
        path = (*above, str(key))
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, path)
        else:
            yield path, value
