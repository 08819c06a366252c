"""Texts and questions of tables and arrays as sources."""

import pickle

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

pytest.importorskip("tokenizers")

from fedloom.core import ConfigError, DataError
from fedloom.data import load_source, make_plan
from fedloom.data.text import PrepareText
from fedloom.data.tokens import load_tokenizer, train_tokenizer

SUBJECTS = ["apples", "pears", "plums"]


def sentences(n=30, start=0):
    return [f"{SUBJECTS[i % 3]} number {i} are {'ripe' if i % 2 else 'sour'}" for i in range(start, start + n)]


def write(path, **columns):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)
    return path


@pytest.fixture
def questions(tmp_path):
    """A parquet file of 60 questions on four subjects, one of them rare; returns a function that writes it."""

    def make(name="all.parquet", **changes):
        rows = {
            "question": [f"Which of them is {i}?" for i in range(60)],
            "choices": [[f"it is {i + k}" for k in range(4)] for i in range(60)],
            "answer": [i % 4 for i in range(60)],
            "subject": ["rare" if i in (3, 40) else "odd" if i == 7 else SUBJECTS[i % 3] for i in range(60)],
        }
        return write(tmp_path / name, **(rows | changes))

    return make


def test_a_text_column_and_a_label_column_make_a_source_of_tokens(tmp_path):
    labels = [i % 3 for i in range(30)]
    write(tmp_path / "train.parquet", id=list(range(30)), text=sentences(), label=labels)
    write(tmp_path / "test.parquet", id=[0, 1, 2], text=["pears", "apples PLUMS", "x"], label=[1, 0, 2])
    source = load_source(f"parquet:{tmp_path}", vocab_size=300, max_length=12)
    assert source.text.kind == "tokens" and source.text.vocab_size == 300 and source.text.scoring == ""
    assert source.x_train.dtype == torch.int32 and source.x_train.shape == (30, 12) and source.input_shape == (12,)
    tokenizer = load_tokenizer(source.text.tokenizer)
    decoded = [tokenizer.decode([i for i in row if i >= 0]).strip() for row in source.x_test.tolist()]
    assert decoded == ["pears", "apples plums", "x"]
    assert source.y_test.tolist() == [1, 0, 2] and source.mean == ()
    assert source.text.tokenizer == train_tokenizer(sentences(), 300)


def test_the_text_column_is_found_or_named(tmp_path):
    path = write(tmp_path / "a.parquet", review=sentences(), label=[0, 1] * 15)
    assert load_source(f"parquet:{path}").text is not None
    path = write(tmp_path / "b.parquet", title=sentences(), body=sentences(30, 50), label=[0, 1] * 15)
    with pytest.raises(DataError, match=r"has several text columns; set data.text to one of: title, body"):
        load_source(f"parquet:{path}")
    named = load_source(f"parquet:{path}", text="body")
    assert named.text.tokenizer != load_source(f"parquet:{path}", text="title").text.tokenizer
    with pytest.raises(DataError, match=r"has no text column 'bod'; set data.text"):
        load_source(f"parquet:{path}", text="bod")
    with pytest.raises(DataError, match=r"column 'label' of data .* holds no texts; name another with data.text"):
        load_source(f"parquet:{path}", text="label")
    path = write(tmp_path / "c.parquet", height=[0.5] * 30, remark=sentences(), label=[0, 1] * 15)
    assert load_source(f"parquet:{path}").text is None  # numbers come first where no column is called text


def test_texts_that_are_no_unicode_are_told_with_their_row():
    with pytest.raises(DataError, match="example 2 of the train split has a text in x that is no Unicode"):
        load_source((["a b", "c", "d\ud800", "e"] * 3, [0, 1] * 6), vocab_size=300)


@pytest.mark.parametrize("bad, word", [("  ", "an empty text"), (None, "nothing")])
def test_empty_texts_are_told_with_row_and_column(tmp_path, bad, word):
    path = write(tmp_path / "a.parquet", text=[*sentences(5), bad], label=[0, 1] * 3)
    with pytest.raises(DataError, match=f"row 5 of '{path}' has {word} in column 'text'"):
        load_source(f"parquet:{path}")


def test_labels_out_of_range_are_told(tmp_path):
    features = b'{"info": {"features": {"label": {"_type": "ClassLabel", "names": ["good", "bad"]}}}}'
    table = pa.table({"text": sentences(4), "label": [0, 1, 2, 0]}).replace_schema_metadata({b"huggingface": features})
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"labels 'label' of data .* must be integers 0..1, got 2 at position 2"):
        load_source(f"parquet:{tmp_path / 'a.parquet'}")


