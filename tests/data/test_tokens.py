"""Tokenisers: trained alike each time, read from files as they are, and how texts become ids."""

import json
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("tokenizers")

import tokenizers

from fedloom.core import DataError
from fedloom.data.tokens import encode_texts, load_tokenizer, prefix, read_tokenizer, train_tokenizer, vocabulary

TEXTS = ["The cat sat on the mat.", "the dog sat on the log", "Émile saw 12 cats"] * 5


def words(post=None):
    """A tokeniser with one id per letter that drops what it does not know, special tokens 0 and 1."""
    found = tokenizers.Tokenizer(tokenizers.models.BPE({"<s>": 0, "</s>": 1, "a": 2, "b": 3, "c": 4}, []))
    found.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    found.add_special_tokens(["<s>", "</s>"])
    if post:
        pairs = [("<s>", 0), ("</s>", 1)]
        found.post_processor = tokenizers.processors.TemplateProcessing(single=post, special_tokens=pairs)
    return found


def place(row):
    return f"row {row}"


def test_the_same_texts_give_the_same_tokeniser_in_every_process():
    code = (
        "from fedloom.data.tokens import train_tokenizer; import sys;"
        f"sys.stdout.buffer.write(train_tokenizer({TEXTS!r}, 320).encode())"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout.decode()
    assert other == train_tokenizer(iter(TEXTS), 320)


def test_a_trained_tokeniser_covers_every_text_and_its_vocabulary_is_bounded():
    found = load_tokenizer(train_tokenizer(TEXTS, 300))
    assert vocabulary(found) == 284 and vocabulary(load_tokenizer(train_tokenizer(TEXTS, 270))) == 270
    assert found.decode(found.encode("Ωmega 猫").ids).strip() == "ωmega 猫"
    assert found.encode("THE").ids == found.encode("the").ids and prefix(found, "A") == []


def test_questions_keep_their_case_and_get_a_token_before_them():
    found = load_tokenizer(train_tokenizer(TEXTS, 300, questions=True))
    assert prefix(found, "A") == [0] and found.encode("A").ids[0] == 0
    assert found.encode("The").ids != found.encode("the").ids


def test_special_tokens_are_those_of_the_post_processor_and_the_head_is_kept():
    found, cut = encode_texts(words("<s> $A </s>"), ["a b c", "a"], 4, place)
    assert found.tolist() == [[0, 2, 3, 1], [0, 2, 1, -1]] and found.dtype == np.int32 and cut == 1
    assert encode_texts(words(), ["a b c"], 4, place)[0].tolist() == [[2, 3, 4, -1]]
    with pytest.raises(DataError, match=r"data.max_length is 2 and the tokeniser adds 2 special tokens"):
        encode_texts(words("<s> $A </s>"), ["a"], 2, place)
    with pytest.raises(DataError, match="row 1 has a text without any token"):
        encode_texts(words(), ["a", "z"], 4, place)
    strict = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}))
    with pytest.raises(DataError, match=r"the tokeniser fails on the texts \(.*UNK.*; mend them, or set another"):
        encode_texts(strict, ["a", "z"], 4, place)


@pytest.mark.parametrize("post, ids", [(None, []), ("$A </s>", []), ("<s> $A", [0]), ("<s> $A </s>", [0])])
def test_what_stands_before_a_text(post, ids):
    assert prefix(words(post), "a") == ids


def test_files_are_read_without_the_padding_and_truncation_they_ask_for(tmp_path):
    made = words("<s> $A")
    made.enable_truncation(2)
    made.enable_padding(length=7, pad_id=1, pad_token="</s>")
    made.save(str(tmp_path / "tokenizer.json"))
    text = read_tokenizer(str(tmp_path))
    assert text == read_tokenizer(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(text).encode("a b c").ids == [0, 2, 3, 4]
    assert json.loads(text)["padding"] is None


def test_what_is_no_tokeniser_is_refused_in_words(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"cannot be read \(.*give a tokenizer.json"):
        read_tokenizer(str(tmp_path))
    (tmp_path / "empty").mkdir()
    for name in (str(tmp_path / "empty"), str(tmp_path / "none.json"), "a b"):
        with pytest.raises(DataError, match=r"is neither a tokenizer.json, nor a folder that holds one, nor a name of"):
            read_tokenizer(name)
    with pytest.raises(DataError, match="'nobody/nothing' is neither a path, nor in the Hugging Face cache"):
        read_tokenizer("nobody/nothing")


def test_tokenisers_that_know_nothing_or_give_ids_beyond_their_vocabulary_are_refused_in_words():
    with pytest.raises(DataError, match=r"the tokeniser knows no token; set another data.tokenizer"):
        vocabulary(tokenizers.Tokenizer(tokenizers.models.BPE()))
    far = words()
    far.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 3 * 10**9)])
    for read in (lambda: encode_texts(far, ["a"], 4, place), lambda: prefix(far, "a")):
        with pytest.raises(DataError, match="gives the token id 3000000000, and the ids of its vocabulary are below 5"):
            read()


def test_what_stands_before_a_text_is_seen_on_a_text_that_the_tokeniser_knows():
    strict = tokenizers.Tokenizer(tokenizers.models.WordLevel({"b": 0}))
    assert prefix(strict, "b") == []
    with pytest.raises(DataError, match="the tokeniser fails on the texts"):
        prefix(strict, "a")
