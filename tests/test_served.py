"""Models of single clients: serial runs and federations open the same ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import fedloom
from fedloom import lifecycle
from fedloom.core import CheckpointError, ConfigError
from fedloom.served import export_safetensors, open_personal, open_served
from test_api import DIGITS

PERSONAL = {**DIGITS, "method": {"name": "toys.tally:tally"}}


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "_pictures", lambda *args: None)


def images() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 17, (5, 1, 8, 8), dtype=np.uint8)


def test_a_client_predicts_with_its_own_state(tmp_path: Path) -> None:
    done = fedloom.run(PERSONAL, out=tmp_path / "run")
    own = [open_personal(done.folder, client).scores(images()) for client in (0, 1)]
    assert not torch.equal(*own)
    assert own[0].shape == (5, 10) and bool(own[0].isfinite().all())
    with pytest.raises(ConfigError, match="--client is 2, but the run has the clients 0 to 1"):
        open_personal(done.folder, 2)


def test_a_federation_leaves_the_same_models_on_its_nodes(tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    serial = fedloom.run(PERSONAL, out=tmp_path / "serial")
    grid = fedloom.run(PERSONAL, engine="flower", out=tmp_path / "grid")
    for client in (0, 1):
        want = open_personal(serial.folder, client).scores(images())
        assert torch.equal(open_personal(grid.folder, client).scores(images()), want)
        left = next((tmp_path / "grid" / "nodes" / str(client)).glob(f"*/personal/{client}"))
        assert torch.equal(open_served(left).scores(images()), want)
        for folder in left.parent.parent.glob("clients/*"):  # the state of a deployed client is not on this machine
            for file in folder.iterdir():
                file.unlink()
        left.rename(left.with_name("elsewhere"))
        with pytest.raises(CheckpointError, match=f"the state of client {client} lies on its node; predict there"):
            open_personal(grid.folder, client)


def test_a_client_without_anything_of_its_own_has_the_global_model(tmp_path: Path) -> None:
    done = fedloom.run(DIGITS, out=tmp_path / "run")
    assert torch.equal(open_personal(done.folder, 1).scores(images()), open_served(done.folder).scores(images()))


def test_an_export_holds_whatever_a_method_predicts_with(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    done = fedloom.run({**DIGITS, "method": {"name": "replay", "memory": 20}}, out=tmp_path / "run")
    found = load_file(export_safetensors(done.folder, tmp_path / "model.safetensors"))
    served = open_served(done.folder)
    names = {f"means.{name}" for name in served.view["means"]}
    assert names <= found.keys() and len(names) == 2
    assert all(torch.equal(found[f"means.{name}"], t) for name, t in served.view["means"].items())
    assert {name for name in found if not name.startswith("means.")} == set(done.model.state_dict())
