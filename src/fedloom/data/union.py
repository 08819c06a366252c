"""Several data sets as the domains of one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedloom.core import DataError
from fedloom.data.source import Source, assemble


def domain_names(name: str, parts: Sequence[Source]) -> tuple[str, ...]:
    """The last part of every data set's name: `flwrlabs/usps` -> `usps`, `folder:/data/amazon` -> `amazon`."""
    names = [re.split(r"[/:\\]", part.name.rstrip("/\\"))[-1].removesuffix(".parquet") for part in parts]
    twice = next((n for n in names if names.count(n) > 1), None)
    if twice is not None:
        raise DataError(
            f"data.name '{name}' names two domains '{twice}'; give each data set once, by a name of its own"
        )
    return tuple(names)


def union(name: str, parts: Sequence[Source], **extra: Any) -> Source:
    """Put data sets together; each is a domain, in the order given.

    Classes are those of the first part: matched by name where both have the same names, else by their order; a note
    says which. Grey images are repeated in the channels of the others. Statistics are measured over all train splits.
    Raises `DataError` for other numbers of classes, for inputs of other shapes or kinds, and for texts with tokenisers
    of their own.
    """
    domains = domain_names(name, parts)
    if len({part.text for part in parts}) > 1:
        raise DataError(
            f"data '{name}': texts can be the domains of one data set only with one tokeniser; set data.tokenizer"
        )
    maps, notes = _matched(domains, parts)
    channels = max(part.input_shape[0] for part in parts if len(part.input_shape) == 3) if _images(parts) else 0
    splits = []
    for split in ("train", "test"):
        xs = [_widened(getattr(part, f"x_{split}").numpy(), channels) for part in parts]
        _check_alike(name, domains, xs)
        ys = [ids[getattr(part, f"y_{split}").numpy()] for ids, part in zip(maps, parts, strict=True)]
        where = np.repeat(np.arange(len(parts)), [len(y) for y in ys])
        splits.append((np.concatenate(xs), np.concatenate(ys), where))
    notes += [f"{d}: {note}" for d, part in zip(domains, parts, strict=True) for note in part.notes]
    return assemble(
        name, splits[0], splits[1], parts[0].class_names, domain_names=domains, notes=notes, text=parts[0].text, **extra
    )


def _matched(domains: Sequence[str], parts: Sequence[Source]) -> tuple[list[np.ndarray], list[str]]:
    """Per part, its class ids -> those of the first part; and sentences on how they were found."""
    first, maps = parts[0].class_names, [np.arange(parts[0].num_classes)]
    by: dict[str, list[str]] = {"name": [], "order": []}
    for domain, part in zip(domains[1:], parts[1:], strict=True):
        names = part.class_names
        if len(names) != len(first):
            raise DataError(
                f"data '{domain}' has {len(names)} classes and '{domains[0]}' {len(first)}; the domains of one data "
                "set need the same classes"
            )
        same = set(names) == set(first)
        if common := set(names) & set(first) if not same else set():
            raise DataError(
                f"data '{domain}' and '{domains[0]}' share the class '{min(common)}' but not all of their classes; "
                "give the domains of one data set the same class names, or none in common to match them by order"
            )
        maps.append(np.asarray([first.index(n) for n in names]) if same else maps[0])
        by["name" if same else "order"].append(domain)
    notes = [f"classes of {', '.join(d)} were matched to those of {domains[0]} by {how}" for how, d in by.items() if d]
    return maps, notes


def _images(parts: Sequence[Source]) -> bool:
    return all(len(part.input_shape) == 3 for part in parts)


def _widened(x: np.ndarray, channels: int) -> np.ndarray:
    return np.repeat(x, channels, axis=1) if channels > 1 and x.shape[1] == 1 else x


def _check_alike(name: str, domains: Sequence[str], xs: Sequence[np.ndarray]) -> None:
    for domain, x in zip(domains[1:], xs[1:], strict=True):
        if x.dtype != xs[0].dtype:
            raise DataError(
                f"data '{name}': '{domain}' holds {x.dtype} inputs and '{domains[0]}' {xs[0].dtype}; all domains need "
                "one kind, 8-bit images or floats"
            )
        if x.shape[1:] != xs[0].shape[1:]:
            found, want = ("x".join(map(str, a.shape[1:])) for a in (x, xs[0]))
            raise DataError(
                f"data '{name}': inputs of '{domain}' are {found} and those of '{domains[0]}' {want}; set "
                "data.image_size to bring images that are read from files to one size"
            )
