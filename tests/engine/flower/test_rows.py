"""Which class rows travel, as each side finds out by itself."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr")

from fedloom.core import ConfigError
from fedloom.engine.flower.rows import Rows
from fedloom.engine.runtime import Runtime
from fedloom.engine.spool import Spool
from fedloom.engine.store import ClientStore
from toys.federation import experiment


def rows_of(path: Path, whole: Any) -> Rows:
    return Rows(Runtime(whole, ClientStore(path / "clients"), Spool(path / ".spool" / "0.bin"), path / "log.txt"))


def test_both_sides_find_the_same(tmp_path: Path):
    one, two = (rows_of(tmp_path / str(k), experiment("toys.tally:tally")) for k in range(2))
    other = rows_of(tmp_path / "other", experiment("toys.tally:tally", seed=1))
    assert one.digest == two.digest != other.digest
    assert {(field, name) for field in one.initial for name in one.initial[field]} == {
        ("params", "head.weight"), ("params", "head.bias"), ("census", "counts"),
    }  # fmt: skip


def test_the_rows_of_the_classes_that_have_arrived_travel(tmp_path: Path):
    whole = experiment("toys.tally:tally")
    found, weight = rows_of(tmp_path, whole), whole.method.init_server(whole.context(whole.net(), 0))["params"]
    for stage, seen in enumerate([(0, 1), (0, 1, 2, 3), (0, 1, 2, 3, 4, 5)]):
        cut = found.cut(stage)
        assert tuple(cut.seen) == seen and cut.rows["params", "head.weight"] == 0
        short = cut.narrow("params", "head.weight", weight["head.weight"])
        assert short is None if stage == 2 else torch.equal(short, weight["head.weight"][list(seen)])


def test_initial_rows_are_not_those_of_the_network_that_is_trained(tmp_path: Path):
    found = rows_of(tmp_path, experiment("fedloom.methods.fedavg:fedavg"))
    before = found.initial["params"]["head.bias"].clone()
    with torch.no_grad():
        for parameter in found._runtime.net.module.parameters():
            parameter.fill_(9.0)
    assert torch.equal(found.initial["params"]["head.bias"], before)


@pytest.mark.parametrize("where", ["init_server", "class_rows"])
def test_a_method_that_cannot_start_is_told_as_it_is_without_flower(where: str, tmp_path: Path):
    whole = experiment("toys.tally:tally")

    def broken(self: Any, ctx: Any) -> Any:
        raise ZeroDivisionError("broken on purpose")

    method = type("Broken", (type(whole.method),), {where: broken})(whole.method.local)
    with pytest.raises(
        ConfigError, match=r"the method cannot start: ZeroDivisionError: broken on purpose \(test_rows.py"
    ):
        rows_of(tmp_path, dataclasses.replace(whole, method=method))
