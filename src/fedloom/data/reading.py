"""How a source is read: columns, splits, sizes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from fedloom.core import DataError
from fedloom.core.errors import closest, unknown
from fedloom.data.images import Size
from fedloom.data.ranges import at_least

FOLDERS, NO_DOMAINS = "folders", "none"  # words of data.domain
TEST_NAMES = ("test", "valid", "validation", "val", "dev")
SCORINGS = ("choice", "letter")


@dataclass(frozen=True)
class TextReading:
    """How texts are read.

    column: of texts to classify, None: detect. tokenizer: as JSON text, None: trained on the training split, with at
    most vocab_size entries. max_length: tokens kept of a text, None: as `fedloom.data.texts.LENGTHS` says. scoring: of
    questions, see `fedloom.data.text.Text`.
    """

    column: str | None = None
    tokenizer: str | None = None
    vocab_size: int = 8000
    max_length: int | None = None
    scoring: str = "choice"

    def __post_init__(self) -> None:
        at_least("data.vocab_size", self.vocab_size, 300)
        if self.max_length is not None:
            at_least("data.max_length", self.max_length, 2)
        if self.scoring not in SCORINGS:
            raise DataError(unknown("data.scoring", self.scoring, SCORINGS))


@dataclass(frozen=True)
class Reading:
    """Columns and splits to use (None: detect), image size (None: as stored), and how a missing test split is taken.

    domain: a column, `FOLDERS` (the first level of folders) or `NO_DOMAINS`; None: the data have no domains.
    """

    image: str | None = None
    label: str | None = None
    domain: str | None = None
    config: str | None = None
    train_split: str | None = None
    test_split: str | None = None
    image_size: Size | None = None
    test_fraction: float = 0.2
    split_seed: int = 0
    single: bool = False  # the data set has one published split; never look for a test split
    text: TextReading = field(default_factory=TextReading)

    def __post_init__(self) -> None:
        if not 0 < self.test_fraction < 1:
            raise DataError(f"data.test_fraction must be in (0, 1), got {self.test_fraction}")

    def key(self) -> dict[str, Any]:
        """The fields for the key of a cache; those of texts only where they are set."""
        found = asdict(self)
        return found if self.text != TextReading() else {k: v for k, v in found.items() if k != "text"}

    def splits(self, found: Iterable[str], where: str) -> tuple[str, str | None]:
        """Names of the train and of the test split among those found; no test split gives None."""
        names = sorted(found)
        train = self._named(self.train_split, "data.train_split", names, where)
        if train is None:
            train = "train" if "train" in names else names[0] if len(names) == 1 else None
        if train is None:
            raise DataError(f"{where} has the splits {', '.join(names)}; name one with data.train_split")
        test = self._named(self.test_split, "data.test_split", names, where)
        if test is None and not self.single:
            test = next((n for n in TEST_NAMES if n in names and n != train), None)
        if test == train:
            raise DataError(f"data.test_split and data.train_split are both '{train}'; leave data.test_split unset")
        return train, test

    def _named(self, name: str | None, key: str, names: list[str], where: str) -> str | None:
        if name is not None and name not in names:
            raise DataError(f"{key} '{name}' is not in {where}.{closest(name, names)} It has: {', '.join(names)}")
        return name
