"""Exported files: what they hold, and the networks that their metadata make again."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

import fedloom
from fedloom import lifecycle
from fedloom.core import CheckpointError, ConfigError
from fedloom.models.registry import ENTRIES
from fedloom.models.spec import NetworkSpec
from fedloom.safetensors_export import export_safetensors, load_exported
from fedloom.served import Served, open_personal, open_served
from test_api import DIGITS
from test_served import images

TWO_CLIENTS = {"stream": {"kind": "static"}, "partition": {"kind": "iid", "clients": 2}, "training": {"rounds": 1}}


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "_pictures", lambda *args: None)


def few(channels: int = 1) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """40 images of two classes and two domains."""
    x = np.random.default_rng(1).integers(0, 256, (40, channels, 8, 8), dtype=np.uint8)
    return x, np.arange(40) % 2, ["photo", "sketch"] * 10 + ["sketch", "photo"] * 10


def told(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return file.metadata()


def assert_the_same(path: Path, served: Served, x: np.ndarray) -> torch.nn.Module:
    """The network of the file gives the scores of `served`, from inputs that its metadata normalise."""
    net, meta = load_exported(path), told(path)
    mean, std = (torch.tensor(json.loads(meta[key])).view(1, -1, 1, 1) for key in ("mean", "std"))
    with torch.no_grad():
        out = net((torch.from_numpy(x) / 255 - mean) / std)
    assert not net.training
    # A network whose maps shrink to one pixel has huge scores, which kernels for other batches round otherwise.
    torch.testing.assert_close(out["logits"], served.scores(x), atol=1e-5, rtol=1e-4)
    return net


NETWORKS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("linear", {}, {}),
    ("mlp", {}, {"hidden": [128]}),
    ("mlp", {"hidden": [8, 6]}, {"hidden": [8, 6]}),
    ("moe_mlp", {"width": 8, "inner": 8}, {"width": 8, "inner": 8, "experts": 4, "top_k": 1, "layers": 1}),
    ("small_cnn", {}, {"width": 128}),
    ("digits_cnn", {"width": 24}, {"width": 24}),
    ("resnet8", {}, {"stem_stride": 1, "width": 16}),
    ("resnet8", {"stem_stride": 2}, {"stem_stride": 2, "width": 16}),
    ("resnet8", {"width": 4}, {"stem_stride": 1, "width": 4}),
    ("resnet8_gn", {"groups": 4, "stem_stride": 2}, {"groups": 4, "stem_stride": 2, "width": 16}),
    ("resnet20", {"stem_stride": 2}, {"stem_stride": 2, "width": 16}),
    ("resnet20_gn", {}, {"groups": 8, "stem_stride": 1, "width": 16}),
    ("resnet18", {"stem_stride": 2}, {"stem_stride": 2, "width": 64}),
    ("resnet18_gn", {"stem_stride": 2}, {"groups": 8, "stem_stride": 2, "width": 64}),
    ("torchvision/shufflenet_v2_x0_5", {}, {}),
]


@pytest.mark.parametrize(("name", "options", "shown"), NETWORKS, ids=str)
def test_the_metadata_rebuild_every_network(
    name: str, options: dict[str, Any], shown: dict[str, Any], tmp_path: Path
) -> None:
    x, y, _ = few(3)
    training = {"rounds": 1, "optimizer": {"lr": 0.001}}
    layer = {**TWO_CLIENTS, "model": {"name": name, "options": options}, "training": training}
    done = fedloom.run(layer, data=(x[:8], y[:8], x[8:12], y[8:12]), out=tmp_path / "run")
    path = export_safetensors(done.folder, tmp_path / "m.safetensors")
    meta = told(path)
    assert meta["model"] == name and json.loads(meta["model_options"]) == shown
    assert json.loads(meta["input_shape"]) == [3, 8, 8] and json.loads(meta["class_names"]) == ["0", "1"]
    assert meta["client"] == "null" and "widths" not in meta
    net = assert_the_same(path, open_served(done.folder), x[:4])
    again = NetworkSpec(name, 2, (3, 8, 8), options=json.loads(meta["model_options"])).classifier()
    again.load_state_dict(net.state_dict(), strict=True)


def test_no_network_of_the_library_was_left_out() -> None:
    reads_texts = {name for name, entry in ENTRIES.items() if entry.text}  # exported in test_text_runs.py
    assert ENTRIES.keys() - reads_texts <= {name for name, _, _ in NETWORKS}


def test_a_clients_compact_network_predicts_as_the_client_does(tmp_path: Path) -> None:
    layer = {
        **TWO_CLIENTS,
        "model": {"name": "resnet8", "options": {"stem_stride": 2}},
        "partition": {"kind": "single", "clients": 2},
        "training": {"rounds": 2},
        "method": {"name": "fedfip", "keep": 0.5, "reactivation_threshold": 0.3, "react_max": 0.4},
    }
    x, y, domains = few()
    done = fedloom.run(layer, data=(x, y, domains), out=tmp_path / "run")
    widths, sizes = {}, {}
    for client in (None, 0, 1):
        path = export_safetensors(done.folder, tmp_path / f"{client}.safetensors", client)
        served = open_served(done.folder) if client is None else open_personal(done.folder, client)
        net = assert_the_same(path, served, x)
        meta = told(path)
        widths[client], sizes[client] = json.loads(meta["widths"]), json.loads(meta["parameters"])
        assert json.loads(meta["client"]) == client and meta["method"] == "fedfip"
        assert sizes[client] == sum(p.numel() for p in net.parameters())
        assert len(net.backbone.stem.weight) == widths[client]["backbone.stem"]
    assert sizes[None] == done.summary["active_parameters"]
    assert all(widths[None][group] <= widths[k][group] for k in (0, 1) for group in widths[None])
    assert sizes[None] < max(sizes[0], sizes[1]) < done.summary["parameters"]


@pytest.mark.parametrize("method", ["fedbn", "fdse"])
def test_clients_of_methods_with_layers_of_their_own(method: str, tmp_path: Path) -> None:
    x, y, domains = few()
    layer = {**TWO_CLIENTS, "model": "resnet8", "method": method}
    done = fedloom.run(layer, data=(x, y, domains), out=tmp_path / "run")
    paths = [export_safetensors(done.folder, tmp_path / f"{k}.safetensors", k) for k in (0, 1)]
    for client, path in enumerate(paths):
        assert_the_same(path, open_personal(done.folder, client), x)
    one, two = (load_exported(path).state_dict() for path in paths)
    assert any(not torch.equal(one[name], two[name]) for name in one)


def test_an_export_holds_whatever_a_method_predicts_with(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    done = fedloom.run({**DIGITS, "method": {"name": "replay", "memory": 20}}, out=tmp_path / "run")
    found = load_file(export_safetensors(done.folder, tmp_path / "model.safetensors"))
    served = open_served(done.folder)
    names = {f"means.{name}" for name in served.view["means"]}
    assert names <= found.keys() and len(names) == 2
    assert all(torch.equal(found[f"means.{name}"], t) for name, t in served.view["means"].items())
    assert {name for name in found if not name.startswith("means.")} == set(done.model.state_dict())


def test_a_pruned_model_is_exported_as_the_compact_network_and_loads_in_plain_torch(tmp_path: Path) -> None:
    """By the function that the guide shows."""
    from safetensors import safe_open

    layer = {**DIGITS, "method": {"name": "test_served:halved"}, "model": {"name": "digits_cnn"}}
    done = fedloom.run(layer, out=tmp_path / "run")
    path = export_safetensors(done.folder, tmp_path / "model.safetensors")
    guide = (Path(__file__).parents[1] / "docs" / "method-guide.md").read_text(encoding="utf-8")
    (block,) = (code for code in re.findall(r"```python\n(.*?)```", guide, re.DOTALL) if "def load_compact" in code)
    exec(block, shown := {})
    net = shown["load_compact"](NetworkSpec("digits_cnn", 10, (1, 8, 8), 0).classifier(), str(path))
    with safe_open(path, "pt") as file:
        meta, shapes = file.metadata(), {name: tuple(file.get_tensor(name).shape) for name in file.keys()}  # noqa: SIM118
    assert shapes["backbone.convs.1.conv.weight"] == (16, 8, 3, 3) and shapes["backbone.fc.weight"] == (32, 16 * 16)
    size = 8 * 9 + 8 + 16 * 8 * 9 + 16 + 32 * 256 + 32 + 10 * 32 + 10
    assert json.loads(meta["parameters"]) == done.summary["active_parameters"] == size < done.summary["parameters"]
    mean, std = (json.loads(meta[key])[0] for key in ("mean", "std"))
    x = torch.from_numpy(images())
    logits = net((x / 255 - mean) / std)
    logits = logits if isinstance(logits, torch.Tensor) else logits["logits"]
    assert torch.allclose(logits, done.scores(x), atol=1e-5)
    assert sum(p.numel() for p in done.model.parameters()) == size and not done.model.training


def test_a_client_whose_prediction_no_network_tells_is_refused(tmp_path: Path) -> None:
    """Its `predict` takes a mean with what it remembers."""
    done = fedloom.run({**DIGITS, "method": "toys.tally:tally"}, out=tmp_path / "run")
    with pytest.raises(ConfigError, match=r"--client is 1, but with toys\.tally:tally what .* is no network"):
        export_safetensors(done.folder, tmp_path / "m.safetensors", 1)
    assert_the_same(export_safetensors(done.folder, tmp_path / "m.safetensors"), open_served(done.folder), images())


def test_other_files_are_told(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    done = fedloom.run(DIGITS, out=tmp_path / "run")
    path = export_safetensors(done.folder, tmp_path / "model.safetensors")
    tensors, meta = load_file(path), told(path)
    with pytest.raises(ConfigError, match="--client is 0, but with fedavg every client predicts with the global model"):
        export_safetensors(done.folder, tmp_path / "none.safetensors", 0)
    for name, kept, header in (
        ("plain", tensors, None),
        ("short", {"head.weight": tensors["head.weight"]}, meta),
        ("wide", {**tensors, "head.weight": torch.zeros(10, 65)}, meta),
    ):
        save_file(kept, tmp_path / name, metadata=header)
        with pytest.raises(CheckpointError, match=f"{name}' is no model that `fedloom export` wrote"):
            load_exported(tmp_path / name)
    for other in (tmp_path / "none.safetensors", done.folder / "config.yaml"):
        with pytest.raises(CheckpointError, match="is no model that"):
            load_exported(other)
