"""`list`: what there is to choose from, the options of a method, and every key of the configuration."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from itertools import takewhile
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedloom.cli.application import Json, guarded, print_json
from fedloom.cli.completion import listed
from fedloom.terminal import say

if TYPE_CHECKING:
    from fedloom.config.describe import Setting


class Kind(StrEnum):
    """What can be listed."""

    methods = "methods"
    datasets = "datasets"
    models = "models"
    recipes = "recipes"
    claims = "claims"
    options = "options"


@guarded
def list_known(
    kind: Annotated[
        Kind,
        typer.Argument(
            help="What to list; claims: those of papers that `reproduce` tries; options: every key that --set takes."
        ),
    ],
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="One of them; a method with its options.", autocompletion=listed),
    ] = None,
    as_json: Json = False,
) -> None:
    """List methods, data sets, models, recipes, claims or options; with the NAME of a method, its options."""
    if kind is Kind.options:
        _list_options(name, as_json)
    elif kind is Kind.methods and name is not None:
        _list_method(name, as_json)
    else:
        _list_names(kind, name, as_json)


def _list_names(kind: Kind, name: str | None, as_json: bool) -> None:
    known = {"methods": _methods, "datasets": _datasets, "models": _models, "recipes": _recipes, "claims": _claims}
    rows = known[kind.value]()
    if name is not None:
        from fedloom.core.errors import ConfigError, unknown

        if name not in dict(rows):
            raise ConfigError(unknown(kind.value.removesuffix("s"), name, dict(rows)))
        rows = [(name, _header(name) if kind is Kind.recipes else dict(rows)[name])]
    if as_json:
        print_json({kind.value: [{"name": key, "about": about} for key, about in rows]})
        return
    width = max((len(key) for key, _ in rows), default=0)
    for key, about in rows:
        say(f"{key:<{width}}  {about}")


def _list_method(name: str, as_json: bool) -> None:
    """The docstring of a method, its options, its presets and the switches of `fedloom ablate`."""
    from fedloom.comparison.entries import declared_switches
    from fedloom.config.describe import method_settings
    from fedloom.methods import documentation, presets

    settings, known, about = method_settings(name), presets(name), documentation(name)
    switches = declared_switches(name)
    if as_json:
        options = [setting._asdict() for setting in settings]
        found = {"method": name, "about": about, "options": options, "presets": dict(known)}
        print_json({**found, "switches": dict(switches)})
        return
    say(about)
    say("\noptions" if settings else "\nno options")
    _print_settings(settings)
    for title, values in (("presets", known), (f"switches, for `fedloom ablate {name}`", switches)):
        if values:
            say(f"\n{title}")
        for key, given in values.items():
            say(f"  {key}: " + (", ".join(f"{k} {v}" for k, v in given.items()) or "the defaults above"))


def _list_options(name: str | None, as_json: bool) -> None:
    """Every key of the configuration; name: only keys that begin so."""
    from fedloom.config.describe import tree_settings
    from fedloom.core.errors import ConfigError, unknown

    groups = tree_settings()
    if name is not None:
        known = {setting.key for group in groups for setting in group.settings}
        kept = [(g, [s for s in g.settings if f"{s.key}.".startswith(f"{name}.")]) for g in groups]
        groups = [group._replace(settings=settings) for group, settings in kept if settings]
        if not groups:
            raise ConfigError(unknown("key", name, known))
    if as_json:
        print_json({"options": [_plain(group) for group in groups]})
        return
    for group in groups:
        head = ": ".join(part for part in (group.title, group.about) if part)
        if head:
            say(head)
        _print_settings(group.settings)
        say("")


def _plain(group: Any) -> dict[str, Any]:
    return {**group._asdict(), "settings": [setting._asdict() for setting in group.settings]}


def _print_settings(settings: Sequence[Setting]) -> None:
    shown = ["required" if s.default is None else s.default for s in settings]
    wide = max((len(s.key) for s in settings), default=0), max(map(len, shown), default=0)
    for setting, default in zip(settings, shown, strict=True):
        say(f"  {setting.key:<{wide[0]}}  {default:<{wide[1]}}  {setting.allowed}")
        if setting.about:
            say(f"    {setting.about}")


def _methods() -> list[tuple[str, str]]:
    from fedloom.methods import summaries

    return [*summaries(), ("package.module:attribute", "a method of your own")]


def _datasets() -> list[tuple[str, str]]:
    from fedloom.data import catalogue

    return catalogue()


def _models() -> list[tuple[str, str]]:
    from fedloom.models.registry import names

    return [*names().items(), ("package.module:factory", "a network of your own")]


def _header(recipe: str) -> str:
    """All that a recipe says of itself before its first key."""
    from fedloom.config.layers import RECIPES

    lines = (RECIPES / f"{recipe}.yaml").read_text(encoding="utf-8").splitlines()
    said = lines[: next(k for k, line in enumerate(lines) if not line.startswith("#"))]
    return "\n".join(["", *(line.removeprefix("#").strip() for line in said)])


def _recipes() -> list[tuple[str, str]]:
    from fedloom.config.layers import RECIPES, recipe_names

    rows = []
    for name in recipe_names():
        lines = (RECIPES / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
        head = takewhile(lambda line: line.startswith("#") and line.strip() != "#", lines)
        rows.append((name, " ".join(line.lstrip("# ") for line in head)))
    return rows


def _claims() -> list[tuple[str, str]]:
    """What each claims, and whether a scale decides it, tries it without a verdict, or cannot."""
    from fedloom.claims import SCALES, claims

    return [
        (key, f"{claim.claim} ({', '.join(f'{scale}: {claim.ability(scale)}' for scale in SCALES)})")
        for key, claim in claims().items()
    ]
