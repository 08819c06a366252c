"""`fedloom alignment` on small runs of a toy CLIP."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import fedloom
from fedloom import lifecycle
from fedloom.alignment import TRAINED, ZERO_SHOT, alignment
from fedloom.cli.alignment import alignment as command
from fedloom.core import Batches, CheckpointError, ConfigError, Context, ModelSpec, Payload, Update
from fedloom.core.seeds import seeded
from fedloom.local import LocalSGD
from fedloom.methods.clip_based import ClipMethod
from fedloom.models.clip.network import ClipNetwork
from fedloom.models.clip.words import fixed, learnable
from test_api import DIGITS
from toys.clip import LENGTH, toy_clip

CLASSES, CLIENTS, PROMPT = 4, 2, "a photo of a {}."


@dataclass(frozen=True)
class Prompted(ClipMethod):
    """Context vectors around a toy CLIP; a client predicts with those that it ended its last round with."""

    personal: ClassVar[bool] = True

    def module(self, spec: ModelSpec) -> ClipNetwork:
        clip = toy_clip(CLASSES)
        with seeded(0, "prompt"):
            context = 0.02 * torch.randn(2, clip.towers.text_width)
        return ClipNetwork(clip, learnable(clip.words, 2, LENGTH), context=context)

    def client_update(self, down: Payload, state: Payload, data: Batches, ctx: Context) -> Update:
        done = super().client_update(down, state, data, ctx)
        return done._replace(state={"own": done.up["params"]})

    def deployed(self, down: Payload, state: Payload, ctx: Context) -> Context:
        return super().deployed({**down, "params": state["own"]} if state else down, state, ctx)


def prompted(*, local: LocalSGD) -> Prompted:
    """Assemble the method."""
    return Prompted(local)


def blobs(seed: int = 0, count: int = 120) -> tuple[np.ndarray, np.ndarray]:
    """Classes in four directions of the plane."""
    rng = np.random.default_rng(seed)
    y = np.arange(count) % CLASSES
    centres = np.array([[3, 0], [0, 3], [-3, 0], [0, -3]])
    return (centres[y] + 0.3 * rng.normal(size=(count, 2))).astype(np.float32), y


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three stages, all of whose checkpoints are kept."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lifecycle, "_pictures", lambda *args: None)
        layer: dict[str, Any] = {
            "method": {"name": "test_alignment:prompted"},
            "model": {"name": "linear"},
            "stream": {"kind": "class_incremental", "tasks": 2},
            "partition": {"kind": "iid", "clients": CLIENTS},
            "training": {"rounds": 1, "optimizer": {"lr": 0.5}},
            "checkpoint": {"keep": 9},
        }
        out = tmp_path_factory.mktemp("runs") / "run"
        return fedloom.run(layer, data=(*blobs(), *blobs(1)), out=out).folder


def by_hand(folder: Path) -> dict[str, float]:
    """The final model's numbers from the whole test set at once."""
    model: Any = fedloom.load_run(folder).model
    x, y = (torch.from_numpy(a) for a in blobs(1))
    with torch.no_grad():
        out = model(x)
    cosines = (out["feats"] @ out["texts"].T).double()
    own = torch.nn.functional.one_hot(y, CLASSES).bool()
    return {
        "image_to_text": float((cosines.argmax(1) == y).double().mean()),
        "text_to_image": float((y[cosines.argmax(0)] == torch.arange(CLASSES)).double().mean()),
        "alignment": float(cosines[own].mean() - cosines[~own].mean()),
        "matched_cosine": float(cosines[own].mean()),
    }


def test_every_stage_has_a_row_and_the_frozen_model_beside_it(folder: Path) -> None:
    rows = alignment(folder)
    assert [(row.stage, row.model, row.classes, row.pictures) for row in rows] == [
        (0, TRAINED, 2, 60), (0, ZERO_SHOT, 2, 60), (1, TRAINED, 4, 120), (1, ZERO_SHOT, 4, 120),
    ]  # fmt: skip
    for name, value in by_hand(folder).items():
        assert getattr(rows[2], name) == pytest.approx(value, abs=1e-6), name
    assert rows[2].alignment != rows[3].alignment


