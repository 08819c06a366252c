"""Tokenisers: trained on the training texts, from a file, or of the hub; and texts -> token ids."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.core import ConfigError, DataError
from fedloom.data.text import PADDING

BOS = "<s>"  # of trained tokenisers, before questions
FILE = "tokenizer.json"

Where = Callable[[int], str]  # row -> words that name it in an error


def _library() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise ConfigError("texts need the package tokenizers; install the extra: pip install 'fedloom[llm]'") from error
    return tokenizers


def read_tokenizer(name: str) -> str:
    """The JSON text of a tokeniser: a `tokenizer.json`, a folder that holds one, or a repository of the hub.

    Raises `DataError` for a path or name where there is none, and for files that are no tokeniser.
    """
    path = Path(name).expanduser()
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        if path.exists() or not re.fullmatch(r"[\w.-]{1,96}(/[\w.-]{1,96})?", name, re.ASCII):
            raise DataError(
                f"data.tokenizer '{name[:200]}' is neither a {FILE}, nor a folder that holds one, nor a name of the hub"
            )
        file = _fetched(name)
    try:
        return _plain(_library().Tokenizer.from_str(file.read_text(encoding="utf-8"))).to_str()
    except ConfigError:
        raise
    except Exception as error:  # the library raises a bare Exception
        reason = (str(error).splitlines() or [""])[0][:200]
        raise DataError(f"data.tokenizer '{name}' cannot be read ({reason}); give a {FILE}") from error


def _fetched(name: str) -> Path:
    import huggingface_hub

    from fedloom.data.hub import offline_unless_reached, quiet

    try:
        with offline_unless_reached(), quiet("huggingface_hub"):
            return Path(huggingface_hub.hf_hub_download(name, FILE))
    except Exception as error:  # the library raises many kinds: offline, missing, gated
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(
            f"data.tokenizer '{name}' is neither a path, nor in the Hugging Face cache, nor to be had from the hub "
            f"({reason}); check the name and the network, or give the path of a {FILE}"
        ) from error


def _plain(tokenizer: Any) -> Any:
    """Without the truncation and padding that its file asks for: both are ours."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def load_tokenizer(text: str) -> Any:
    """The tokeniser of a JSON text that `read_tokenizer` or `train_tokenizer` gave."""
    return _library().Tokenizer.from_str(text)


def train_tokenizer(texts: Iterable[str], vocab_size: int, *, questions: bool = False) -> str:
    """Train a byte-level BPE (Sennrich et al., ACL 2016; bytes as in GPT-2) and return its JSON text.

    The same texts give the same tokeniser. It has no unknown and no padding token. Texts to classify are put into lower
    case, which few examples of a word are better for; questions keep theirs, and get `BOS` before them, for their first
    token is to be predicted too. vocab_size: most entries; few texts give fewer, the 256 bytes are always there.
    """
    library = _library()
    tokenizer = library.Tokenizer(library.models.BPE())
    if not questions:
        tokenizer.normalizer = library.normalizers.Lowercase()
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=not questions)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS] if questions else [],
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if questions:
        tokenizer.post_processor = library.processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
        )
    return str(tokenizer.to_str())


def vocabulary(tokenizer: Any) -> int:
    """The smallest number above every token id; `DataError` where there is none."""
    ids = tokenizer.get_vocab(with_added_tokens=True).values()
    if not ids:
        raise DataError("the tokeniser knows no token; set another data.tokenizer")
    return 1 + max(ids)


def encoded(tokenizer: Any, texts: Sequence[str], *, special: bool = True) -> Any:
    """The library's encodings of some texts, with special tokens or without.

    Raises `DataError` where it gives up, and for token ids that its own vocabulary lacks.
    """
    try:
        found = tokenizer.encode_batch(list(texts), add_special_tokens=special)
    except Exception as error:  # the library raises a bare Exception
        reason = (str(error).splitlines() or [""])[0][:200]
        raise DataError(
            f"the tokeniser fails on the texts ({reason}); mend them, or set another data.tokenizer"
        ) from error
    last, known = max((max(one.ids, default=0) for one in found), default=0), vocabulary(tokenizer)
    if last >= known:
        raise DataError(
            f"the tokeniser gives the token id {last}, and the ids of its vocabulary are below {known}; mend its "
            "special tokens, or set another data.tokenizer"
        )
    return found


def encode_texts(tokenizer: Any, texts: Sequence[str], max_length: int, where: Where) -> tuple[np.ndarray, int]:
    """int32 [n, max_length], padded by `PADDING`, and how many texts were cut.

    Special tokens are those that the tokeniser's own post-processor adds; of a longer text the head is kept. Raises
    `DataError` for a text without any token and where the special tokens leave no room.
    """
    special = tokenizer.num_special_tokens_to_add(False)
    if special >= max_length:
        raise DataError(
            f"data.max_length is {max_length} and the tokeniser adds {special} special tokens to a text; raise it"
        )
    ids, cut = np.full((len(texts), max_length), PADDING, np.int32), 0
    tokenizer.enable_truncation(max_length)
    for row, found in enumerate(encoded(tokenizer, texts)):
        if not found.ids:
            raise DataError(f"{where(row)} has a text without any token; fill or drop it")
        ids[row, : len(found.ids)] = found.ids
        cut += bool(found.overflowing)
    tokenizer.no_truncation()
    return ids, cut


def prefix(tokenizer: Any, text: str) -> list[int]:
    """The special tokens that the tokeniser's post-processor puts before a text."""
    found = encoded(tokenizer, [text])[0]
    special = found.special_tokens_mask
    return list(found.ids[: special.index(0)]) if 0 in special else []
