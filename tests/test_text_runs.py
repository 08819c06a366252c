"""Runs on texts: from arrays to predictions and exports, with a network of the user's own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

pytest.importorskip("tokenizers")

import fedloom
from fedloom import lifecycle
from fedloom.cli import app
from fedloom.config import config_hash, resolve
from fedloom.core import ConfigError, DataError
from fedloom.data.choices import Question
from fedloom.models.registry import ENTRIES
from fedloom.onnx_export import export_onnx
from fedloom.safetensors_export import export_safetensors, load_exported
from fedloom.served import open_served

WORDS = {0: ["goal", "match", "team"], 1: ["shares", "bank", "profit"]}
TEXTS = [f"the {WORDS[i % 2][i // 2 % 3]} of day {i}" for i in range(60)]
LABELS = ["sport" if i % 2 == 0 else "money" for i in range(60)]
TREE = {
    "data": {"vocab_size": 300, "max_length": 32},
    "stream": {"kind": "static"},
    "partition": {"kind": "iid", "clients": 2},
    "training": {"rounds": 6, "batch_size": 8, "optimizer": {"name": "adamw", "lr": 0.05}},
    "model": {"name": "test_text_runs:Bag"},
}


class Bag(nn.Module):
    """Mean of token embeddings -> features; options of questions are scored one by one."""

    def __init__(self, num_classes: int, input_shape: tuple[int, ...], vocab_size: int):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, 8)
        self.head = nn.Linear(8, 1 if len(input_shape) == 3 else num_classes)

    def forward(self, x):
        mask = x["attention_mask"]
        found = (self.embedding(x["input_ids"]) * mask[..., None]).sum(-2) / mask.sum(-1, keepdim=True)
        logits = self.head(found)
        return {"logits": logits.squeeze(-1) if mask.dim() == 3 else logits}


@pytest.fixture(autouse=True, scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lifecycle, "_pictures", lambda *args: None)
        patch.setenv("FEDLOOM_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fedloom.run(TREE, data=(TEXTS, LABELS), out=tmp_path_factory.mktemp("texts") / "run").folder


def invoke(*words: str):
    return CliRunner().invoke(app, list(words))


def test_texts_are_learnt_and_new_ones_are_predicted(done: Path, tmp_path: Path) -> None:
    served = open_served(done)
    scores = served.scores(["the team", "a BANK"])
    assert [served.class_names[k] for k in scores.argmax(1).tolist()] == ["sport", "money"]
    assert torch.equal(served.scores(served.inputs(["the team", "a BANK"])), scores)
    for bad in (["the team", ""], ["the team", 3]):
        with pytest.raises(DataError, match="input 1 has"):
            served.scores(bad)
    with pytest.raises(DataError, match="the model reads texts; give a list of them, or token ids below 300"):
        served.scores(torch.full((1, 32), 300))


@pytest.mark.parametrize("suffix", [".txt", ".csv", ".jsonl", ".parquet"])
def test_files_of_texts_are_predicted(done: Path, tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"new{suffix}"
    if suffix == ".parquet":
        pq.write_table(pa.table({"text": ["the team", "a bank"]}), file)
    else:
        rows = {
            ".txt": "the team\na bank\n",
            ".csv": 'id,text\n1,the team\n2,"a bank"\n',
            ".jsonl": '{"text": "the team"}\n{"text": "a bank"}\n',
        }
        file.write_text(rows[suffix])
    found = invoke("predict", str(done), "--input", str(file), "--json")
    assert found.exit_code == 0, found.output
    rows = json.loads(found.stdout)["predictions"]
    assert [(row["input"], row["class"]) for row in rows] == [("the team", "sport"), ("a bank", "money")]


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.npy", "", "must end in .txt, .csv, .jsonl, .parquet, for the model reads texts"),
        ("a.txt", "", "holds no texts"),
        ("a.txt", "one\n\ntwo\n", "has an empty text in column 'text'"),
        ("a.csv", "body\nx\n", "has no column 'text'; its columns are: body"),
        ("a.jsonl", "{", "cannot be read"),
        ("a.jsonl", "[1]\n", "every line must be an object"),
        ("a.jsonl", "[" * 100_000, "cannot be read"),
        ("a.csv", "text\na,b\n", "row 0 has more fields than the header; put texts with commas into quotes"),
        ("a.parquet", "x", "cannot be read"),
    ],
)
def test_files_without_texts_are_refused(done: Path, tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    found = invoke("predict", str(done), "--input", str(tmp_path / name))
    assert found.exit_code != 0 and message in " ".join(found.output.split())


@pytest.mark.parametrize(
    "name, content, count",
    [
        ("a.csv", f"text\n{'team ' * 40_000}\n", 1),
        ("a.csv", "\ufefftext\nthe team\n", 1),
        ("a.jsonl", '\ufeff{"text": "the team"}', 1),
        ("a.txt", "the\u2028team\x0cgoal\nthe match\n", 2),
    ],
)
def test_files_are_read_with_marks_and_long_texts(
    done: Path, tmp_path: Path, name: str, content: str, count: int
) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    found = invoke("predict", str(done), "--input", str(tmp_path / name), "--json")
    assert [row["class"] for row in json.loads(found.stdout)["predictions"]] == ["sport"] * count


def test_an_exported_model_has_its_tokeniser_beside_it(done: Path, tmp_path: Path) -> None:
    out = export_safetensors(done, tmp_path / "serve" / "model.safetensors")
    served = open_served(done)
    assert (out.parent / "tokenizer.json").read_text() == served.text.tokenizer
    module = load_exported(out, model=Bag)
    with torch.no_grad():
        logits = module(served.prepare(served.inputs(["the team"])))["logits"]
    assert torch.equal(logits, served.scores(["the team"]))
    with pytest.raises(ConfigError, match="the model reads texts, and only those of images and vectors are exported"):
        export_onnx(done, tmp_path / "model.onnx")


@pytest.mark.parametrize("name", [name for name, entry in ENTRIES.items() if entry.text])
def test_the_metadata_rebuild_every_network_of_texts(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model = {"name": name, "options": {"hidden": 8, "inner": 8, "layers": 2, "heads": 2, "experts": 2}}
    training = {"rounds": 1, "batch_size": 8}
    layer = {**TREE, "model": model, "training": training}
    folder = fedloom.run(layer, data=(TEXTS[:20], LABELS[:20]), out=tmp_path / "run").folder
    served = open_served(folder)
    module = load_exported(export_safetensors(folder, tmp_path / "model.safetensors"))
    with torch.no_grad():
        logits = module(served.prepare(served.inputs(TEXTS[:3])))["logits"]
    torch.testing.assert_close(logits, served.scores(TEXTS[:3]))


def test_questions_run_and_are_predicted(tmp_path: Path) -> None:
    options = [["right", "wrong", "bad"], ["wrong", "right", "bad"]]
    rows = {
        "question": [f"Number {i}?" for i in range(40)],
        "choices": [options[i % 2] for i in range(40)],
        "answer": [i % 2 for i in range(40)],
        "subject": ["even" if i % 4 < 2 else "odd" for i in range(40)],
    }
    pq.write_table(pa.table(rows), tmp_path / "all.parquet")
    data = {**TREE["data"], "name": f"parquet:{tmp_path / 'all.parquet'}", "domain": "subject"}
    run = fedloom.run({**TREE, "data": data}, out=tmp_path / "run")
    served = open_served(run.folder)
    assert served.class_names == ["A", "B", "C"]
    assert served.scores([Question("Number 99?", ("bad", "wrong", "right"))]).argmax(1).tolist() == [2]
    with pytest.raises(DataError, match="input 0 is a str; the model needs questions with options"):
        served.scores(["Number 99?"])
    file = tmp_path / "new.jsonl"
    file.write_text(json.dumps({"question": "Number 98?", "choices": ["wrong", "right", "bad"]}))
    found = invoke("predict", str(run.folder), "--input", str(file), "--json")
    assert [row["class"] for row in json.loads(found.stdout)["predictions"]] == ["B"]
    file.write_text(json.dumps({"question": "Number 98?", "choices": ["wrong", "right"]}))
    assert "has questions of 2 options, the model needs 3" in invoke("predict", str(run.folder), "-i", str(file)).output


def test_networks_of_images_and_vectors_are_refused_in_words() -> None:
    for name in ("linear", "mlp", "small_cnn"):
        with pytest.raises(ConfigError, match=f"model {name} cannot read texts"):
            fedloom.run({**TREE, "model": {"name": name}}, data=(TEXTS, LABELS))
    with pytest.raises(ConfigError, match="fails on texts, a mapping of input_ids and attention_mask, of shape"):
        fedloom.run({**TREE, "model": {}}, data=(TEXTS, LABELS), model=nn.Linear(32, 2))


def test_options_of_texts_change_no_hash_of_runs_without_them() -> None:
    tree = resolve({}).as_dict()
    old = {**tree, "data": {k: v for k, v in tree["data"].items() if k not in fresh()}}
    old["partition"] = {k: v for k, v in tree["partition"].items() if k != "by"}
    assert config_hash(tree, "f", "cpu", "contiguous") == config_hash(old, "f", "cpu", "contiguous")
    moved = {**tree, "data": {**tree["data"], "tokenizer": "/somewhere"}}
    assert config_hash(moved, "f", "cpu", "contiguous") == config_hash(old, "f", "cpu", "contiguous")
    shorter = {**tree, "data": {**tree["data"], "max_length": 64}}
    assert config_hash(shorter, "f", "cpu", "contiguous") != config_hash(old, "f", "cpu", "contiguous")


def fresh() -> set[str]:
    return {"text", "tokenizer", "vocab_size", "max_length", "scoring"}
