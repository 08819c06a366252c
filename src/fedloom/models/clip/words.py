"""Class names as token ids, with room for learnable context between them.

Source: Zhou et al., "Learning to Prompt for Vision-Language Models" (IJCV 2022), whose layout is
[SOT] context [name . EOT]: n spare words keep the place of the n context vectors, positions are added afterwards,
and the text's feature is read at the token string's EOT.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fedloom.core.errors import ConfigError
from fedloom.models.clip.packages import open_clip

Position = Literal["end", "middle", "front"]
PLACEHOLDER = "x"


@dataclass(frozen=True)
class Phrases:
    """Sentences about classes. ids: int64 [C, L], padded with 0; eot: [C], where each one's feature is read.

    slots: [C, n], positions of the context vectors, in their order; n is 0 for fixed sentences. words: [C, L], bool,
    the positions of the class name's tokens.
    """

    ids: Tensor
    eot: Tensor
    slots: Tensor
    words: Tensor

    def of(self, classes: Tensor) -> Phrases:
        """Some of the sentences, cut behind the last token that counts."""
        eot = self.eot[classes]
        end = int(eot.max()) + 1 if len(eot) else 1
        return Phrases(self.ids[classes, :end], eot, self.slots[classes], self.words[classes, :end])


@functools.lru_cache(maxsize=1)
def tokenizer() -> Any:
    """open_clip's tokeniser; its vocabulary of 49,408 entries ships with the package."""
    return open_clip().SimpleTokenizer()


def encoded(text: str) -> list[int]:
    """Token ids of a piece of text without SOT and EOT; underscores count as spaces."""
    found: list[int] = tokenizer().encode(tokenizer().clean_fn(text.replace("_", " ")))
    return found


def learnable(names: Sequence[str], context: int, length: int, position: Position = "end") -> Phrases:
    """`context` slots around every name: before it, half before and half after it (`middle`), or after it (`front`).

    length: of the text tower. Raises `ConfigError` for a name that does not fit.
    """
    before = {"end": context, "middle": context // 2, "front": 0}[position]
    dot = encoded(".")
    rows, slots, spans = [], [], []
    for name in names:
        word = encoded(name)
        blank = encoded(PLACEHOLDER)
        first = 1 + before
        after = first + len(word)
        rows.append([*blank * before, *word, *blank * (context - before), *dot])
        slots.append([*range(1, first), *range(after, after + context - before)])
        spans.append(range(first, after))
    return _phrases(names, rows, slots, spans, length, f"{context} context vectors")


def fixed(names: Sequence[str], template: str, length: int) -> Phrases:
    """The template with every name in the place of its {}; no slots. Raises `ConfigError` where it does not fit."""
    if template.count("{}") != 1:
        raise ConfigError(f"template '{template[:60]}' must hold {{}} once, where the class name goes")
    head, tail = template.split("{}")
    before, behind = encoded(head), encoded(tail)
    rows = [[*before, *encoded(name), *behind] for name in names]
    first = 1 + len(before)
    spans = [range(first, first + len(encoded(name))) for name in names]
    return _phrases(names, rows, [[] for _ in names], spans, length, f"template '{template[:60]}'")


def _phrases(
    names: Sequence[str],
    rows: Sequence[list[int]],
    slots: Sequence[list[int]],
    spans: Sequence[range],
    length: int,
    around: str,
) -> Phrases:
    sot, eot = tokenizer().sot_token_id, tokenizer().eot_token_id
    ids, words = torch.zeros(len(rows), length, dtype=torch.long), torch.zeros(len(rows), length, dtype=torch.bool)
    for k, (name, row, span) in enumerate(zip(names, rows, spans, strict=True)):
        if not span:
            raise ConfigError(
                f"class name {name[:60]!r} has no tokens; give the class another with model.options.class_words"
            )
        if len(row) + 2 > length:
            raise ConfigError(
                f"class name '{name[:60]}' with {around} takes {len(row) + 2} tokens and the text tower reads "
                f"{length}; shorten the name (model.options.class_words) or the context"
            )
        ids[k, : len(row) + 2] = torch.tensor([sot, *row, eot])
        words[k, list(span)] = True
    ends = torch.tensor([len(row) + 1 for row in rows], dtype=torch.long)
    return Phrases(ids, ends, torch.tensor(slots, dtype=torch.long).view(len(rows), -1), words)