def test_texts_of_python_are_read_and_the_tokeniser_sees_the_training_part_alone():
    texts, labels = sentences(), ["yes" if i % 2 else "no" for i in range(30)]
    source = load_source((texts, labels), vocab_size=300, max_length=16)
    assert source.class_names == ("no", "yes") and len(source.y_train) == 24 and len(source.y_test) == 6
    both = load_source((texts[:24], labels[:24], texts[24:], labels[24:]), vocab_size=300, max_length=16)
    other = load_source((texts[:24], labels[:24], ["zebras"] * 6, labels[24:]), vocab_size=300, max_length=16)
    assert both.text == other.text and both.fingerprint != other.fingerprint
    assert both.text.tokenizer == train_tokenizer(texts[:24], 300)
    array = load_source((np.array(texts), labels), vocab_size=300, max_length=16)
    assert array.fingerprint == source.fingerprint
    domains = load_source((texts, labels, [i % 3 for i in range(30)]), vocab_size=300)
    assert domains.domain_names == ("0", "1", "2")
    with pytest.raises(DataError, match="data: example 2 of the train split has an empty text in x"):
        load_source((["a", "b", ""], [0, 1, 0]))
    with pytest.raises(DataError, match="one split holds texts and the other does not"):
        load_source((texts, labels, np.zeros((3, 2)), [0, 1, 0]))


def test_texts_are_pickled_cached_and_stored_with_their_tokeniser(tmp_path, private_cache):
    path = write(tmp_path / "a.parquet", text=sentences(), label=[0, 1] * 15)
    source = load_source(f"parquet:{path}", vocab_size=300)
    again = load_source(f"parquet:{path}", vocab_size=300)
    sent = pickle.loads(pickle.dumps(source))
    assert source.text == again.text == sent.text and source.fingerprint == again.fingerprint == sent.fingerprint
    assert load_source(f"parquet:{path}", vocab_size=310).fingerprint != source.fingerprint
    assert load_source(f"parquet:{path}", vocab_size=300, max_length=20).fingerprint != source.fingerprint


def test_a_tokeniser_of_ones_own_is_used_and_part_of_the_key(tmp_path):
    path = write(tmp_path / "a.parquet", text=sentences(), label=[0, 1] * 15)
    (tmp_path / "tokenizer.json").write_text(train_tokenizer(["ripe sour pears"] * 3, 310))
    own = load_source(f"parquet:{path}", tokenizer=str(tmp_path))
    assert own.text.tokenizer == train_tokenizer(["ripe sour pears"] * 3, 310)
    assert own.text.tokenizer != load_source(f"parquet:{path}").text.tokenizer
    noted = load_source(f"parquet:{path}", tokenizer=str(tmp_path), vocab_size=400, scoring="letter", image_size=8)
    said = [note for note in noted.notes if "is not used" in note]
    assert [note.split()[0] for note in said] == ["data.vocab_size", "data.scoring", "data.image_size"]


def test_long_texts_are_cut_and_counted(tmp_path):
    path = write(tmp_path / "a.parquet", text=[*sentences(9), "word " * 50], label=[0, 1] * 5)
    source = load_source(f"parquet:{path}", max_length=40, split_seed=1)
    assert any("have more than data.max_length 40 tokens; their beginning is kept" in note for note in source.notes)


def test_options_of_texts_are_noted_where_there_are_none():
    source = load_source((np.zeros((8, 2)), [0, 1] * 4), vocab_size=500, text="body")
    assert {n for n in source.notes if "not used" in n} == {
        "data.vocab_size is not used by data 'arrays'",
        "data.text is not used by data 'arrays'",
    }


def test_options_out_of_range_are_refused():
    data = (sentences(), [0, 1] * 15)
    for name, bad in (("vocab_size", 10), ("max_length", 1)):
        with pytest.raises(ConfigError, match=f"data.{name} must be an integer of at least"):
            load_source(data, **{name: bad})
    with pytest.raises(DataError, match=r"unknown data.scoring 'letters'"):
        load_source(data, scoring="letters")


def test_questions_are_cut_within_every_domain_and_rare_domains_are_put_together(questions):
    source = load_source(f"parquet:{questions()}", domain="subject")
    assert source.text.kind == "choices" and source.class_names == ("A", "B", "C", "D")
    assert source.x_train.shape[1:] == (2, 4, 256) and source.input_shape == (2, 4, 256)
    assert source.domain_names == ("apples", "other", "pears", "plums")
    assert "2 domains with fewer than 10 questions each were put together as 'other'" in source.notes
    train, test = (torch.bincount(d, minlength=4) for d in (source.domains_train, source.domains_test))
    assert (train + test).tolist() == [19, 3, 18, 20] and test.tolist() == [4, 1, 4, 4]
    tokenizer, scored = load_tokenizer(source.text.tokenizer), source.x_train[0, 1, 0]
    ids = source.x_train[0, 0, 0][scored > 0].tolist()
    option = tokenizer.decode(ids)
    assert option.startswith(" it is ") and set(scored.tolist()) == {0, len(option) - 1}


