"""Class names as words that stand in a sentence."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedloom.core import DataError
from fedloom.data.catalogue import ALIASES

FILE = "class_words.json"
MISSPELT = {"cra": "crab"}  # CIFAR-100 on the hub
WORDNET = re.compile(r"n\d{8}")
OPTION = "model.options.class_words"


def class_words(names: Sequence[str], given: Any = None, *, data: str = "", root: str | None = None) -> tuple[str, ...]:
    """One word or phrase per class, in class order.

    names: of the classes. given: the words; a list in class order, a mapping name -> words, or the path of a JSON file
    of either. Without, `class_words.json` beside the data is taken, then the names themselves, and for WordNet ids the
    lemmas that timm ships. Of a mapping's words for a class (a list, or a text with commas) the first counts;
    underscores count as spaces. data, root: `data.name` and `data.root`.
    Raises `DataError` for words that cannot be read, for classes without one, and for WordNet ids that are not known.
    """
    where = OPTION
    if given is None and (path := _beside(data, root)) is not None:
        given, where = path, f"'{path}'"
    if isinstance(given, str | Path):
        given, where = read_words(given), f"'{given}'"
    if given is None:
        if all(map(WORDNET.fullmatch, names)):
            return _lemmas(names, data)
        return tuple(_plain(MISSPELT.get(name, name), name, "data.name") for name in names)
    if isinstance(given, Mapping):
        return _mapped(names, given, where)
    if not isinstance(given, list | tuple):
        raise DataError(
            f"{where} must be a list of words in class order, a mapping name -> words or a path of a JSON file"
        )
    if len(given) != len(names):
        raise DataError(f"{where} has {len(given)} words and the data have {len(names)} classes; give one for each")
    return tuple(_plain(word, name, where) for word, name in zip(given, names, strict=True))


def _mapped(names: Sequence[str], given: Mapping[str, Any], where: str) -> tuple[str, ...]:
    missing = [name for name in names if name not in given]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise DataError(f"{where} has no word for class '{missing[0]}'{more}; add it")
    return tuple(_plain(_first(given[name]), name, where) for name in names)


def _first(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return value[0] if value else ""
    return value.partition(",")[0] if isinstance(value, str) else value


def _plain(word: Any, name: str, where: str) -> str:
    found = " ".join(word.replace("_", " ").split()) if isinstance(word, str) else ""
    if not found:
        raise DataError(f"{where}: the word of class '{name}' must be a text, got {repr(word)[:60]}")
    if any("\ud800" <= letter <= "\udfff" for letter in found):  # a configuration with them is written, and not read
        raise DataError(
            f"{where}: the word of class {name!r} has characters that are no text (lone surrogates); give another with "
            f"{OPTION}"
        )
    return found


def read_words(given: str | Path) -> Any:
    """What a JSON file of words holds. Raises `DataError`."""
    try:
        path = Path(given).expanduser()
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or f"no JSON: {error}"
        raise DataError(
            f"{OPTION}: cannot read '{str(given)[:200]}' ({reason}); give the path of a JSON file"
        ) from error


def _beside(data: str, root: str | None) -> Path | None:
    """The file of words beside the data: in the repository below the root, or in the folder that the name gives."""
    scheme, _, rest = data.partition(":")
    base = root or os.environ.get("FEDLOOM_DATA")
    if scheme == "domains":
        return _beside(rest.partition(",")[0].strip(), root)
    if scheme in ("folder", "parquet"):
        given = Path(rest).expanduser()
        folder = given if given.is_dir() else given.parent
    elif base is not None and scheme == data and data:
        folder = Path(base).expanduser() / ALIASES.get(data.lower(), data)
    else:
        return None
    return folder / FILE if (folder / FILE).is_file() else None


def _lemmas(names: Sequence[str], data: str) -> tuple[str, ...]:
    """The first lemma of every synset, from timm."""
    try:
        from timm.data import ImageNetInfo

        known = ImageNetInfo("imagenet-22k")
        return tuple(_plain(_first(known.label_name_to_description(name)), name, "timm") for name in names)
    except (ImportError, KeyError) as error:
        lacks = (
            f"timm does not know {error}" if isinstance(error, KeyError) else "timm, which explains them, is missing"
        )
        raise DataError(
            f"data.name '{data}' names its classes by WordNet ids such as {names[0]}, and {lacks}; give their words "
            f"with {OPTION}, the path of a JSON file id -> words, put it beside the data as {FILE}, or install timm "
            "(extra 'vision')"
        ) from error
