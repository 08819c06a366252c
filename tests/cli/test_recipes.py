"""What the recipes promise in their headers; minutes of training, so run with -m slow."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fedloom import api
from fedloom.build import build
from fedloom.config import resolve, resolve_source
from fedloom.core.errors import Interrupted
from fedloom.engine.experiment import Observer

DATA = Path(__file__).parents[2].parent / "shared" / "data"
METHODS = ("fedavg", "fedprox", "fedfmx")


class FirstStage(Observer):
    """Keeps the row of the first stage and ends the run there."""

    def stage_done(self, row: Mapping[str, Any]) -> None:
        self.row = row
        raise Interrupted("the first stage is all that is asked for")


def first_stage(recipe: str, method: str, folder: Path, **layer: Any) -> Mapping[str, Any]:
    watch = FirstStage()
    with pytest.raises(Interrupted):
        api.run(recipe, method=method, out=folder, observers=[watch], **layer)
    return watch.row


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_quickstart_learns_its_first_task(method: str, tmp_path: Path) -> None:
    row = first_stage("quickstart", method, tmp_path / "run")
    assert row["accuracy/current"] > 0.75  # one of two classes by chance; one of ten over the whole head


@pytest.mark.slow
@pytest.mark.skipif(not (DATA / "uoft-cs" / "cifar100").is_dir(), reason="the CIFAR-100 mirror is not here")
@pytest.mark.parametrize("method", METHODS)
def test_cifar100_small_learns_its_first_task(method: str, tmp_path: Path) -> None:
    row = first_stage("cifar100-fcil-small", method, tmp_path / "run", data={"root": str(DATA)})
    assert row["accuracy/current"] > 2 * 0.1


@pytest.mark.parametrize(("recipe", "root"), [("quickstart", None), ("cifar100-fcil-small", DATA)])
def test_recipes_use_all_data_and_take_ten_steps(recipe: str, root: Path | None) -> None:
    if root is not None and not (root / "uoft-cs" / "cifar100").is_dir():
        pytest.skip("the CIFAR-100 mirror is not here")
    layer = {} if root is None else {"data": {"root": str(root)}}
    made = build(resolve(resolve_source(recipe)[1], layer))
    plan, training = made.experiment.plan, made.config.training
    sizes = [plan.size(c, s) for s in range(plan.num_stages) for c in plan.participants(s)]
    assert sum(sizes) == len(made.source.y_train)
    mean = sum(sizes) / len(sizes)
    assert mean * training.local_epochs / training.batch_size >= 10
    assert training.rounds >= 5
    if recipe.startswith("cifar"):
        assert sum(p.numel() for p in made.experiment.spec.classifier().parameters()) <= 100_000
