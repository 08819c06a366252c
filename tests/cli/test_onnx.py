"""ONNX export of every kind of prediction: plain logits, a gate over experts, and a network that was pruned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedloom import api, lifecycle
from fedloom.core.errors import ConfigError

pytest.importorskip("onnxscript", reason="the extra 'onnx' is not installed")


@pytest.mark.filterwarnings("ignore")  # the exporter and its libraries warn about their own internals on import
@pytest.mark.parametrize("method", ["fedavg", "fedfmx", "test_served:halved"])
def test_the_exported_graph_agrees_with_torch(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedloom.onnx_export import export_onnx

    monkeypatch.setattr(lifecycle, "_pictures", lambda *args: None)
    pruned = method == "test_served:halved"
    model = {"name": "digits_cnn" if pruned else "linear"}
    layer = {"method": method, "model": model, "partition": {"kind": "iid", "clients": 2}}
    done = api.run({**layer, "training": {"rounds": 1}, "stream": {"tasks": 2}}, out=tmp_path / "run")
    path, checked = export_onnx(done.folder, tmp_path / "m.onnx")
    size = path.stat().st_size
    assert 4 * done.summary["active_parameters"] < size
    assert not pruned or size < 4 * done.summary["parameters"]
    assert "agrees with torch" in checked or "onnxruntime is not installed" in checked


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "method",
    [{"name": "fedfip", "keep": 0.5, "reactivation_threshold": 0.3, "react_max": 0.4}, {"name": "fedbn"}],
    ids=lambda method: method["name"],
)
def test_the_exported_graph_of_a_client_predicts_as_the_client_does(
    method: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import numpy as np
    import torch

    from fedloom.onnx_export import export_onnx
    from fedloom.served import open_personal, open_served

    runtime = pytest.importorskip("onnxruntime")
    monkeypatch.setattr(lifecycle, "_pictures", lambda *args: None)
    x = np.random.default_rng(0).integers(0, 256, (24, 1, 8, 8), dtype=np.uint8)
    layer = {"method": method, "model": "resnet8", "partition": {"kind": "iid", "clients": 2}}
    layer |= {"training": {"rounds": 2}, "stream": {"kind": "static"}}
    done = api.run(layer, data=(x, np.arange(24) % 2, np.arange(24) // 2 % 2), out=tmp_path / "run")
    path, checked = export_onnx(done.folder, tmp_path / "m.onnx", 1)
    assert "agrees with torch" in checked
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"x": x[:5].astype(np.float32)})
    want = open_personal(done.folder, 1).scores(x[:5])
    torch.testing.assert_close(torch.from_numpy(found), want, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(want, open_served(done.folder).scores(x[:5]), atol=2e-4)


@pytest.mark.filterwarnings("ignore")
def test_a_run_in_bf16_is_exported_in_fp32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedloom.onnx_export import export_onnx

    monkeypatch.setattr(lifecycle, "_pictures", lambda *args: None)
    layer = {"method": "fedavg", "model": {"name": "digits_cnn"}, "partition": {"kind": "iid", "clients": 2}}
    training = {"rounds": 1, "precision": "bf16"}
    done = api.run({**layer, "training": training, "stream": {"tasks": 2}}, out=tmp_path / "run")
    assert "differs" not in export_onnx(done.folder, tmp_path / "m.onnx")[1]


@pytest.mark.filterwarnings("ignore")
def test_a_graph_that_does_not_run_or_differs_is_not_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedloom import onnx_export

    runtime = pytest.importorskip("onnxruntime")
    monkeypatch.setattr(lifecycle, "_pictures", lambda *args: None)
    layer = {"method": "fedavg", "model": {"name": "linear"}, "partition": {"kind": "iid", "clients": 2}}
    done = api.run({**layer, "training": {"rounds": 1}, "stream": {"tasks": 2}}, out=tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(onnx_export, "TOLERANCE", -1.0)
        with pytest.raises(ConfigError, match=r"the exported graph differs from torch by .*; use --format safetensors"):
            onnx_export.export_onnx(done.folder, tmp_path / "m.onnx")
    assert not (tmp_path / "m.onnx").exists()

    def broken(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no\nsuch operator")

    monkeypatch.setattr(runtime, "InferenceSession", broken)
    with pytest.raises(ConfigError, match=r"onnxruntime cannot run the exported graph \(no such operator\)"):
        onnx_export.export_onnx(done.folder, tmp_path / "m.onnx")
    assert not (tmp_path / "m.onnx").exists()


def test_the_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    from fedloom.onnx_export import _need

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'fedloom\[onnx\]'"):
        _need("onnx")
