"""Payloads in bfloat16 travel over Flower bit for bit, whatever the method makes of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fedloom.methods
from conformance.test_methods import SAME, over_grid  # noqa: F401  # a fixture
from fedloom.engine.files import load_payload
from toys.federation import HalfSpec, experiment, method_of
from toys.running import rows, start

NAMES = [f"fedloom.methods.{name}:{name}" for name in fedloom.methods.names()]
EXPERTS = [name for name in NAMES if method_of(name).needs_experts]
pytestmark = pytest.mark.usefixtures("no_global_draws")


@pytest.mark.parametrize("name", ["fedloom.methods.fedavg:fedavg", *EXPERTS])
def test_same_bits_over_a_grid_in_bfloat16(name: str, tmp_path: Path, over_grid):  # noqa: F811  # the fixture
    plan = {"num_stages": 1, "per_class": 20, "cohort": 1.0, "spec": HalfSpec()}
    first = start(tmp_path / "serial", experiment(name, **plan))
    second = over_grid(tmp_path / "grid", experiment(name, **plan))
    assert [second[key] for key in SAME] == [first[key] for key in SAME]
    assert second["failed_clients"] == second["rejected_updates"] == 0
    assert rows(tmp_path / "grid") == rows(tmp_path / "serial")
    last = sorted((tmp_path / "serial" / "checkpoints").iterdir())[-1] / "server.safetensors"
    params = load_payload(last)["params"]
    assert params and {tensor.dtype for tensor in params.values()} == {torch.bfloat16}
