"""When Fed-Duet's two kinds of experts train, and which of them are a client's own: slots by name.

Parameters fall into five components by their names in `fedloom.models.clip.duet.DuetNetwork`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase

from torch import Tensor

from fedloom.core import ConfigError
from fedloom.core.tree import Tensors
from fedloom.local.sgd import Phase

COMPONENTS: Mapping[str, str] = {
    "shared adapters": "*_adapters.*.shared.*",
    "routers": "*_adapters.*.router.*",
    "local adapters": "*_adapters.*.local.*",
    "local prompt": "context",
    "fusion": "fusion.*",
}
ADAPTERS, PROMPTS = ("*_adapters.*",), ("context", "fusion.*")

Rounds = Callable[[int, int, float], tuple[tuple[str, ...], ...]]


def halves(round: int, rounds: int, share: float) -> tuple[tuple[str, ...], ...]:
    """Adapters in the first floor(share R) rounds of a task, prompts in the rest; both together where R = 1."""
    if rounds == 1:
        return ((*ADAPTERS, *PROMPTS),)
    return (ADAPTERS,) if round < int(rounds * share) else (PROMPTS,)


def alternate(round: int, rounds: int, share: float) -> tuple[tuple[str, ...], ...]:
    """Adapters in every other round from the first on, prompts between; both together where R = 1."""
    if rounds == 1:
        return ((*ADAPTERS, *PROMPTS),)
    return (PROMPTS,) if round % 2 else (ADAPTERS,)


def inside(round: int, rounds: int, share: float) -> tuple[tuple[str, ...], ...]:
    """Adapters in the first epochs of every round, prompts in its last ones."""
    return (ADAPTERS, PROMPTS)


def together(round: int, rounds: int, share: float) -> tuple[tuple[str, ...], ...]:
    """Everything in every round."""
    return ((*ADAPTERS, *PROMPTS),)


STAGES: dict[str, Rounds] = {"halves": halves, "alternate": alternate, "inside": inside, "together": together}

# Components that stay on the clients and are restored in every round of a task; those of "released" are not restored.
KEPT: dict[str, tuple[str, ...]] = {
    "own": ("local adapters", "local prompt", "fusion"),
    "released": ("local adapters", "local prompt", "fusion"),
    "routers_too": ("local adapters", "local prompt", "fusion", "routers"),
    "nothing": (),
}


def phases(chosen: Iterable[tuple[str, ...]], names: Iterable[str], epochs: int) -> tuple[Phase, ...]:
    """Phases of local training over the parameters that exist; their epochs add up to `epochs`.

    A method without adapters, or without prompts, trains what it has in every round. Raises `ConfigError` for two
    phases and fewer than two epochs.
    """
    chosen, names = list(chosen), list(names)
    present = [patterns for patterns in chosen if matching(names, patterns)]
    if not present:
        present = [(*ADAPTERS, *PROMPTS)]
    if len(present) == 1:
        return (Phase(present[0]),)
    check_epochs(epochs)
    first = epochs - epochs // 2
    return (Phase(present[0], epochs=first), Phase(present[1], epochs=epochs // 2))


def check_epochs(epochs: int) -> None:
    """Raise `ConfigError` for fewer epochs than the two phases of a round need."""
    if epochs < 2:
        raise ConfigError(
            f"train 'inside' trains adapters and prompts one after the other in every round, and "
            f"training.local_epochs is {epochs}; set it to 2 or more"
        )


def matching(names: Iterable[str], patterns: Iterable[str]) -> list[str]:
    """The names that fit one of the patterns."""
    patterns = list(patterns)
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def part(tree: Tensors, patterns: Iterable[str]) -> dict[str, Tensor]:
    """The tensors whose names fit one of the patterns."""
    return {name: tree[name] for name in matching(tree, patterns)}
