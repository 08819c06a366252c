"""Questions with options: how published tables hold them, the prompt, and its token ids.

Source: Hendrycks et al., "Measuring Massive Multitask Language Understanding" (ICLR 2021) for questions and letters;
Zellers et al., "HellaSwag" (ACL 2019), whose texts are cleaned as the Language Model Evaluation Harness does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Any, NamedTuple

import numpy as np

from fedloom.core import DataError
from fedloom.data.text import PADDING
from fedloom.data.tokens import Where, encoded, prefix


class Question(NamedTuple):
    """A context and the options that may follow it."""

    context: str
    options: tuple[str, ...]


@dataclass(frozen=True)
class Form:
    """Columns of a table of questions.

    context_columns: texts that `context` makes one, the first of them never empty. choices: lists of texts. answer:
    which one is right, from 0. prompt: ends a question before an option. clean: of an option.
    """

    context_columns: tuple[str, ...]
    choices: str
    answer: str
    context: Callable[..., str]
    prompt: str
    clean: Callable[[str], str] = str


def _cleaned(text: str) -> str:
    """The markup of WikiHow taken out: " [title]" ends a sentence, other marks go."""
    return re.sub(r" +", " ", re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))).strip()


def _situation(activity: str, first: str, second: str) -> str:
    return _cleaned(f"{activity}: {first} {second.capitalize()}")


FORMS = (
    Form(("question",), "choices", "answer", str, "\nAnswer:"),
    Form(("activity_label", "ctx_a", "ctx_b"), "endings", "label", _situation, "", _cleaned),
)


def form_of(columns: Sequence[str]) -> Form | None:
    """The form that a table's columns have; None where they hold no questions. The answer may be absent."""
    return next((f for f in FORMS if {*f.context_columns, f.choices} <= {*columns}), None)


def read_questions(columns: Mapping[str, Sequence[Any]], form: Form, where: Where) -> list[Question]:
    """Contexts and options of every row.

    Raises `DataError` naming row and column for an empty text, and for another number of options than in the first row.
    """
    found: list[Question] = []
    for row, options in enumerate(columns[form.choices]):
        if not isinstance(options, list | tuple | np.ndarray) or len(options) < 2:
            raise DataError(
                f"{where(row)} has no list of two options or more in column '{form.choices}'; mend or drop it"
            )
        if found and len(options) != len(found[0].options):
            raise DataError(
                f"{where(row)} has {len(options)} options in column '{form.choices}', but the first row "
                f"{len(found[0].options)}; all questions of a data set need the same number"
            )
        if len(options) > len(ascii_uppercase):
            raise DataError(f"{where(row)} has {len(options)} options in column '{form.choices}'; at most 26 are read")
        texts = [columns[name][row] for name in form.context_columns]
        given = (*zip(form.context_columns, texts, strict=True), *((form.choices, option) for option in options))
        for name, text in given:
            if not isinstance(text, str | None):
                kind = type(text).__name__
                raise DataError(f"{where(row)} has a {kind} in column '{name}', which must hold texts; mend it")
        cleaned = tuple(form.clean(option or "") for option in options)
        for name, text in ((form.context_columns[0], texts[0]), *((form.choices, option) for option in cleaned)):
            if not text or not text.strip():
                raise DataError(f"{where(row)} has an empty text in column '{name}'; fill or drop it")
        found.append(Question(form.context(*(text or "" for text in texts)), cleaned))
    return found


def read_answers(values: Sequence[Any], options: int, column: str, where: Where) -> np.ndarray:
    """Positions of the right options, int64 [n]; `DataError` naming row and column for any other value."""
    found = np.empty(len(values), np.int64)
    for row, value in enumerate(values):
        text = str(value).strip()
        if isinstance(value, bool) or not re.fullmatch(r"\d{1,3}", text, re.ASCII) or int(text) >= options:
            raise DataError(
                f"{where(row)} has the answer {value!r} in column '{column}', which must be 0 to {options - 1}; "
                "mend or drop it"
            )
        found[row] = int(text)
    return found


def prompted(question: Question, scoring: str, prompt: str) -> Question:
    """What a model reads and what is scored after it.

    scoring "choice": the question and `prompt`, and its options; "letter": the question with its options listed, and
    their letters.
    """
    if scoring == "choice":
        return Question(question.context + prompt, question.options)
    letters = ascii_uppercase[: len(question.options)]
    listed = "".join(f"\n{k}. {option}" for k, option in zip(letters, question.options, strict=True))
    return Question(f"{question.context}{listed}\nAnswer:", tuple(letters))


def encode_questions(
    tokenizer: Any, questions: Sequence[Question], max_length: int, where: Where
) -> tuple[np.ndarray, int]:
    """int32 [n, 2, options, max_length] as `Text` tells it, and how many questions were cut.

    Questions as `prompted` gives them; an option follows after a space. Before it stands what the tokeniser's
    post-processor puts before a text (a BOS token, where it has one); nothing is put behind. An option is kept whole,
    its context loses tokens on the left. Raises `DataError` for an option that leaves no room for any of it.
    """
    count = len(questions[0].options)
    found = np.zeros((len(questions), 2, count, max_length), np.int32)
    found[:, 0] = PADDING
    start, cut, longest = prefix(tokenizer, questions[0].context), np.zeros(len(questions), bool), (0, 0)
    contexts = encoded(tokenizer, [q.context for q in questions], special=False)
    whole = encoded(tokenizer, [f"{q.context} {o}" for q in questions for o in q.options], special=False)
    for row, question in enumerate(questions):
        context = contexts[row].ids
        for k, option in enumerate(question.options):
            scored = whole[row * count + k].ids[len(context) :]
            if not scored:
                raise DataError(f"{where(row)} has the option {option[:40]!r} without any token; fill or drop it")
            longest = max(longest, (len(scored), row))
            room = max(1, max_length - len(start) - len(scored))
            ids = [*start, *context[-room:], *scored][:max_length]
            found[row, 0, k, : len(ids)] = ids
            found[row, 1, k, len(ids) - len(scored) : len(ids)] = len(option)
            cut[row] |= room < len(context)
    if (need := len(start) + 1 + longest[0]) > max_length:
        raise DataError(
            f"{where(longest[1])} has an option of {longest[0]} tokens, which leaves no room for its question; set "
            f"data.max_length to {need} at least, now {max_length}"
        )
    return found, int(cut.sum())
