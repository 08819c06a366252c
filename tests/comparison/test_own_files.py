"""Methods and networks in files of the user's own: an edited file is another run."""

from __future__ import annotations

import importlib
import json
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

import fedloom
from fedloom import lifecycle
from fedloom.api import resume
from fedloom.core.errors import ConfigError
from fedloom.engine.experiment import Observer

METHOD = """
from dataclasses import replace
from fedloom.methods.fedavg import fedavg

def fedx(*, local, rate: float = 0.1):
    return fedavg(local=replace(local, optimizer=replace(local.optimizer, lr=rate * FACTOR)))

class Family:
    fedx = staticmethod(fedx)

FACTOR = 1.0
"""
NETWORK = """
from torch import nn

def net(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, WIDTH), nn.Linear(WIDTH, num_classes))

WIDTH = 8
"""
EDITED = {"own_method": METHOD.replace("FACTOR = 1.0", "FACTOR = 0.125"), "own_net": NETWORK.replace("= 8", "= 16")}
SMALL = {
    "data": {"name": "sklearn/digits"},
    "stream": {"kind": "static"},
    "partition": {"kind": "iid", "clients": 2},
    "training": {"rounds": 1},
}


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(lifecycle, "_pictures", lambda *args: None)
    monkeypatch.setattr("fedloom.report.pareto.save", lambda *args: False)
    (tmp_path / "own_method.py").write_text(METHOD)
    (tmp_path / "own_net.py").write_text(NETWORK)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def forget() -> None:
    """What a new process begins with."""
    for name in EDITED:
        sys.modules.pop(name, None)


def edit(folder: Path, name: str) -> None:
    (folder / f"{name}.py").write_text(EDITED[name])


def compared(folder: Path, method: str = "own_method:fedx", model: str = "own_net:net") -> fedloom.Run:
    return fedloom.compare(SMALL, [method], [0], model=model, out=folder / "c").runs[method][0]


@pytest.mark.parametrize(
    ("edited", "method", "model"),
    [
        ("own_method", "own_method:fedx", "linear"),
        ("own_method", "own_method:Family.fedx", "own_net:net"),
        ("own_net", "fedavg", "own_net:net"),
        ("own_net", "own_method:fedx", "own_net:net"),
    ],
)
def test_an_edited_file_is_another_run_and_the_old_one_stays(files: Path, edited: str, method: str, model: str) -> None:
    first = compared(files, method, model)
    kept = (first.folder / "summary.json").stat().st_mtime_ns
    forget()
    assert compared(files, method, model).folder == first.folder
    edit(files, edited)
    forget()
    second = compared(files, method, model)
    assert second.folder != first.folder and second.summary["params_sha256"] != first.summary["params_sha256"]
    assert (first.folder / "summary.json").stat().st_mtime_ns == kept
    (files / f"{edited}.py").write_text({"own_method": METHOD, "own_net": NETWORK}[edited])
    forget()
    assert compared(files, method, model).folder == first.folder, "and back"


def test_a_run_records_the_files_that_define_it(files: Path) -> None:
    run = compared(files)
    env = json.loads((run.folder / "env.json").read_text())
    found = [sha256(text.encode()).hexdigest() for text in (METHOD, NETWORK)]
    assert [env["method_source"], env["model_source"]] == found
    assert run.folder.name == sha256("".join([env["config_hash"], *found]).encode()).hexdigest()
    plain = compared(files, "fedavg", "linear")
    env = json.loads((plain.folder / "env.json").read_text())
    assert (env["method_source"], env["model_source"]) == (None, None) and plain.folder.name == env["config_hash"]


def test_a_folder_of_the_edited_file_is_no_folder_of_the_old_one(files: Path) -> None:
    run = compared(files)
    env = json.loads((run.folder / "env.json").read_text())
    (run.folder / "env.json").write_text(json.dumps({**env, "method_source": "0" * 64}))
    with pytest.raises(fedloom.FedloomError, match="holds another run, that of the key"):
        compared(files)


def test_a_file_that_was_edited_after_its_import_is_refused_until_it_is_imported_anew(files: Path) -> None:
    first = compared(files)
    edit(files, "own_method")
    with pytest.raises(ConfigError, match=r"own_method.py' was edited after Python had imported it; start Python anew"):
        compared(files)
    importlib.reload(sys.modules["own_method"])
    assert compared(files).summary["params_sha256"] != first.summary["params_sha256"]


@pytest.mark.parametrize(("edited", "what"), [("own_method", "method"), ("own_net", "model")])
def test_a_resumed_run_says_that_its_file_has_changed(files: Path, edited: str, what: str) -> None:
    class Watch(Observer):
        def __init__(self, stop: bool):
            self.stop, self.told = stop, []

        def note(self, text: str) -> None:
            self.told.append(text)

        def round_done(self, row: Any) -> None:
            if self.stop:
                raise KeyboardInterrupt

    given = {**SMALL, "training": {"rounds": 2}, "method": "own_method:fedx", "model": "own_net:net"}
    for out, change in ((files / "same", False), (files / "changed", True)):
        with pytest.raises(KeyboardInterrupt):
            fedloom.run(given, out=out, observers=[Watch(True)])
        forget()
        if change and what == "method":
            edit(files, edited)
        elif change:  # a network of another width could not go on with the old parameters
            (files / "own_net.py").write_text(f"{NETWORK}\n# edited\n")
        watching = Watch(False)
        resume(out, observers=[watching])
        said = [text for text in watching.told if "has changed since the run began" in text]
        expected = f"the file of the {what} has changed since the run began; what was computed before is by the old one"
        assert said == [expected] * change
        assert (expected in (out / "log.txt").read_text()) is change
