"""Whole runs around a small CLIP: the same words and towers in every process and in whatever a run leaves."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from typer.testing import CliRunner

import fedloom
from fedloom import lifecycle
from fedloom.build import build, experiment_from_dict
from fedloom.cli import app
from fedloom.config import resolve
from fedloom.core import ConfigError
from fedloom.deploy.flatten import read_run_config
from fedloom.deploy.folder import write_app
from fedloom.models.clip.named import SMALL_FILE
from fedloom.safetensors_export import export_safetensors, load_exported
from fedloom.served import open_served
from toys.small_clip import small_model, write_folder

IDS = {"n01443537": "goldfish, Carassius auratus", "n01629819": "fire salamander", "n07749582": "lemon"}
WORDS = ("goldfish", "fire salamander", "lemon")


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "_pictures", lambda *args: None)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with pictures of three classes and a CLIP."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for k, name in enumerate(IDS):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        for i in range(10):
            x = rng.integers(60 * k, 60 * k + 100, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(x).save(tmp_path / "pictures" / name / f"{i}.png")
    (tmp_path / "pictures" / "class_words.json").write_text(json.dumps(IDS), encoding="utf-8")
    write_folder(tmp_path / "clip", stem=True)
    return tmp_path


def tree(home: Path, **changes: Any) -> dict[str, Any]:
    """Two clients, two rounds."""
    sections = {
        "method": {"name": "promptfl", "n_ctx": 2},
        "model": {"name": "clip_small", "weights": str(home / "clip")},
        "data": {"name": f"folder:{home / 'pictures'}"},
        "stream": {"kind": "static"},
        "partition": {"kind": "iid", "clients": 2},
        "training": {"rounds": 2, "batch_size": 4},
    }
    return {**sections, **changes}


def pictures() -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, (5, 3, 32, 32), dtype=np.uint8)


def test_every_process_and_every_file_has_the_same_words(home: Path) -> None:
    one = fedloom.run(tree(home), out=home / "one")
    two = fedloom.run(tree(home, engine={"workers": 2}), out=home / "two")
    assert one.summary["params_sha256"] == two.summary["params_sha256"]
    saved = yaml.safe_load((one.folder / "config.yaml").read_text(encoding="utf-8"))
    assert saved["model"]["options"]["class_words"] == list(WORDS)
    assert one.class_names == list(IDS), "names of classes stay what the data say"
    rebuilt = experiment_from_dict(saved)
    assert rebuilt.spec.words == WORDS == open_served(one.folder).context.net.module.words
    built = build(resolve(tree(home)))
    assert built.experiment.spec == rebuilt.spec and len(rebuilt.spec.mean) == 3 and rebuilt.spec.repeats
    flipped = tree(home, data={"name": f"folder:{home / 'pictures'}", "augment": "flip"})
    assert not build(resolve(flipped)).experiment.spec.repeats
    scores = one.scores(pictures())
    shutil.rmtree(home / "pictures")
    assert np.array_equal(fedloom.load_run(one.folder).scores(pictures()), scores), "without the data"


def test_words_are_part_of_a_runs_hash_and_the_way_they_are_given_is_not(home: Path) -> None:
    def key(words: Any, **model: Any) -> str:
        given = {"options": {"class_words": words}} if words is not None else {}
        return build(resolve(tree(home, model={"name": "clip_small", "weights": str(home / "clip"), **given}))).hash

    (home / "mine.json").write_text(json.dumps(IDS), encoding="utf-8")
    assert len({key(None), key("mine.json"), key(list(WORDS)), key(dict(IDS))}) == 1
    assert key(["goldfish", "newt", "lemon"]) != key(None)


def test_an_export_needs_no_other_file(home: Path) -> None:
    done = fedloom.run(tree(home), out=home / "run")
    scores = open_served(done.folder).scores(pictures())
    path = export_safetensors(done.folder, home / "out" / "model.safetensors")
    shutil.rmtree(home / "clip")
    shutil.rmtree(home / "pictures")
    network = load_exported(path)
    assert network.words == WORDS
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        meta = file.metadata()
    mean, std = (torch.tensor(json.loads(meta[key])).view(-1, 1, 1) for key in ("mean", "std"))
    with torch.no_grad():
        out = network((torch.from_numpy(pictures()) / 255 - mean) / std)
    torch.testing.assert_close(out["logits"], scores, atol=1e-5, rtol=1e-5)
    with pytest.raises(ConfigError, match="make it with `fedloom pretrain-clip clip-small`"):
        fedloom.load_run(done.folder).scores(pictures())


def test_a_clip_from_python_works_like_one_by_name(home: Path) -> None:
    model = small_model(stem=True)
    done = fedloom.run(tree(home, model={"name": "auto"}), model=model, out=home / "run")
    saved = yaml.safe_load((done.folder / "config.yaml").read_text(encoding="utf-8"))
    assert saved["model"]["name"].startswith("object:CLIP-")
    assert saved["model"]["options"]["class_words"] == list(WORDS)
    again = fedloom.load_run(done.folder, model=small_model(stem=True))
    assert np.array_equal(again.scores(pictures()), done.scores(pictures()))
    by_factory = tree(home, model={"name": "toys.small_clip:small_model"})
    assert build(resolve(by_factory)).experiment.spec.clip().words == WORDS


def test_fedavg_trains_the_image_tower_with_a_head(home: Path) -> None:
    done = fedloom.run(tree(home, method={"name": "fedavg"}), out=home / "run")
    assert done.scores(pictures()).shape == (5, 3)
    path = export_safetensors(done.folder, home / "tower.safetensors")
    shutil.rmtree(home / "clip")
    assert load_exported(path).backbone.num_features == 32


def test_other_models_are_refused_for_methods_with_a_clip(home: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"needs a vision-language model, and model mlp is none; set model.name to clip_"
    ):
        build(resolve(tree(home, model={"name": "mlp"})))
    with pytest.raises(ConfigError, match="unknown option of model mlp 'class_words'"):
        build(resolve(tree(home, method={"name": "fedavg"}, model={"name": "mlp", "options": {"class_words": ["a"]}})))
    with pytest.raises(ConfigError, match="needs a vision-language model, and Sequential is none"):
        mine = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 3))
        build(resolve(tree(home, model={"name": "auto"})), model=mine)


def test_auto_is_clip_small_and_missing_weights_end_with_exit_code_2(home: Path, monkeypatch) -> None:
    # only the working directory: the checkout of these tests has the weights
    monkeypatch.setattr("fedloom.models.clip.named._places", lambda: [Path.cwd() / SMALL_FILE])
    (home / "recipe.yaml").write_text(yaml.safe_dump(tree(home, model={"name": "auto"})), encoding="utf-8")
    found = CliRunner().invoke(app, ["run", "recipe.yaml", "--dry-run"])
    assert found.exit_code == 2 and "make it with `fedloom pretrain-clip clip-small`" in found.output.replace("\n", " ")
    write_folder(home / "examples" / "clip-small", stem=True)
    config = resolve(tree(home, model={"name": "auto"}))
    assert build(config).config.model.name == "clip_small"


def test_dry_run_and_predict_work_from_the_command_line(home: Path) -> None:
    (home / "recipe.yaml").write_text(yaml.safe_dump(tree(home)), encoding="utf-8")
    runner = CliRunner()
    found = runner.invoke(app, ["run", "recipe.yaml", "--dry-run", "--json"])
    assert found.exit_code == 0, found.output
    told = json.loads(found.stdout)
    assert told["trained_parameters"] == 2 * 24 < told["parameters"]
    assert told["bytes_down_first_round"] == 2 * 2 * 24 * 4, "two clients, two context vectors of 24 floats"
    assert runner.invoke(app, ["run", "recipe.yaml", "--out", "run", "--quiet"]).exit_code == 0
    found = runner.invoke(app, ["predict", "run", "--input", "pictures/n07749582/0.png", "--json"])
    assert found.exit_code == 0, found.output
    assert "n07749582" in found.stdout
    assert runner.invoke(app, ["export", "run", "--format", "onnx", "--out", "run/m.onnx"]).exit_code == 0
    assert Path("run/m.onnx").stat().st_size < 1_000_000, "texts are constants: the table of 49,408 tokens is not in it"


def test_an_app_carries_the_words_of_a_file(home: Path) -> None:
    (home / "mine.json").write_text(json.dumps(IDS), encoding="utf-8")
    model = {"name": "clip_small", "weights": str(home / "clip"), "options": {"class_words": "mine.json"}}
    folder = write_app(resolve(tree(home, model=model)), home / "app", name="app")
    (home / "mine.json").unlink()
    import tomllib

    flat = tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    dotted = {}

    def walk(part: Any, at: str) -> None:
        for key, value in part.items():
            walk(value, f"{at}{key}.") if isinstance(value, dict) else dotted.update({f"{at}{key}": value})

    walk(flat, "")
    config, _ = read_run_config(dotted)
    assert config.model.options["class_words"] == IDS
    assert build(config).experiment.spec.words == WORDS


def test_classes_of_the_same_word_are_warned_of_once(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    def built(words: list[str]) -> list[str]:
        caplog.clear()
        model = {"name": "clip_small", "weights": str(home / "clip"), "options": {"class_words": words}}
        done = build(resolve(tree(home, model=model)))
        experiment_from_dict(done.config.as_dict())
        return [record.getMessage() for record in caplog.records]

    assert built(["carp", "newt", "lemon"]) == []
    (told,) = built(["carp", "newt", "Carp"])
    assert "classes 'n01443537' and 'n07749582' have the same word 'Carp'" in told


@pytest.mark.filterwarnings("ignore")  # the exporter and its libraries warn about their own internals
@pytest.mark.parametrize(
    "method",
    [
        {"name": "fedduet", "pooled": 16, "heads": 2, "experts": 3, "bottleneck": 4, "shared_width": 4, "pool_size": 4}
        | {"dispatch": 2, "vocabulary": "file:words.txt"},
        {"name": "moe_adapters", "experts": 3, "bottleneck": 4},
        {"name": "moafcl", "context": 2, "adapters": 2, "gate_epochs": 1},
    ],
    ids=lambda method: method["name"],
)
def test_graphs_with_experts_take_any_number_of_pictures(home: Path, method: dict[str, Any]) -> None:
    from fedloom.onnx_export import export_onnx

    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    (home / "words.txt").write_text("cat\ndog\nfish\nsalamander\nlemon\ntree", encoding="utf-8")
    done = fedloom.run(tree(home, method=method, training={"rounds": 2, "batch_size": 4}), out=home / "run")
    path, told = export_onnx(done.folder, home / "m.onnx")
    assert "agrees with torch" in told
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"x": pictures().astype(np.float32)})
    torch.testing.assert_close(
        torch.from_numpy(found), open_served(done.folder).scores(pictures()), atol=1e-4, rtol=1e-4
    )
