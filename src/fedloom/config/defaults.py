"""A run's configuration as it would be by default, for telling what was set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedloom.config.resolve import resolve
from fedloom.config.sections import NAMED


def defaults(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The tree of a run whose every setting but the choices of `tree` (method and preset, data, kinds) is the default.

    tree: resolved, as in config.yaml. Raises `ConfigError` where there is none, as for a method that is not at hand.
    """
    chosen: dict[str, Any] = {}
    for path, key in (*NAMED.items(), (("method",), "preset")):
        section: Any = tree
        for name in path:
            section = section.get(name) if isinstance(section, Mapping) else None
        if isinstance(section, Mapping) and key in section:
            chosen[".".join((*path, key))] = section[key]
    return resolve(chosen).as_dict()
