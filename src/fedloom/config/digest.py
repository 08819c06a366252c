"""The hash that names a configuration: equal for runs that must give equal results."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping
from typing import Any

NEUTRAL = (
    ("engine", "name"),
    ("engine", "runtime"),
    ("engine", "workers"),
    ("engine", "join"),
    ("data", "root"),
    ("data", "tokenizer"),
)

# Options that came later, with the value that means what was done before them: left out at that value, so that runs
# and comparisons made before are still found.
LATER: dict[tuple[str, str], Any] = {
    ("data", "domain"): None,
    ("data", "text"): None,
    ("data", "vocab_size"): 8000,
    ("data", "max_length"): None,
    ("data", "scoring"): "choice",
    ("partition", "by"): "class",
    ("method", "scope"): "all",
    ("method", "align"): 0.0,
    ("method", "stability_weight"): 0.0,
    ("method", "keep_channels"): 1.0,
}


def config_hash(tree: Mapping[str, Any], fingerprint: str, device: str, memory_format: str) -> str:
    """SHA-256 of the resolved tree in canonical JSON, without what cannot change a result.

    Left out: engine.name, runtime, workers and join, data.root and tokenizer (the data's content `fingerprint` stands
    for them, and for the path in `folder:` and `parquet:` names) and the tracker; output folder and logging are
    no part of the tree. device: kind of the device that was found. memory_format: what the run really uses.
    """
    kept: dict[str, Any] = copy.deepcopy(dict(tree))
    for section, key in NEUTRAL:
        kept.get(section, {}).pop(key, None)
    kept.pop("tracker", None)
    kept["data"]["name"] = data_kind(kept["data"]["name"])
    kept["engine"]["device"] = device
    kept["training"]["memory_format"] = memory_format
    for (section, key), value in LATER.items():
        if kept.get(section, {}).get(key) == value:
            kept[section].pop(key, None)
    text = json.dumps({"tree": kept, "data": fingerprint}, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def data_kind(name: str) -> str:
    """The name without what depends on the machine: `folder:/home/me/x` -> `folder:`."""
    head, colon, _ = name.partition(":")
    return head + colon if colon else name
