"""Imports point one way, and starting up brings in nothing heavy."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import fedloom

SOURCE = Path(fedloom.__file__).parent
ROOMS = {path.parent.name for path in SOURCE.glob("*/*.py")}
MAY = {
    "core": set(),
    "local": {"core"},
    "merge": {"core"},
    "select": {"core"},
    "models": {"core"},
    "data": {"core"},
    "methods": {"core", "local", "merge", "select", "models", "data"},
    "evaluate": {"core"},
    "report": {"core", "evaluate"},
    "privacy": {"core"},
    "engine": {"core", "evaluate"},
    "trackers": {"core", "engine"},
    "config": {"core", "local", "merge", "select", "models", "data", "methods"},
    "pretraining": {"core", "config", "data", "engine", "models"},
}
STANDARD = sys.stdlib_module_names


def imports(path: Path) -> set[str]:
    """Every module that a file imports, at the top or inside functions, as a dotted name."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module)
            if node.module == "fedloom":
                found |= {f"fedloom.{alias.name}" for alias in node.names}
    return found


def files(room: str) -> list[Path]:
    return sorted((SOURCE / room).rglob("*.py"))


@pytest.mark.parametrize("room", sorted(ROOMS & MAY.keys()))
def test_rooms_import_only_what_lies_below(room: str):
    for path in files(room):
        entered = {name.split(".")[1] for name in imports(path) if name.startswith("fedloom.")} & ROOMS
        assert entered <= MAY[room] | {room}, f"{path.relative_to(SOURCE)} imports {entered - MAY[room] - {room}}"


def test_every_room_is_known():
    assert ROOMS - MAY.keys() <= {"claims", "cli", "comparison", "deploy"}, "say in MAY what the new room may import"
    assert all((SOURCE / room / "__init__.py").exists() for room in ROOMS)


def test_the_core_needs_torch_alone():
    for path in files("core"):
        others = {name.split(".")[0] for name in imports(path)} - STANDARD - {"torch", "fedloom"}
        assert not others, f"{path.name} imports {others}"


def test_nobody_below_knows_a_method_by_name():
    for room in MAY.keys() & ROOMS - {"methods"}:
        for path in files(room):
            named = {name for name in imports(path) if name.startswith("fedloom.methods.")}
            assert not named, f"{path.relative_to(SOURCE)} imports {named}"
    for path in files("engine"):
        assert not any(name.startswith("fedloom.methods") for name in imports(path)), path


def test_only_the_engine_starts_processes():
    for path in SOURCE.rglob("*.py"):
        used = imports(path) & {"multiprocessing", "subprocess", "torch.multiprocessing"}
        used |= {"ProcessPoolExecutor"} if "ProcessPoolExecutor" in path.read_text(encoding="utf-8") else set()
        room = path.relative_to(SOURCE).parts[0]
        assert not used or room == "engine", f"{path.relative_to(SOURCE)} imports {used}"


def test_no_drawer_for_odds_and_ends():
    bad = [p for p in SOURCE.rglob("*") if p.stem in ("utils", "util", "common", "helpers", "helper", "misc")]
    assert not bad


def test_files_and_functions_stay_short():
    for path in SOURCE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert text.count("\n") <= 400, f"{path.relative_to(SOURCE)} is too long"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                first = node.body[0]
                told = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
                body = node.end_lineno - (first.end_lineno if told else node.lineno)
                assert body <= 40, f"{path.relative_to(SOURCE)}: {node.name} has {body} lines"


def python(code: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_starting_up_brings_in_nothing_heavy():
    heavy = [
        "torch._dynamo",
        "torch.optim",
        "torchvision",
        "timm",
        "datasets",
        "matplotlib",
        "sklearn",
        "scipy",
        "jinja2",
        "pandas",
        "flwr",
    ]
    rooms = ["core", "local", "merge", "select", "engine", "evaluate", "models", "data", "methods"]
    code = f"""
import importlib, json, sys
import torch
before = set(sys.modules)
found = {{}}
for room in {rooms}:
    importlib.import_module("fedloom." + room)
import fedloom.engine.loop, fedloom.engine.worker
print(json.dumps(sorted(set({heavy}) & (set(sys.modules) - before))))
"""
    assert json.loads(python(code)) == []


def test_a_run_needs_no_flower_no_ray_and_no_tracker():
    code = """
import sys, tempfile
from pathlib import Path
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("flwr", "ray", "wandb", "mlflow", "tensorboard"):
            raise ImportError(name)
sys.meta_path.insert(0, Refuse())
sys.path.insert(0, sys.argv[1])
import fedloom
from toys.federation import experiment
from toys.running import Notes, start
class Watch(Notes):
    def stage_done(self, row):
        assert "torch._dynamo" not in sys.modules, "plain SGD imports the compiler"
two = experiment("fedloom.methods.fedavg:fedavg", num_clients=2, cohort=1.0)
with tempfile.TemporaryDirectory() as folder:
    print(start(Path(folder) / "run", two, [Watch()])["rounds"])
"""
    assert python(code, str(Path(__file__).parent)).strip() == "6"
