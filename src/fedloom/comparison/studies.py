"""What a comparison or a sweep is asked for, from a call and from a file that names methods, seeds and settings."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedloom.comparison import entries
from fedloom.comparison.settings import by_section
from fedloom.config.layers import check_values, located, merge, nested, read_yaml, recipe_names
from fedloom.config.words import shorten, shown
from fedloom.core.errors import ConfigError, unknown
from fedloom.report.comparison import RUNS

SEEDS = (0, 1, 2)
KEYS = ("recipe", "methods", "seeds", "reference", "metric", "set", "settings", "grid")  # of a file
OBJECTS = ("data", "model")  # sections that may be an object of the user's own
LEFT_OUT = ("data", "model", "engine")  # sections for which None says that they are not given
LONGEST = 80  # characters of the name of a folder
MOST = 10_000  # settings of a grid, more than which is a slip of the hand

Layer = Mapping[str, Any]


@dataclass(frozen=True)
class Study:
    """A comparison, or with settings a sweep. Values are as the caller or the file gave them, unchecked.

    given: sections of the configuration for every run, data and model perhaps as objects. settings: label -> sections
    that go over them.
    """

    recipe: Any = None
    methods: Any = ()
    seeds: Any = SEEDS
    reference: Any = None
    metric: Any = None
    given: Layer = field(default_factory=dict)
    settings: Mapping[str, Layer] = field(default_factory=dict)

    def alone(self) -> Study:
        """The same, checked to be a single comparison."""
        if self.settings:
            raise ConfigError("the file names settings, and a comparison has one; call `fedloom sweep` with it")
        return self


def study(
    recipe: Any,
    methods: Any,
    seeds: Any,
    reference: Any,
    metric: Any,
    given: Layer,
    *,
    settings: Any = None,
    grid: Any = None,
) -> Study:
    """What is asked for. recipe: as in `fedloom.run`, or a file with `KEYS`, over whose values those of the call go.

    seeds, reference, metric: None where the call leaves them out, as are methods that are empty. Raises `ConfigError`
    for a key that the file cannot have, and for settings that are none.
    """
    if isinstance(recipe, str | Path):
        located(str(recipe))  # refuses what is neither a recipe nor a file
    found = _read(recipe)
    base = Study(recipe) if found is None else found
    left_out = isinstance(methods, str | list | tuple | Mapping) and not methods
    call = {"methods": None if left_out else methods, "seeds": seeds, "reference": reference, "metric": metric}
    asked = {key: value for key, value in call.items() if value is not None}
    own = variants(settings, grid)
    return replace(base, **asked, given=over(base.given, given), **({"settings": own} if own else {}))


def over(low: Layer, high: Layer) -> dict[str, Any]:
    """Sections over sections, option by option; an own object stays unless another goes over it, and options of its
    section stand beside it.
    """
    objects = {key: value for layer in (low, high) for key in OBJECTS if _is_object(value := layer.get(key))}
    layers = [
        {k: v for k, v in _present(layer).items() if not (k in OBJECTS and _is_object(v))} for layer in (low, high)
    ]
    for layer in layers:
        check_values(layer)
    merged = merge(nested(layers[0]), nested(layers[1]))
    beside = {f"{key}.{k}": v for key in objects for k, v in merged.pop(key, {}).items()}
    return by_section({**merged, **beside, **objects})


def variants(settings: Any, grid: Any) -> dict[str, Layer]:
    """Label -> sections of every setting: those that are named, or all combinations of a grid; empty without either.

    settings: label -> sections. grid: dotted key -> values.
    """
    if settings is not None and grid is not None:
        raise ConfigError("settings and grid are both given; name the settings, or give the grid that makes them")
    if settings is not None:
        return _named(settings)
    if grid is None:
        return {}
    check_values({"grid": grid})
    if not isinstance(grid, Mapping) or not grid:
        raise ConfigError(f"grid must be a mapping of dotted keys to lists of values, got {shown(grid)}")
    for key, values in grid.items():
        if not isinstance(values, list | tuple) or not values:
            raise ConfigError(
                f"grid: {shorten(str(key))} must be a list of values such as [0.1, 0.5], got {shown(values)}"
            )
    _check_grid({str(key): len(values) for key, values in grid.items()})
    names = _short(list(map(str, grid)))
    combinations = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    labels = [", ".join(f"{names[str(k)]}={entries.text(v)}" for k, v in c.items()) for c in combinations]
    found = list(zip(map(entries.clean, labels), combinations, strict=True))
    entries.check_labels("grid", [label for label, _ in found], "each value counts once")
    return {label: _sections(label, layer) for label, layer in found}


def _check_grid(sizes: Mapping[str, int]) -> None:
    """Raise `ConfigError` for a grid with too many combinations, or with a key inside another. sizes: key -> values."""
    if (many := math.prod(sizes.values())) > MOST:
        raise ConfigError(f"grid makes {many} settings, and {MOST} are the most; leave values out")
    for key in sizes:
        if (outer := next((other for other in sizes if key.startswith(f"{other}.")), None)) is not None:
            raise ConfigError(f"grid: {shorten(key)} is a part of {shorten(outer)}, which sets it too; keep one")


def slugs(labels: Iterable[str]) -> dict[str, str]:
    """Label -> name of a folder, no two alike."""
    found: dict[str, str] = {}
    taken = {RUNS}
    for label in labels:
        slug = re.sub(r"[^A-Za-z0-9_.+=@-]+", "-", label).strip("-.")[:LONGEST] or "setting"
        names = itertools.chain([slug], (f"{slug}-{k}" for k in itertools.count(2)))
        found[label] = next(name for name in names if name.lower() not in taken)
        taken.add(found[label].lower())
    return found


def _named(settings: Any) -> dict[str, Layer]:
    check_values({"settings": settings})
    if not isinstance(settings, Mapping) or not settings:
        raise ConfigError(
            f"settings must be a mapping of labels to what they set, such as {{alpha 0.1: {{partition.alpha: 0.1}}}}, "
            f"got {shown(settings)}"
        )
    labels = [entries.clean(label) for label in settings]
    entries.check_labels("settings", labels, "keep one of them")
    return {label: _sections(label, layer) for label, layer in zip(labels, settings.values(), strict=True)}


def _sections(label: str, layer: Any) -> Layer:
    """What a setting sets, by sections."""
    if layer is not None and not isinstance(layer, Mapping):
        raise ConfigError(f"setting {label}: it must be a mapping of keys to values, got {shown(layer)}")
    try:
        found = by_section(nested({str(key): value for key, value in (layer or {}).items()}))
    except ConfigError as error:
        error.args = (f"setting {label}: {error}",)
        raise
    return _present(found)


def _present(layer: Layer) -> dict[str, Any]:
    return {key: value for key, value in layer.items() if value is not None or key not in LEFT_OUT}


def _short(keys: list[str]) -> dict[str, str]:
    """Dotted key -> its last part, or as much of it as tells it from the others."""
    parts = {key: key.split(".") for key in keys}

    def tail(key: str, size: int) -> str:
        return ".".join(parts[key][-size:])

    def shortest(key: str) -> str:
        tails = (tail(key, size) for size in range(1, len(parts[key]) + 1))
        return next((t for t in tails if [tail(k, t.count(".") + 1) for k in keys].count(t) == 1), key)

    return {key: shortest(key) for key in keys}


def _read(recipe: Any) -> Study | None:
    """The study of a file; None for a recipe, and for a file that is one."""
    if not isinstance(recipe, str | Path) or str(recipe) in recipe_names():
        return None
    path = Path(recipe)
    if path.suffix not in (".yaml", ".yml") or not _is_file(path):
        return None
    found = read_yaml(path)
    if not found.keys() & set(KEYS):
        return None
    for key in found:
        if key not in KEYS:
            raise ConfigError(f"'{path}': {unknown('key', shorten(str(key)), KEYS)}")
    given = {} if found.get("set") is None else found["set"]
    if not isinstance(given, Mapping):
        raise ConfigError(f"'{path}': set must be a mapping of keys to values, got {shown(given)}")
    named = {key: found[key] for key in ("methods", "seeds", "reference", "metric") if found.get(key) is not None}
    return Study(
        recipe=_beside(path, found.get("recipe", "quickstart")),
        **named,
        given=over({}, by_section({str(key): value for key, value in given.items()})),
        settings=variants(found.get("settings"), found.get("grid")),
    )


def _beside(path: Path, recipe: Any) -> Any:
    """The recipe that a file names: one of the package, or a YAML file by its path from that file's folder."""
    if not isinstance(recipe, str | Mapping) or not recipe:
        raise ConfigError(f"'{path}': recipe must be the name of a recipe or of a YAML file, got {shown(recipe)}")
    if isinstance(recipe, str) and recipe not in recipe_names() and _is_file(path.parent / recipe):
        return str(path.parent / recipe)
    return recipe


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # too long a name, a null byte
        return False


def _is_object(value: Any) -> bool:
    return value is not None and not isinstance(value, str | Mapping)
