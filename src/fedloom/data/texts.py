"""Texts and questions -> a source: test split, tokeniser, token ids, rare domains."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from fedloom.core import DataError
from fedloom.data.choices import Question, encode_questions, prompted
from fedloom.data.reading import TextReading
from fedloom.data.source import Source, assemble, held_out
from fedloom.data.text import Text
from fedloom.data.tokens import Where, encode_texts, load_tokenizer, train_tokenizer, vocabulary

RARE = 10  # rows below which a domain of questions is put to the others
OTHER = "other"
LENGTHS = {"tokens": 128, "choices": 256}  # tokens kept of a text, unless told

Example = TypeVar("Example", str, Question)


def checked_texts(values: Sequence[Any], column: str, where: Where) -> list[str]:
    """The values; `DataError` naming row and column unless each is a text that is not empty."""
    for row, value in enumerate(values):
        if not isinstance(value, str):
            kind = "nothing" if value is None else f"a {type(value).__name__}"
            raise DataError(f"{where(row)} has {kind} in {column}, which must hold texts; fill or drop it")
        if not value.strip():
            raise DataError(f"{where(row)} has an empty text in {column}; fill or drop it")
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise DataError(f"{where(row)} has a text in {column} that is no Unicode ({error}); mend it") from error
    return list(values)


def encode(text: Text, examples: Sequence[Any], where: Where) -> tuple[np.ndarray, int]:
    """Texts or questions as the source of `text` stores them, and how many were cut."""
    tokenizer = load_tokenizer(text.tokenizer)
    if text.kind == "tokens":
        return encode_texts(tokenizer, examples, text.max_length, where)
    questions = [prompted(question, text.scoring, text.prompt) for question in examples]
    return encode_questions(tokenizer, questions, text.max_length, where)


def text_source(
    name: str,
    splits: Sequence[tuple[list[Example], np.ndarray] | tuple[list[Example], np.ndarray, np.ndarray]],
    class_names: Sequence[str],
    reading: TextReading,
    *,
    where: Sequence[Where],
    domain_names: Sequence[str] = (),
    test_fraction: float = 0.2,
    split_seed: int = 0,
    notes: Sequence[str] = (),
    prompt: str = "",
    **extra: Any,
) -> Source:
    """Split off a test part of a single split, train a tokeniser where none is given, and encode.

    splits: train and perhaps test, each of examples, class ids and, with domains, domain ids. where: per split, what
    names a row in an error. prompt: of questions, see `Text`. The test part of questions is `test_fraction` of every
    domain, whatever the answer; else as `source.assemble` says. The tokeniser is trained on the training part alone.
    """
    for split, part in zip(("train", "test"), splits, strict=False):
        if not len(part[0]):
            raise DataError(f"data '{name}': the {split} split is empty; it needs at least one example")
    questions = isinstance(splits[0][0][0], Question)
    parts = [(*part, np.arange(len(part[0]))) for part in splits]  # the last: rows in the file
    if len(parts) == 1:
        ids = splits[0][-1:] if questions else splits[0][1:]
        taken = held_out(*ids, fraction=test_fraction, seed=split_seed, where=name)
        parts, where = [_rows(parts[0], ~taken), _rows(parts[0], taken)], [where[0], where[0]]
    text = _text(parts[0][0], "choices" if questions else "tokens", prompt, reading)
    encoded, said = [], []
    for split, part, place in zip(("training", "test"), parts, where, strict=True):
        ids, cut = encode(text, part[0], lambda row, part=part, place=place: place(int(part[-1][row])))
        encoded.append((ids, *part[1:-1]))
        kept = "the end of their context" if questions else "their beginning"
        if cut:
            said.append(
                f"{cut} of {len(ids)} {split} texts have more than data.max_length {text.max_length} tokens; "
                f"{kept} is kept"
            )
    return assemble(
        name, encoded[0], encoded[1], class_names, domain_names=domain_names, notes=[*notes, *said], text=text, **extra
    )


def _rows(part: Sequence[Any], mask: np.ndarray) -> tuple[Any, ...]:
    return ([part[0][row] for row in np.flatnonzero(mask)], *(ids[mask] for ids in part[1:]))


def _text(training: Sequence[Any], kind: Any, prompt: str, reading: TextReading) -> Text:
    scoring = reading.scoring if kind == "choices" else ""
    tokenizer = reading.tokenizer
    if tokenizer is None:
        words = training if kind == "tokens" else _words(training, scoring, prompt)
        tokenizer = train_tokenizer(words, reading.vocab_size, questions=kind == "choices")
    length = LENGTHS[kind] if reading.max_length is None else reading.max_length
    return Text(kind, vocabulary(load_tokenizer(tokenizer)), tokenizer, length, scoring, prompt)


def _words(questions: Sequence[Question], scoring: str, prompt: str) -> Iterator[str]:
    for question in questions:
        context, options = prompted(question, scoring, prompt)
        yield context
        yield from (f" {option}" for option in options)


def without_rare(splits: Sequence[Sequence[str]]) -> tuple[list[np.ndarray], list[str]]:
    """Domain labels in which those with fewer than `RARE` rows over all splits read `OTHER`, and a note on them."""
    names, counts = np.unique(np.concatenate([np.asarray(part, str) for part in splits]), return_counts=True)
    rare = names[counts < RARE]
    if len(rare) < 2 or len(rare) == len(names):
        return [np.asarray(part, str) for part in splits], []
    found = [np.where(np.isin(part, rare), OTHER, np.asarray(part, str)) for part in splits]
    note = f"{len(rare)} domains with fewer than {RARE} questions each were put together as '{OTHER}'"
    return found, [note]
