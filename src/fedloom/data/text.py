"""What a source of texts says about itself, and stored token ids -> model inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from fedloom.core.batches import Inputs

PADDING = -1  # in stored ids; no tokeniser needs a token for it


@dataclass(frozen=True)
class Text:
    """How the texts of a source were stored.

    kind: "tokens", a text with a class, stored as int32 [n, max_length]: token ids, then `PADDING`; "choices", a
    question with options, int32 [n, 2, options, max_length]: plane 0 holds the ids of question and option, plane 1 is
    0 but at the option's tokens, which hold the number of its characters. vocab_size: token ids are below it.
    tokenizer: JSON text of a tokeniser of the library `tokenizers`. scoring: of questions, "choice" where the options
    are scored themselves, "letter" where they are listed and their letters are scored; empty for "tokens". prompt: what
    ends a question before an option.
    """

    kind: Literal["tokens", "choices"]
    vocab_size: int
    tokenizer: str
    max_length: int
    scoring: str = ""
    prompt: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The fields as JSON-able values."""
        return asdict(self)


@dataclass(frozen=True)
class PrepareText:
    """Stored ids -> {"input_ids": int64 [batch, S], "attention_mask": bool [batch, S]}, choices with "scored" int64.

    With choices all are [batch, options, S]. S is the longest row of the batch: padding that no row needs is cut off.
    At padding "input_ids" is 0, and the mask False.
    """

    def __call__(self, x: Inputs, rng: torch.Generator | None = None) -> Inputs:
        """Model inputs; a mapping passes. rng is not used, for nothing is drawn."""
        if isinstance(x, Mapping):
            return x
        planes = x.unbind(1) if x.dim() == 4 else (x,)
        mask = planes[0] != PADDING
        width = max(1, int(mask.sum(-1).max())) if mask.numel() else 1
        found = {"input_ids": planes[0].clamp_min(0), "attention_mask": mask}
        if len(planes) == 2:
            found["scored"] = planes[1]
        return {
            name: values[..., :width].to(torch.bool if name == "attention_mask" else torch.int64)
            for name, values in found.items()
        }
