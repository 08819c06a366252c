"""Models of single clients: serial runs and federations open the same ones."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from torch import nn

import fedloom
from fedloom import lifecycle
from fedloom.core import CheckpointError, ConfigError, Context, ModelSpec, Payload
from fedloom.local import LocalSGD
from fedloom.methods.fedavg import FedAvg
from fedloom.models.compact import prunable
from fedloom.served import module_of, open_personal, open_served, open_view
from test_api import DIGITS

PERSONAL = {**DIGITS, "method": {"name": "toys.tally:tally"}}


@dataclass(frozen=True)
class Halved(FedAvg):
    """Served with every second channel."""

    def module(self, spec: ModelSpec) -> nn.Module:
        return prunable(spec.classifier(), getattr(spec, "input_shape", None))

    def deployed(self, down: Payload, state: Payload, ctx: Context) -> Context:
        channels = ctx.net.module.channels
        kept = {group.name: torch.arange(1, group.size, 2) for group in channels.groups}
        small = ctx.rebuild(channels.widths(kept))
        small.bind(channels.gather(down["params"], kept), channels.gather(down["buffers"], kept))
        return small


def halved(*, local: LocalSGD) -> Halved:
    """Assemble the method."""
    return Halved(local)


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
    with pytest.raises(ConfigError, match="--client is 1, but with fedavg every client predicts with the global model"):
        open_view(done.folder, 1)
    with pytest.raises(ConfigError, match="--client is -1, but the run has the clients 0 to 1"):
        open_view(done.folder, -1)


@pytest.mark.parametrize("method", ["fedfip", "fedavg"])
def test_a_configuration_that_was_changed_after_the_run_is_told(method: str, tmp_path: Path) -> None:
    domains = {"data": {"name": "sklearn/digits-domains"}, "stream": {"kind": "static"}, "partition": {"clients": 2}}
    layer = {**domains, "method": {"name": method}, "model": {"name": "digits_cnn"}, "training": {"rounds": 1}}
    done = fedloom.run(layer, out=tmp_path / "run")
    config = yaml.safe_load((done.folder / "config.yaml").read_text())
    config["model"]["options"] = {"width": 24}
    (done.folder / "config.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(CheckpointError, match=r"do not fit the network .* restore config.yaml"):
        fedloom.load_run(done.folder).scores(images())


def test_a_view_without_parameters_is_no_network_to_export(tmp_path: Path) -> None:
    served = open_served(fedloom.run(DIGITS, out=tmp_path / "run").folder)
    bare = dataclasses.replace(served, view={"weights": served.view["params"]})
    with pytest.raises(ConfigError, match="is no single network; use scores"):
        module_of(bare)


def test_what_a_served_model_knows_of_domains(tmp_path: Path) -> None:
    """Folders of runs without domains, and of earlier versions, open as well; damage is told."""
    done = fedloom.run(DIGITS, out=tmp_path / "run")
    path = done.folder / "model" / "model.json"
    written = json.loads(path.read_text())
    domains = ("domain_names", "current_domains", "seen_domains", "old_domains")
    assert [written[key] for key in domains] == [[], [], [], []]
    path.write_text(json.dumps({key: value for key, value in written.items() if key not in domains}))
    assert open_served(done.folder).context.num_domains == 0
    given = {"domain_names": ["photo", "sketch"], "current_domains": [1], "seen_domains": [0, 1], "old_domains": [0]}
    path.write_text(json.dumps({**written, **given}))
    context = open_served(done.folder).context
    assert context.num_domains == 2
    stage = context.stage
    assert (stage.domains, stage.seen_domains, stage.old_domains) == ((1,), (0, 1), (0,))
    for damage in ({"seen_domains": ["a"]}, {"domain_names": [3]}, {"old_domains": None}, {"current_domains": [-1]}):
        path.write_text(json.dumps({**written, **given, **damage}))
        with pytest.raises(CheckpointError, match=r"model\.json is missing or damaged"):
            open_served(done.folder)
