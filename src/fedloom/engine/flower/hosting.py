"""Which logical clients a node hosts, as text: `0-4,7`."""

from __future__ import annotations

import itertools
import re

from fedloom.core.errors import ConfigError

LONGEST = 10_000  # characters of a list; ranges keep real ones far shorter


def parse_clients(text: str | int, total: int) -> tuple[int, ...]:
    """Client ids in rising order from numbers and ranges, both ends of a range included.

    text: as in `--node-config 'clients="0-4,7"'`; a single client may be a bare number. total: clients of the run.
    Raises `ConfigError` for what names no client, a client twice, or a client that the run does not have.
    """
    found: list[range] = []
    for part in _parts(str(text)):
        ends = re.fullmatch(r"([0-9]{1,9})(?:\s*-\s*([0-9]{1,9}))?", part)
        if ends is None:
            raise ConfigError(f"clients '{_short(str(text))}': '{_short(part)}' is no client; write 3 or 0-4")
        first, last = int(ends[1]), int(ends[2] or ends[1])
        if last < first:
            raise ConfigError(f"clients '{_short(str(text))}': the range {part} runs backwards; write {last}-{first}")
        if last >= total:
            raise ConfigError(
                f"clients '{_short(str(text))}': there is no client {last}; the run has {total}, "
                f"numbered from 0 to {total - 1}"
            )
        found.append(range(first, last + 1))
    found.sort(key=lambda ids: ids.start)
    for before, after in itertools.pairwise(found):
        if after.start < before.stop:
            raise ConfigError(f"clients '{_short(str(text))}': client {after.start} is named twice; name it once")
    return tuple(client for ids in found for client in ids)


def _parts(text: str) -> list[str]:
    if len(text) > LONGEST:
        raise ConfigError(
            f"clients '{_short(text)}' has {len(text)} characters, at most {LONGEST} are read; write ranges such as 0-4"
        )
    if not text.strip():
        raise ConfigError('clients is empty; name the clients of this node, such as clients="0-4,7"')
    return [part.strip() for part in text.split(",")]


def spread(total: int, nodes: int) -> list[str]:
    """Split `total` clients into contiguous blocks, one text per node; sizes differ by at most one.

    Raises `ConfigError` unless every node gets a client.
    """
    if not 1 <= nodes <= total:
        raise ConfigError(f"nodes must be in [1, {total}] for {total} clients, got {nodes}")
    ends = [total * k // nodes for k in range(nodes + 1)]
    return [str(low) if high - low == 1 else f"{low}-{high - 1}" for low, high in itertools.pairwise(ends)]


def _short(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:37]}..."