def test_rows_agree_with_the_measures_of_the_run(folder: Path) -> None:
    stages = [row for row in fedloom.load_run(folder).metrics if row["scope"] == "stage"]
    rows = [row for row in alignment(folder) if row.model == TRAINED]
    assert len(rows) == len(stages) == 2
    for row, stage in zip(rows, stages, strict=True):
        want = {"alignment": row.alignment, "matched_cosine": row.matched_cosine}
        assert stage["measures"] == pytest.approx(want, abs=1e-9)
        assert stage["accuracy"] == pytest.approx(row.image_to_text), "its scores are the cosines"


def test_the_zero_shot_rows_are_those_of_the_frozen_towers_with_the_template(folder: Path) -> None:
    clip = toy_clip(CLASSES)
    network = ClipNetwork(clip, fixed(clip.words, PROMPT, LENGTH)).eval()
    x, y = (torch.from_numpy(a) for a in blobs(1))
    with torch.no_grad():
        want, (total, count) = network(x), network.measures(network(x), y)["alignment"]
    row = alignment(folder)[3]
    assert row.alignment == pytest.approx(total / count, abs=1e-6)
    assert row.image_to_text == float((want["logits"].argmax(1) == y).double().mean())
    assert alignment(folder, template="{}")[3].alignment != row.alignment
    assert alignment(folder, template="{}")[2] == alignment(folder)[2]


def test_a_client_is_measured_with_what_is_its_own_at_every_stage(folder: Path) -> None:
    ours, theirs = ([row for row in alignment(folder, client=k) if row.model == TRAINED] for k in (0, 1))
    common = [row for row in alignment(folder) if row.model == TRAINED]
    assert [row.stage for row in ours] == [0, 1]
    for a, b, c in zip(ours, theirs, common, strict=True):
        assert len({a.alignment, b.alignment, c.alignment}) == 3
    with pytest.raises(ConfigError, match="--client is 2, but the run has the clients 0 to 1"):
        alignment(folder, client=2)


def test_stages_whose_checkpoint_is_gone_or_damaged_are_left_out(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    whole = alignment(copy)
    kept = copy / "checkpoints" / "stage0001-trip00000"
    (kept / "meta.json").write_text("{")
    assert alignment(copy) == whole[2:]
    shutil.rmtree(kept)
    assert alignment(copy) == whole[2:]


def run_command(*arguments: str) -> Any:
    import typer

    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, list(arguments))


def test_the_command_prints_a_table_or_one_object(folder: Path) -> None:
    done = run_command(str(folder))
    lines = done.stdout.splitlines()
    assert done.exit_code == 0 and len(lines) == 5
    assert " ".join(lines[0].split()) == "stage model classes pictures I2T R@1 T2I R@1 alignment matched cosine"
    row = alignment(folder)[2]
    assert lines[3].split()[:4] == ["1", "trained", "4", "120"] and f"{row.matched_cosine:.4f}" in lines[3]
    found = json.loads(run_command(str(folder), str(folder), "--json", "--client", "1").stdout)
    assert [run["folder"] for run in found["runs"]] == [str(folder)] * 2
    assert found["runs"][0]["rows"][2]["alignment"] == alignment(folder, client=1)[2].alignment


def test_runs_without_class_texts_and_folders_without_a_run_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "_pictures", lambda *args: None)
    plain = fedloom.run(DIGITS, out=tmp_path / "run").folder
    with pytest.raises(ConfigError, match="is a run of fedavg, which has no texts of classes"):
        alignment(plain)
    with pytest.raises(CheckpointError, match="is not a run folder"):
        alignment(tmp_path)
    done = run_command(str(plain))
    assert done.exit_code == 2 and "which has no texts of classes" in done.output