def test_letters_are_scored_on_demand(questions):
    path = questions()
    source = load_source(f"parquet:{path}", scoring="letter")
    tokenizer = load_tokenizer(source.text.tokenizer)
    row = source.x_test[0]
    assert [tokenizer.decode(row[0, k][row[1, k] > 0].tolist()) for k in range(4)] == [" A", " B", " C", " D"]
    assert "\nA. it is" in tokenizer.decode(row[0, 0][row[0, 0] >= 0].tolist())
    assert source.fingerprint != load_source(f"parquet:{path}").fingerprint


def test_bad_questions_name_file_row_and_column(questions):
    path = questions(answer=[4, *[0] * 59])
    with pytest.raises(DataError, match=f"row 0 of '{path}' has the answer 4 in column 'answer'"):
        load_source(f"parquet:{path}")
    with pytest.raises(DataError, match="has no column 'solution'; its columns are"):
        load_source(f"parquet:{path}", label="solution")


def test_domains_of_texts_need_one_tokeniser(tmp_path):
    for name, start in (("a", 0), ("b", 70)):
        write(tmp_path / f"{name}.parquet", text=sentences(30, start), label=[0, 1] * 15)
    name = f"domains:parquet:{tmp_path / 'a.parquet'},parquet:{tmp_path / 'b.parquet'}"
    with pytest.raises(DataError, match=r"only with one tokeniser; set data.tokenizer"):
        load_source(name)
    (tmp_path / "tokenizer.json").write_text(train_tokenizer(sentences(), 300))
    source = load_source(name, tokenizer=str(tmp_path))
    assert source.domain_names == ("a", "b") and source.text.vocab_size == 300 and len(source.y_train) == 48


def test_a_plan_of_texts_prepares_mappings_and_refuses_augmentation():
    source = load_source((sentences(), [0, 1] * 15), vocab_size=300)
    options = {"stream": {"kind": "static"}, "partition": {"kind": "iid", "clients": 2}}
    plan = make_plan(source, **options)
    batch = next(plan.train(0, 0, 0, "update").epoch(0, 4))
    assert isinstance(plan.prepare, PrepareText) and batch.x["input_ids"].shape == batch.x["attention_mask"].shape
    assert plan.describe()["text"] == {
        "kind": "tokens", "vocab_size": 300, "max_length": 128, "scoring": "", "prompt": ""
    }  # fmt: skip
    with pytest.raises(ConfigError, match=r"data.augment 'flip' is for images, and the data are texts"):
        make_plan(source, augment="flip", **options)


@pytest.mark.parametrize("alpha", [0.1, 1.0])
def test_every_client_of_ag_news_has_ten_texts(mirror, alpha):
    source = load_source("ag_news", root=mirror)
    assert source.class_names == ("World", "Sports", "Business", "Sci/Tech") and source.text.vocab_size == 8000
    assert (len(source.y_train), len(source.y_test)) == (6000, 1600)
    part = {"kind": "dirichlet", "variant": "plain", "alpha": alpha, "min_size": 10, "clients": 10}
    plan = make_plan(source, stream={"kind": "static"}, partition=part)
    sizes = [plan.size(c, 0) for c in range(10)]
    assert sum(sizes) == 6000 and min(sizes) >= 10


def test_mmlu_is_cut_within_subjects_and_dealt_out_by_subject(mirror):
    source = load_source("mmlu", root=mirror)
    assert len(source.domain_names) == 57 and (len(source.y_train), len(source.y_test)) == (1368, 342)
    assert set(torch.bincount(source.domains_test).tolist()) == {6}
    part = {"kind": "dirichlet", "by": "domain", "variant": "plain", "alpha": 0.1, "min_size": 10, "clients": 10}
    plan = make_plan(source, stream={"kind": "static"}, partition=part)
    held = torch.stack([plan.stage_counts(c, 0).sum(1) for c in range(10)])
    assert held.sum(0).tolist() == [24] * 57 and int(held.sum(1).min()) >= 10
    assert float((held.max(0).values / 24.0).mean()) > 0.6  # most of a subject lies with one client


def test_hellaswag_has_activities_as_domains(mirror):
    source = load_source("hellaswag", root=mirror)
    assert len(source.domain_names) == 28 and "other" in source.domain_names
    assert (len(source.y_train), len(source.y_test)) == (1600, 400) and source.text.prompt == ""
