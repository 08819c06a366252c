"""The app folder, by our own eyes and by Flower's checks."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedloom.config import Config, recipe_names, resolve, resolve_source
from fedloom.core.errors import ConfigError
from fedloom.deploy.flatten import read_run_config
from fedloom.deploy.folder import app_name, deployed, write_app

FLOWER = importlib.util.find_spec("flwr") is not None


# recipes whose data every node finds by name; the others are told where the folder lies
PORTABLE = [name for name in recipe_names() if not resolve(resolve_source(name)[1]).data.name.startswith("folder:")]


def recipe(name: str = "quickstart", **layer: Any) -> Config:
    return resolve(resolve_source(name)[1], layer)


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as dotted keys, as Flower reads them."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def said(app: Path) -> dict[str, Any]:
    """The run config that a folder holds."""
    return flat(tomllib.loads((app / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"])


@pytest.mark.parametrize("name", PORTABLE)
def test_the_folder_holds_the_configuration_of_a_federation(name: str, tmp_path: Path) -> None:
    out = write_app(recipe(name, data={"root": "/here"}), tmp_path / "new" / "app", name=app_name(name))
    config, deployment = read_run_config(said(out))
    want = recipe(name).as_dict()
    want["engine"] |= {"name": "flower", "runtime": "deployment", "workers": 1}
    assert config.as_dict() == want
    project = app_name(name).replace("_", "-")
    assert deployment._asdict() == {"name": project, "out": "", "resume": False, "events": ""}


def test_values_that_toml_could_bend_arrive_as_they_were(tmp_path: Path) -> None:
    odd = ["a\"b\\c'd", "tab\tnew\nline\x7f\x00", "ärger \U0001f600", "", "C:\\data", 'it\'s "it"', "1e5"]
    wild = {f"k{k}": text for k, text in enumerate(odd)} | {"lr": 1e-08, "big": 1e22, "whole": 2.0, "n": 2**63 - 1}
    config = recipe(model={"options": wild})
    found, _ = read_run_config(said(write_app(config, tmp_path / "app", name="app")))
    assert repr(found.model.options) == repr(wild)


def test_the_shims_are_few_lines_that_import_fedloom_alone(tmp_path: Path) -> None:
    out = write_app(recipe(), tmp_path / "app", name="quick_start")
    listed = sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file())
    package = "quick_start_app"
    assert listed == [
        ".gitignore", "README.md", "pyproject.toml",
        f"{package}/__init__.py", f"{package}/client_app.py", f"{package}/server_app.py",
    ]  # fmt: skip
    for side in ("client", "server"):
        tree = ast.parse((out / package / f"{side}_app.py").read_text())
        _, load, make = tree.body
        assert ast.unparse(load) == f"from fedloom.deploy import {side}_app"
        assert ast.unparse(make) == f"app = {side}_app()"
    parts = tomllib.loads((out / "pyproject.toml").read_text())
    assert parts["project"]["name"] == "quick-start"
    assert parts["tool"]["flwr"]["app"]["components"] == {
        "serverapp": f"{package}.server_app:app", "clientapp": f"{package}.client_app:app"
    }  # fmt: skip


def test_the_readme_spreads_the_clients_over_two_nodes(tmp_path: Path) -> None:
    text = (write_app(recipe(), tmp_path / "a", name="app") / "README.md").read_text()
    assert re.findall(r"--node-config '(.*)'", text) == ['clients="0-4"', 'clients="5-9"']
    assert "FEDLOOM_DATA" not in text and "the data set comes with scikit-learn" in text
    text = (write_app(recipe("small"), tmp_path / "b", name="app") / "README.md").read_text()
    assert re.findall(r"--node-config '(.*)'", text) == [
        'data-root="/srv/data" clients="0-49"', 'data-root="/srv/data" clients="50-99"'
    ]  # fmt: skip
    assert "export FEDLOOM_DATA=/srv/data\nflower-superlink" in text
    lone = recipe(partition={"clients": 1}, training={"cohort": 1})
    text = (write_app(lone, tmp_path / "c", name="app") / "README.md").read_text()
    assert re.findall(r"--node-config '(.*)'", text) == ['clients="0"']


def test_the_readme_names_what_nodes_need(tmp_path: Path) -> None:
    config = recipe("small", data={"name": "folder:/srv/cats"}, model={"weights": "/srv/w.safetensors"})
    text = (write_app(config, tmp_path / "a", name="app") / "README.md").read_text()
    assert "- the data set at `/srv/cats`\n- the initial weights at `/srv/w.safetensors`" in text
    assert "data-root" not in text and "$" not in text.replace("$FLWR_HOME", "")
    config = recipe("small", model={"name": "torchvision/resnet18", "weights": "IMAGENET1K_V1"})
    text = (write_app(config, tmp_path / "b", name="app") / "README.md").read_text()
    assert "the published weights `IMAGENET1K_V1` of `torchvision/resnet18`, in its cache or by download" in text


@pytest.mark.parametrize(
    ("layer", "sentence"),
    [
        ({"data": {"name": "stored:abc"}}, "data.name is stored:abc, arrays that were passed from Python"),
        ({"model": {"name": "object:Net-1"}}, "model.name is object:Net-1, a network that was passed from Python"),
        ({"model": {"name": "__main__:make"}}, "model.name is __main__:make, which nodes cannot import"),
        ({"data": {"name": "folder:cats"}}, "data.name is folder:cats, a path that nodes cannot follow"),
        ({"data": {"name": "parquet:a/b"}}, "such as parquet:/srv/data"),
        ({"model": {"weights": "w.safetensors"}}, "model.weights is w.safetensors, a path that nodes cannot follow"),
        ({"engine": {"name": "flower", "runtime": "simulation"}}, "engine.runtime is simulation, which runs on one"),
        ({"engine": {"name": "flower", "runtime": "grid"}}, "engine.runtime is grid, which runs on one machine"),
        ({"method": {"name": "joint"}}, "method 'joint' has the data view pooled_cumulative, for which all data"),
    ],
)
def test_what_cannot_leave_this_machine_is_refused(layer: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        write_app(recipe(**layer), tmp_path / "new" / "app", name="app")
    assert sentence in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_home_of_the_user_is_a_path_that_nodes_can_follow() -> None:
    assert deployed(recipe(data={"name": "folder:~/cats"})).data.name == "folder:~/cats"


@pytest.mark.parametrize("name", ["", "my-app", "3x", "class", "Größe", "a" * 33, "a_", "../x"])
def test_names_that_python_or_flower_refuse(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"try {app_name(name)}$"):
        write_app(recipe(), tmp_path / "app", name=name)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "name"),
    [("cifar100-fcil-small", "cifar100_fcil_small"), ("3x", "app_3x"), ("class", "app_class"), ("My Run!", "my_run")],
)
def test_names_come_from_recipes(text: str, name: str) -> None:
    assert app_name(text) == name


@given(st.text(max_size=50))
def test_any_text_makes_a_name(text: str) -> None:
    name = app_name(text)
    assert re.fullmatch(r"[a-z][a-z0-9_]{0,31}", name) and name.isidentifier()
    assert app_name(name) == name


def test_a_folder_in_use_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="which is not empty"):
        write_app(recipe(), tmp_path / "full", name="app")
    for out in (tmp_path / "file", tmp_path / "file" / "app"):
        with pytest.raises(ConfigError, match="out is "):
            write_app(recipe(), out, name="app")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "full", "mine.txt"]


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    inode = (tmp_path / "app").stat().st_ino
    write_app(recipe(), tmp_path / "app", name="app")
    assert (tmp_path / "app" / "pyproject.toml").is_file() and (tmp_path / "app").stat().st_ino == inode
    assert [path.name for path in tmp_path.iterdir()] == ["app"]


def test_a_disk_that_refuses_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, data: bytes) -> int:
        if path.name == "client_app.py":
            raise OSError(28, "No space left on device")
        return len(data)

    monkeypatch.setattr(Path, "write_bytes", refuse)
    with pytest.raises(ConfigError, match="cannot be written: No space left on device"):
        write_app(recipe(), tmp_path / "new" / "app", name="app")
    assert not list(tmp_path.iterdir())


def test_an_interruption_while_files_move_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    move = os.replace

    def interrupted(source: Path, target: Path) -> None:
        if target.name.endswith("_app"):
            raise KeyboardInterrupt
        move(source, target)

    monkeypatch.setattr(os, "replace", interrupted)
    (tmp_path / "empty").mkdir()
    for out in (tmp_path / "new" / "app", tmp_path / "empty"):
        with pytest.raises(KeyboardInterrupt):
            write_app(recipe(), out, name="zz")
    assert [path.name for path in tmp_path.rglob("*")] == ["empty"]


def test_an_app_can_be_written_without_flower(tmp_path: Path) -> None:
    code = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("flwr", "ray", "cryptography"):
            raise ImportError(name)
sys.meta_path.insert(0, Refuse())
from fedloom.cli import app
app(["deploy", "quickstart", "--out", sys.argv[1]])
"""
    command = [sys.executable, "-c", code, str(tmp_path / "app")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "app" / "pyproject.toml").is_file()


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")  # Flower's use of its own dependency
@pytest.mark.skipif(not FLOWER, reason="the extra 'flower' is not installed")
@pytest.mark.parametrize("name", PORTABLE)
def test_flower_takes_the_folder(name: str, tmp_path: Path) -> None:
    from flwr.cli.build import build_fab_from_disk
    from flwr.cli.config_utils import load_and_validate
    from flwr.common.config import get_fab_config, get_fused_config_from_dir

    out = write_app(recipe(name), tmp_path / "app", name=app_name(name))
    _, warnings = load_and_validate(out / "pyproject.toml", check_module=True)
    assert not warnings
    (out / "runs").mkdir()
    (out / "runs" / "old.json").write_text("x" * 100)
    packed = build_fab_from_disk(out)
    assert len(packed) < 20_000 and b"old.json" not in packed
    fused = get_fused_config_from_dir(out, {"training.rounds": 3})
    assert flat(get_fab_config(packed)["tool"]["flwr"]["app"]["config"]) == said(out)
    assert read_run_config(fused)[0].training.rounds == 3


def test_a_method_in_a_file_of_its_own_goes_with_the_app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is installed, or part of a package, does not."""
    monkeypatch.chdir(tmp_path)
    text = "from fedloom.methods.fedprox import fedprox as mine\n"
    (tmp_path / "own_method_of_this_test.py").write_text(text)
    app = write_app(resolve({"method": "own_method_of_this_test:mine"}), tmp_path / "app", name="demo")
    assert (app / "own_method_of_this_test.py").read_text() == text
    assert "install its package" not in (app / "README.md").read_text()
    other = write_app(resolve({"method": "toys.tally:tally"}), tmp_path / "other", name="demo")
    assert {path.name for path in other.glob("*.py")} == set()
    assert "the method `toys.tally:tally`, importable: install its package" in (other / "README.md").read_text()
