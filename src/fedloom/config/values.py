"""Values of the tree: their types and bounds, and the base of its sections."""

from __future__ import annotations

from typing import Annotated, Any

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import BaseModel, ConfigDict, Discriminator, PlainValidator

# Upper bounds: numbers beyond them are slips of the hand. Training in 32 bits cannot use rates of 1e38, and lists
# of trips, clients or stages would fill the memory before the first round.
MOST, LARGEST, MOST_WORKERS = 10**6, 1e6, 256

Count = Annotated[int, Ge(1), Le(MOST)]
Natural = Annotated[int, Ge(0), Le(MOST)]
Clients = Annotated[int, Ge(1), Le(10**7)]
Threads = Annotated[int, Ge(1), Le(1024)]
Stages = Annotated[int, Ge(1), Le(10_000)]
Pixels = Annotated[int, Ge(1), Le(8192)]
Seed = Annotated[int, Ge(0), Le(2**63 - 1)]
Positive = Annotated[float, Gt(0), Le(LARGEST)]
NonNegative = Annotated[float, Ge(0), Le(LARGEST)]
Fraction = Annotated[float, Ge(0), Le(1)]
Share = Annotated[float, Gt(0), Le(1)]
OpenFraction = Annotated[float, Gt(0), Lt(1)]
Below1 = Annotated[float, Ge(0), Lt(1)]
Words = Annotated[str, MinLen(1)]


def is_int(value: Any, low: int = 0, most: int = MOST) -> bool:
    """Whether a value is a whole number within bounds, and no boolean."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= most


def count_or(*words: str, most: int = MOST) -> PlainValidator:
    """Check for one of the words, or a whole number from 1 on."""

    def check(value: Any) -> Any:
        if value in words or is_int(value, 1, most):
            return value
        bound = f"at most {most}" if is_int(value, 1, value if isinstance(value, int) else 0) else "at least 1"
        raise ValueError(f"must be {' or '.join(words)} or a whole number of {bound}")

    return PlainValidator(check)


def choice_of(key: str, default: str, prefixes: tuple[str, ...] = ()) -> Discriminator:
    """Discriminator on a choice key; `flwr:Name` falls under the tag `flwr:`."""

    def tag(value: Any) -> str:
        found = value.get(key, default) if isinstance(value, dict) else getattr(value, key, default)
        return next((p for p in prefixes if isinstance(found, str) and found.startswith(p)), found)

    return Discriminator(tag)


class Section(BaseModel):
    """Base: strict types, unknown keys refused, NaN and infinity refused, immutable."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())
