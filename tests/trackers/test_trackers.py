"""Which trackers there are, and what is said when one cannot be used."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path

import pytest
from typer.testing import CliRunner

import fedloom
from fedloom.cli import app
from fedloom.config import config_hash, resolve
from fedloom.config.sections import Config
from fedloom.config.words import tagged
from fedloom.core.errors import ConfigError
from fedloom.environment import EXTRAS
from fedloom.trackers import check_installed

NAMES = ["mlflow", "tensorboard", "wandb"]


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in NAMES else find(name))


def test_every_tracker_of_the_configuration_has_a_module_and_a_package() -> None:
    assert sorted(tagged(Config, "tracker")) == NAMES
    for name in NAMES:
        assert importlib.util.find_spec(f"fedloom.trackers.{name}") is not None
        assert any(package.startswith(name) for package in EXTRAS["trackers"])


@pytest.mark.parametrize("name", NAMES)
def test_a_tracker_that_is_not_installed_is_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_installed: None, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    sentence = f"tracker is {name}, but that package is not installed; pip install 'fedloom[trackers]'"
    for command in (["run"], ["run", "--dry-run"], ["compare", "-m", "fedavg"]):
        result = CliRunner().invoke(app, [*command, "--set", f"tracker={name}"])
        assert result.exit_code == 2 and sentence in result.stderr, result.output
    with pytest.raises(ConfigError, match="not installed"):
        fedloom.run("quickstart", tracker=name)
    assert not list(tmp_path.iterdir())


def test_a_folder_of_the_same_name_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "no_such_tracker").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    with pytest.raises(ConfigError, match="not installed"):
        check_installed({"name": "no_such_tracker"})
    check_installed(None)


def test_a_tracker_is_no_part_of_the_hash() -> None:
    trees = [resolve({"tracker": tracker}).as_dict() for tracker in (None, "wandb", {"name": "mlflow", "uri": "x"})]
    assert len({config_hash(tree, "data", "cpu", "contiguous") for tree in trees}) == 1
