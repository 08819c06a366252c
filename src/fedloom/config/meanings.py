"""What options and keys mean, read where it is told: docstrings of factories and sections, and meanings.yaml."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import yaml

TOLD = Path(__file__).with_suffix(".yaml")
UNNAMED = "fedavg"  # whose factory explains the options that others share with it


class Explained(NamedTuple):
    """A text without what it says of single names, and name -> meaning."""

    about: str
    meanings: Mapping[str, str]


def explained(text: str, names: Iterable[str]) -> Explained:
    """Split a text at `name: meaning` and `name, name: meaning`, of these names, where a sentence or a line begins."""
    known = "|".join(sorted(map(re.escape, names), key=len, reverse=True))
    lines = re.sub(r"\n[ \t]+", " ", text)
    found = list(re.finditer(rf"(?:^|\n|[.;]\s+)((?:{known})(?:, (?:{known}))*): ", lines)) if known else []
    ends = [match.start() for match in found[1:]] + [len(lines)] * bool(found)
    meanings = {
        name: " ".join(lines[match.end() : end].split()).rstrip(".;")
        for match, end in zip(found, ends, strict=True)
        for name in match[1].split(", ")
    }
    about = " ".join((lines[: found[0].start()] if found else lines).split())
    return Explained(f"{about}." if found and about and not about.endswith(".") else about, meanings)


@cache
def option_meanings(method: str) -> Mapping[str, str]:
    """Option -> meaning, of the factory's docstring or, for an option that FedAvg has too, of FedAvg's; else ""."""
    from fedloom.config.options import schema
    from fedloom.methods import load

    options = schema(method).model_fields
    own = explained(inspect.getdoc(load(method)) or "", options).meanings
    shared = {} if method == UNNAMED else option_meanings(UNNAMED)
    return {name: own.get(name) or shared.get(name, "") for name in options}


@cache
def told() -> Mapping[str, str]:
    """Dotted key of the configuration -> meaning, where no docstring says it."""
    return dict(yaml.safe_load(TOLD.read_text(encoding="utf-8")))
