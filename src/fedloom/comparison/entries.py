"""What a comparison is made of, in words: `fedprox@paper+mu=0.1` is a method, a preset and options."""

from __future__ import annotations

import json
import operator
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from fedloom.config.layers import check_values, parse
from fedloom.config.options import plain
from fedloom.config.words import shorten, shown
from fedloom.core.errors import ConfigError, unknown
from fedloom.evaluate.comparison import DOMAIN, RESULTS
from fedloom.report.columns import METRIC

Section = dict[str, Any]
FULL = "full"  # label of a method with all its parts
OPTION = re.compile(r"\s*([A-Za-z_]\w*)\s*=(.*)", re.DOTALL)


def sections(methods: Any) -> dict[str, Section]:
    """Label -> section `method`: name, and where they are given preset and options.

    methods: entries, a text of entries between commas, or a mapping label -> entry. An entry is a word
    (`name@preset+option=value+option=value` with YAML values; the word is then also the label) or a mapping of the
    section. Raises `ConfigError` for what is no entry, for none, and for a label that comes twice.
    """
    if isinstance(methods, str):
        methods = split(methods, ",") if methods.strip() else []
    if isinstance(methods, Mapping):
        check_values({"methods": dict.fromkeys(methods)})
        pairs = [(clean(name), section(entry)) for name, entry in methods.items()]
    elif isinstance(methods, Iterable):
        checked = [(entry, section(entry)) for entry in methods]
        pairs = [(clean(label(entry)), found) for entry, found in checked]
    else:
        raise ConfigError(f"methods must be a list such as ['fedavg', 'fedprox+mu=0.1'], got {shown(methods)}")
    if not pairs:
        raise ConfigError("methods is empty; name at least one, such as fedavg,fedprox+mu=0.1")
    check_labels("methods", [name for name, _ in pairs], "keep one of them, or tell them apart by their options")
    return dict(pairs)


def section(entry: Any) -> Section:
    """The section `method` of one entry."""
    check_values({"methods": entry})
    if isinstance(entry, Mapping):
        if not isinstance(entry.get("name"), str):
            raise ConfigError(
                f"methods: an entry needs the name of a method, as in {{'name': 'fedavg'}}, got {shown(entry)}"
            )
        return dict(entry)
    if not isinstance(entry, str):
        raise ConfigError(f"methods: an entry must be a word such as fedprox+mu=0.1 or a mapping, got {shown(entry)}")
    head, *given = split(entry, "+")
    name, at, preset = (part.strip() for part in head.partition("@"))
    if not name or (at and not preset):
        raise ConfigError(f"methods: '{shorten(entry)}' must read name, name@preset or name@preset+option=value")
    pairs = _pairs(entry, given)
    if (own := next((key for key, _ in pairs if key in ("name", "preset")), None)) is not None:
        raise ConfigError(f"methods: '{shorten(entry)}' sets {own} as an option; write name@preset+option=value")
    refuse_twice(f"methods: options of '{shorten(entry)}'", [key for key, _ in pairs], "keep one of them")
    options = {key: parse(value, f"methods: the value of {key} in '{shorten(entry)}'") for key, value in pairs}
    return {"name": name, **({"preset": preset} if at else {}), **options}


def _pairs(entry: str, given: Iterable[str]) -> list[tuple[str, str]]:
    """(option, text of its value); a plus that no option follows belongs to the value before it, as in 1e+3."""
    pairs: list[tuple[str, str]] = []
    for part in given:
        if found := OPTION.fullmatch(part):
            pairs.append((found[1], found[2]))
        elif pairs:
            pairs[-1] = (pairs[-1][0], f"{pairs[-1][1]}+{part}")
        else:
            raise ConfigError(
                f"methods: options of '{shorten(entry)}' are written +option=value, got '+{shorten(part)}'"
            )
    return pairs


