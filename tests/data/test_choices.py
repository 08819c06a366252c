"""Questions: the forms of published tables, prompts, and which tokens are scored."""

import numpy as np
import pytest

pytest.importorskip("tokenizers")

from fedloom.core import DataError
from fedloom.data.choices import FORMS, Question, encode_questions, form_of, prompted, read_answers, read_questions
from fedloom.data.tokens import load_tokenizer, train_tokenizer

MMLU, HELLASWAG = FORMS


def place(row):
    return f"row {row}"


def byte_tokens(bos=True):
    """A tokeniser of single bytes: no merges."""
    found = load_tokenizer(train_tokenizer([], 300, questions=True))
    if not bos:
        found.post_processor = None
    return found


def text_of(tokenizer, ids):
    return tokenizer.decode([i for i in ids if i >= 0])


def test_the_form_is_told_by_the_columns():
    assert form_of(["subject", "choices", "question", "answer"]) is MMLU
    assert form_of(["endings", "ctx_b", "ctx_a", "activity_label", "ind"]) is HELLASWAG
    assert form_of(["text", "label"]) is None


def test_texts_of_hellaswag_are_cleaned():
    rows = {
        "activity_label": ["Hair"],
        "ctx_a": ["Cut it [title] Wash.  Dry [substeps] it"],
        "ctx_b": ["then Brush"],
        "endings": [["[header] go  on", "stop [step] now"]],
    }
    found = read_questions(rows, HELLASWAG, place)
    assert found == [Question("Hair: Cut it. Wash. Dry it Then brush", ("go on", "stop now"))]
    rows |= {"ctx_b": [None]}
    assert read_questions(rows, HELLASWAG, place)[0].context == "Hair: Cut it. Wash. Dry it"


def test_prompts():
    question = Question("2 + 2?", ("four", "five"))
    assert prompted(question, "choice", MMLU.prompt) == Question("2 + 2?\nAnswer:", ("four", "five"))
    assert prompted(question, "choice", HELLASWAG.prompt) == question
    assert prompted(question, "letter", "") == Question("2 + 2?\nA. four\nB. five\nAnswer:", ("A", "B"))


def test_the_tokens_of_an_option_hold_its_characters_and_are_padded_on_the_right():
    tokenizer = byte_tokens()
    found, cut = encode_questions(tokenizer, [Question("Who?", ("me", "us all"))], 16, place)
    assert found.shape == (1, 2, 2, 16) and found.dtype == np.int32 and cut == 0
    assert [text_of(tokenizer, ids) for ids in found[0, 0]] == ["Who? me", "Who? us all"]
    assert found[0, 0, :, 0].tolist() == [0, 0]
    assert found[0, 1].tolist() == [[0] * 5 + [2] * 3 + [0] * 8, [0] * 5 + [6] * 7 + [0] * 4]
    assert (found[0, 0, 0, 8:] == -1).all() and (found[0, 0, 1, 12:] == -1).all()


def test_the_context_is_cut_on_the_left_and_the_option_is_whole():
    tokenizer = byte_tokens()
    found, cut = encode_questions(tokenizer, [Question("abcdefgh", ("yes", "no")), Question("i", ("x", "y"))], 8, place)
    assert cut == 1
    assert [text_of(tokenizer, ids) for ids in found[0, 0]] == ["fgh yes", "efgh no"]
    assert (found[0, 0, :, 0] == 0).all() and found[0, 1].tolist() == [[0] * 4 + [3] * 4, [0] * 5 + [2] * 3]
    found, _ = encode_questions(byte_tokens(bos=False), [Question("abcdefgh", ("yes", "no"))], 8, place)
    assert text_of(tokenizer, found[0, 0, 0]) == "efgh yes"


def test_an_option_without_room_for_its_question_names_the_length_that_is_needed():
    questions = [Question("a", ("b", "c")), Question("a", ("b", "much longer"))]
    with pytest.raises(
        DataError, match=r"row 1 has an option of 12 tokens.* set data.max_length to 14 at least, now 8"
    ):
        encode_questions(byte_tokens(), questions, 8, place)
    assert encode_questions(byte_tokens(), questions, 14, place)[1] == 0


@pytest.mark.parametrize(
    "change, message",
    [
        ({"question": ["a", " "]}, "row 1 has an empty text in column 'question'"),
        ({"question": ["a", None]}, "row 1 has an empty text in column 'question'"),
        ({"choices": [["b", "c"], ["d", ""]]}, "row 1 has an empty text in column 'choices'"),
        ({"choices": [["b", "c"], ["d", "e", "f"]]}, "row 1 has 3 options in column 'choices', but the first row 2"),
        ({"choices": [["b", "c"], "de"]}, "row 1 has no list of two options or more in column 'choices'"),
        ({"choices": [["b"], ["c"]]}, "row 0 has no list of two options or more"),
        ({"choices": [["b", "c"], [4, 5]]}, "row 1 has a int in column 'choices', which must hold texts; mend"),
        ({"question": ["a", 5]}, "row 1 has a int in column 'question', which must hold texts; mend"),
        ({"choices": [["b"] * 27, ["c"] * 27]}, "row 0 has 27 options in column 'choices'; at most 26 are read"),
    ],
)
def test_bad_questions_are_told_with_row_and_column(change, message):
    rows = {"question": ["a", "b"], "choices": [["b", "c"], ["d", "e"]], **change}
    with pytest.raises(DataError, match=message):
        read_questions(rows, MMLU, place)


@pytest.mark.parametrize("bad", [4, -1, "E", "", None, 1.5, True])
def test_answers_are_positions_of_options(bad):
    assert read_answers([0, "3", np.int64(2)], 4, "answer", place).tolist() == [0, 3, 2]
    with pytest.raises(DataError, match=r"row 1 has the answer .* in column 'answer', which must be 0 to 3"):
        read_answers([0, bad], 4, "answer", place)
