"""From pictures to a folder, whole and in pieces."""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fedloom.core.errors import CheckpointError, ConfigError, Interrupted, RunError
from fedloom.models.clip.checkpoint import OPENAI
from fedloom.models.clip.compact import build_clip
from fedloom.models.clip.named import described
from fedloom.pretraining import run, training
from fedloom.pretraining.images import Normalize, accuracy, class_texts
from fedloom.pretraining.output import CHECKPOINT, FILES
from fedloom.pretraining.pictures import read
from toys.pretraining import tiny

CPU = torch.device("cpu")


def weights(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def make(recipe: Any, folder: Path, **options: Any) -> dict[str, Any]:
    return run.pretrain("mine", recipe, folder, place=CPU, **options)


def stop_at(monkeypatch: pytest.MonkeyPatch, section: str, step: int, error: type[BaseException]) -> None:
    """Break off before a step, with a checkpoint after every one of those before."""
    monkeypatch.setattr(run, "PERIOD", 0.0)
    descend = training.Trainer._descend

    def broken(self: Any, value: Any) -> None:
        if (self.section, self.step) == (section, step):
            raise error
        descend(self, value)

    monkeypatch.setattr(training.Trainer, "_descend", broken)


@pytest.fixture
def whole(pictures: Path, tmp_path: Path, fake_teacher: None) -> Path:
    make(tiny(pictures), tmp_path / "whole")
    return tmp_path / "whole"


def test_the_folder_holds_a_model_that_knows_planted_pictures(whole: Path, pictures: Path) -> None:
    assert sorted(path.name for path in whole.iterdir()) == sorted(FILES)
    told = json.loads((whole / "report.json").read_text())
    row = told["zeroshot"][f"folder:{pictures}"]
    assert (row["classes"], row["pictures"], row["chance"]) == (4, 80, 0.25)
    assert min(row["one_template"], row["templates"]) > 0.6
    assert told["stages"]["text"]["steps"] == 30 and told["stages"]["images"]["steps"] == 32
    assert told["stages"]["images"]["pictures"] == 160 and all(s["seconds"] > 0 for s in told["stages"].values())
    assert told["recipe"] == tiny(pictures).as_dict()
    assert told["versions"]["torch"] == version("torch") and told["machine"]["device"] == "cpu"
    readme = (whole / "README.md").read_text()
    assert "`fedloom pretrain-clip mine`" in readme and f"| 4 | 80 | {row['one_template']:.2%} |" in readme


def test_the_accuracy_is_that_of_the_stored_weights(whole: Path, pictures: Path) -> None:
    config = json.loads((whole / "open_clip_config.json").read_text())
    state = load_file(whole / "model.safetensors")
    assert {v.dtype for v in state.values()} == {torch.float16, torch.int64}
    model = build_clip(config["model_cfg"])
    model.load_state_dict({k: v.float() if v.is_floating_point() else v for k, v in state.items()})
    model.eval()
    told = json.loads((whole / "report.json").read_text())
    assert sum(p.numel() for p in model.parameters()) == told["parameters"]
    normalize = Normalize(config["preprocess_cfg"]["mean"], config["preprocess_cfg"]["std"])
    [test] = read(tiny(pictures))[1]
    found = accuracy(model, test.x, test.y, class_texts(model, test.words, ["a photo of a {}."]), normalize)
    assert found == told["zeroshot"][test.name]["one_template"]


def test_clip_small_takes_the_folder_as_weights(whole: Path, pictures: Path) -> None:
    model = described("clip_small", str(whole), {}).module().eval()
    told = json.loads((whole / "report.json").read_text())
    [test] = read(tiny(pictures))[1]
    found = accuracy(model, test.x, test.y, class_texts(model, test.words), Normalize(*OPENAI))
    assert found == told["zeroshot"][test.name]["templates"]


@pytest.mark.parametrize(("section", "step"), [("text", 17), ("images", 0), ("images", 13)])
def test_an_interrupted_training_goes_on_with_the_same_bits(
    section: str, step: int, whole: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    with monkeypatch.context() as patch:
        stop_at(patch, section, step, KeyboardInterrupt)
        with pytest.raises(Interrupted, match="the same command goes on from the last checkpoint in"):
            make(tiny(pictures), tmp_path / "parts")
    assert [path.name for path in (tmp_path / "parts").iterdir()] == [CHECKPOINT]
    told = make(tiny(pictures), tmp_path / "parts", tell=lines.append)
    assert lines[0].startswith(f"{section}: goes on from step {step}" if step else "images: step")
    assert weights(tmp_path / "parts") == weights(whole)
    assert told["zeroshot"] == json.loads((whole / "report.json").read_text())["zeroshot"]
    assert not (tmp_path / "parts" / CHECKPOINT).exists()


def test_an_interruption_before_the_first_checkpoint_says_so(
    pictures: Path, tmp_path: Path, fake_teacher: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_at(monkeypatch, "text", 0, KeyboardInterrupt)
    with pytest.raises(Interrupted, match="before the first checkpoint; the same command begins anew"):
        make(tiny(pictures), tmp_path / "out")


def test_a_loss_that_is_not_finite_keeps_the_last_checkpoint(
    pictures: Path, tmp_path: Path, fake_teacher: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "PERIOD", 0.0)
    recipe = tiny(pictures, images={"lr": 1e6, "epochs": 200, "warmup": 1})
    with pytest.raises(RunError, match=r"stage images became (nan|inf) in step [0-9]+; begin anew with a lower rate"):
        make(recipe, tmp_path / "out")
    left = torch.load(tmp_path / "out" / CHECKPOINT, weights_only=True)
    assert left["trainer"]["step"] > 0 and list(left["done"]) == ["text"]


def test_a_finished_model_is_made_anew_only_by_force(whole: Path, pictures: Path, no_global_draws: None) -> None:
    before = weights(whole)
    with pytest.raises(ConfigError, match=r"holds a finished model \(README.md\).*--force"):
        make(tiny(pictures), whole)
    make(tiny(pictures, seed=1), whole, force=True)
    assert weights(whole) != before


def test_what_is_wrong_with_a_folder(pictures: Path, tmp_path: Path, fake_teacher: None) -> None:
    recipe = tiny(pictures)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file' is a file; name a folder"):
        make(recipe, tmp_path / "file")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("")
    with pytest.raises(ConfigError, match=r"holds other files, such as 'thesis\.tex'; name a folder of its own"):
        make(recipe, tmp_path / "full", force=True)
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / CHECKPOINT).write_bytes(b"nonsense")
    with pytest.raises(CheckpointError, match="is damaged and cannot be continued; begin anew with --force"):
        make(recipe, tmp_path / "bad")
    make(recipe, tmp_path / "bad", force=True)
    assert not (tmp_path / "bad" / CHECKPOINT).exists()


def test_a_checkpoint_of_another_recipe_or_of_other_pictures_is_refused(
    pictures: Path, tmp_path: Path, fake_teacher: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_at(monkeypatch, "images", 2, KeyboardInterrupt)
    with pytest.raises(Interrupted, match="without --force goes on"):
        make(tiny(pictures), tmp_path / "out", force=True)
    with pytest.raises(ConfigError, match=r"was made with images\.lr 0\.005, now it is 0\.5; set it back"):
        make(tiny(pictures, images={"lr": 0.5}), tmp_path / "out")
    with pytest.raises(Interrupted):  # the folder of the data may have another name
        make(tiny(pictures, data={"root": "/elsewhere"}), tmp_path / "out")
    content = torch.load(tmp_path / "out" / CHECKPOINT, weights_only=True)
    torch.save({**content, "data": "other"}, tmp_path / "out" / CHECKPOINT)
    with pytest.raises(ConfigError, match=r"the pictures of 'folder:.*' are not those that .* began with; use --force"):
        make(tiny(pictures), tmp_path / "out")


def test_nothing_is_lost_where_force_meets_missing_data(whole: Path, tmp_path: Path) -> None:
    before = weights(whole)
    with pytest.raises(Exception, match="there is nothing at that path"):
        make(tiny(tmp_path / "nowhere"), whole, force=True)
    assert weights(whole) == before


def test_a_stem_that_does_not_fit_is_refused(pictures: Path) -> None:
    with pytest.raises(ConfigError, match="the stem gives patches of 4 and width 16, the image tower has patch_size 8"):
        run.initial(tiny(pictures, model={"vision_cfg": {"patch_size": 8}}))