def split(text: str, mark: str) -> list[str]:
    """Parts of a text between marks; a mark inside brackets or quotes ends nothing."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if letter == mark and not depth and not quote:
            parts.append("")
            continue
        parts[-1] += letter
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        else:
            depth = max(0, depth + (letter in "[{(") - (letter in ")}]"))
    return parts


def seeds(values: Any) -> tuple[int, ...]:
    """Seeds as whole numbers from 0, each once. values: numbers, or a text of them between commas."""
    check_values({"seeds": values})
    if isinstance(values, str):
        values = [_number(part.strip()) for part in values.split(",")] if values.strip() else []
    if not isinstance(values, Iterable) or isinstance(values, Mapping):
        raise ConfigError(f"seeds must be a list of whole numbers such as 0,1,2, got {shown(values)}")
    found = [_seed(value) for value in values]
    if not found:
        raise ConfigError("seeds is empty; name at least one, such as 0,1,2")
    refuse_twice("seeds", found, "a seed counts once")
    return tuple(found)


def reference(wanted: Any, labels: Iterable[str]) -> str:
    """The label that the others are tested against, by default the first."""
    known = list(labels)
    if wanted is None:
        return known[0]
    check_values({"reference": wanted})
    if (name := clean(wanted)) not in known:
        raise ConfigError(unknown("reference", shorten(name), known))
    return name


def metric(wanted: Any) -> str:
    """Key of the result whose test is shown, by default the final accuracy."""
    if wanted is None:
        return METRIC
    check_values({"metric": wanted})
    key = str(wanted).strip()
    if key not in RESULTS and not (key.startswith(DOMAIN) and key.endswith("]")):
        raise ConfigError(unknown("metric", shorten(key), [*RESULTS, f"{DOMAIN}NAME]"]))
    return key


def switches(method: str, wanted: Any = None) -> dict[str, Section]:
    """Option values of the switches that a method declares, all of them or those that are wanted, by name.

    wanted: names, or a text of them between commas.
    """
    known = declared_switches(method)
    if not known:
        raise ConfigError(
            f"method '{method}' declares no switches (ABLATIONS of its module); compare settings of it with "
            f"`fedloom compare --methods {method},{method}+option=value`"
        )
    if wanted is None:
        return {name: dict(options) for name, options in known.items()}
    check_values({"switches": wanted})
    if not isinstance(wanted, Iterable) or isinstance(wanted, Mapping):
        raise ConfigError(f"switches must be a list of {', '.join(known)}, got {shown(wanted)}")
    names = [part.strip() for part in wanted.split(",")] if isinstance(wanted, str) else list(wanted)
    for name in names:
        if not isinstance(name, str) or name not in known:
            raise ConfigError(unknown(f"switch of {method}", shorten(str(name)), known))
    if not names:
        raise ConfigError(f"switches is empty; name some of {', '.join(known)}, or leave it out for all")
    refuse_twice("switches", names, "keep one of them")
    return {name: dict(known[name]) for name in names}


def declared_switches(method: str) -> Mapping[str, Mapping[str, Any]]:
    """Every switch of a method. Raises `ConfigError` for one named `full` or with an option that the method lacks."""
    from fedloom.config.options import schema
    from fedloom.methods import ablations

    known = ablations(method)
    options = ["preset", *schema(method).model_fields]
    for name, given in known.items():
        if name == FULL:
            raise ConfigError(
                f"method '{method}' declares a switch named '{FULL}', which is what the method with all its parts is "
                "called; rename it in ABLATIONS of its module"
            )
        if (strange := next((key for key in given if key not in options), None)) is not None:
            raise ConfigError(f"switch {name} of {method}: {unknown('option', str(strange), options)}")
    return known


def label(entry: Any) -> str:
    """The word of an entry."""
    if not isinstance(entry, Mapping):
        return clean(entry)
    options = {key: value for key, value in entry.items() if key not in ("name", "preset")}
    preset = f"@{entry['preset']}" if "preset" in entry else ""
    return f"{entry.get('name')}{preset}" + "".join(f"+{key}={text(value)}" for key, value in options.items())


def clean(label: Any) -> str:
    """A label on one line, with single spaces."""
    return " ".join(str(label).split())


def check_labels(what: str, labels: list[str], mend: str) -> None:
    """Raise `ConfigError` for what cannot stand in a table: no text, control characters, the same twice."""
    for label in labels:
        if not label:
            raise ConfigError(f"{what}: a label is empty; name what is to stand in the table")
        if any(unicodedata.category(letter) == "Cc" for letter in label):
            raise ConfigError(f"{what}: the label {shown(label)} has control characters; write it in plain text")
    refuse_twice(what, labels, mend)


def text(value: Any) -> str:
    """A value as it is written in a word."""
    return value if isinstance(value, str) else json.dumps(value, default=plain)


def _number(text: str) -> Any:
    return int(text) if re.fullmatch(r"-?[0-9]{1,19}", text) else text


def _seed(value: Any) -> int:
    try:
        seed = operator.index(value)
    except TypeError:
        seed = -1
    if seed < 0 or isinstance(value, bool):
        raise ConfigError(f"seeds must be whole numbers from 0, such as 0,1,2, got {shown(value)}")
    return seed


def refuse_twice(what: str, found: list[Any], mend: str) -> None:
    """Raise `ConfigError` for a value that comes twice."""
    twice = next((value for value, count in Counter(found).items() if count > 1), None)
    if twice is not None:
        raise ConfigError(f"{what}: '{shorten(str(twice))}' is given twice; {mend}")
