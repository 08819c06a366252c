"""What README.md and the guides in docs/ show is run, or at least understood."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from PIL import Image
from sklearn.datasets import load_digits
from typer.testing import CliRunner

from fedloom import api, lifecycle
from fedloom.cli import app
from fedloom.cli.application import layers
from fedloom.config import resolve, resolve_source
from fedloom.config.layers import recipe_names

ROOT = Path(__file__).parents[1]
DOCS, README = ROOT / "docs", ROOT / "README.md"
GUIDE, TUTORIAL, DOMAINS = DOCS / "method-guide.md", DOCS / "tutorial.md", DOCS / "domains.md"
PAGES = (README, *sorted(DOCS.rglob("*.md")))
ELSEWHERE = (  # data and files that are not there; the commands are understood all the same
    *("flwrlabs", "parquet:", "ylecun", "folder:", "RECIPE", "--data-root", "mine.yaml", "runs/first"),
    *("agnews", "mmlu", "hellaswag", "cifar100", "pacs", "fedduet/", "fedalign/", "clip-small", "combined/"),
)
TINY = ["training.rounds=1", "training.local_epochs=1", "stream.tasks=2", "partition.clients=4", "model.name=linear"]


def blocks(path: Path, language: str) -> list[str]:
    """Fenced code blocks of a language, verbatim."""
    return re.findall(rf"^```{language}\n(.*?)^```$", path.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def shown(path: Path) -> Iterator[tuple[str, str]]:
    """What a page has its reader do, in order: ("file NAME", text), ("python", code) and ("fedloom", command line)."""
    fence = re.compile(r'^```(\w+)(?: title="(.+)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)
    for language, title, text in fence.findall(path.read_text(encoding="utf-8")):
        if title:
            yield f"file {title}", text
        elif language == "python":
            yield "python", text
        elif language == "bash":
            lines = re.sub(r"\\\n\s*", "", text).splitlines()
            yield from (("fedloom", line.removeprefix("fedloom ")) for line in lines if line.startswith("fedloom "))


def commands() -> list[list[str]]:
    """Arguments of every `fedloom ...` line of the shell blocks, each once, without comments."""
    lines = dict.fromkeys(text for path in PAGES for kind, text in shown(path) if kind == "fedloom")
    split = dict.fromkeys(tuple(shlex.split(line, comments=True)) for line in lines)
    return [[word for word in words if word != "..."] for words in split]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder that holds the guide's FedProx as the reader saves it."""
    (block,) = [text for text in blocks(GUIDE, "python") if "def fedprox(" in text]
    (tmp_path / "my_fedprox.py").write_text(block, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def shell(folder: Path, *arguments: str) -> dict[str, Any]:
    """The summary of a run that the command line makes in a process of its own."""
    sets = [part for pair in ("method.mu=0.1", *TINY) for part in ("--set", pair)]
    command = [sys.executable, "-m", "fedloom", "run", "quickstart", *arguments, *sets, "--json"]
    done = subprocess.run(command, cwd=folder, env=os.environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_guides_fedprox_is_the_built_in_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = shell(folder, "--method", "my_fedprox:fedprox", "--out", "runs/mine", "--workers", "1")
    two = shell(folder, "--method", "my_fedprox:fedprox", "--out", "runs/two", "--workers", "2")
    monkeypatch.setattr(lifecycle, "_pictures", lambda *args: None)
    pairs = [part for pair in ("method.mu=0.1", *TINY) for part in ("--set", pair)]
    done = CliRunner().invoke(app, ["run", "--method", "fedprox", *pairs, "--out", str(folder / "theirs"), "--json"])
    theirs = json.loads(done.stdout)
    assert mine["params_sha256"] == two["params_sha256"] == theirs["params_sha256"]
    assert mine["state_sha256"] == two["state_sha256"]
    assert (folder / "runs" / "mine" / "report.html").exists()
    plain = api.run("quickstart", method="fedavg", **dict(_typed(pair) for pair in TINY), out=folder / "plain")
    assert plain.summary["params_sha256"] != theirs["params_sha256"], "the proximal term did nothing"


def _typed(pair: str) -> tuple[str, Any]:
    key, _, value = pair.partition("=")
    return key, int(value) if value.isdigit() else value


def test_the_guides_fedprox_refuses_in_words(folder: Path) -> None:
    done = CliRunner().invoke(app, ["run", "--method", "my_fedprox:fedprox", "--set", "method.mu=-1"])
    assert done.exit_code == 2 and "method.mu must be at least 0, got -1" in done.stderr


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_python_blocks_compile(path: Path) -> None:
    for block in blocks(path, "python"):
        compile(block, path.name, "exec")


def parsed(arguments: list[str]) -> tuple[str, dict[str, Any]]:
    """The command and its options, as click reads them; nothing is carried out."""
    group = typer.main.get_command(app)
    with group.make_context("fedloom", list(arguments), resilient_parsing=False) as outer:
        name, command, rest = group.resolve_command(outer, list(arguments))
        with command.make_context(name, rest, parent=outer) as inner:
            return name, dict(inner.params)


def test_commands_parse() -> None:
    """Every option and argument that the pages show exists."""
    known = [parsed(arguments)[0] for arguments in commands()]
    assert {"run", "resume", "list", "show-data", "predict", "report", "export", "doctor"} <= set(known)


def test_settings_resolve() -> None:
    """Keys, values and methods that commands on recipes set are admitted, also where the data are not there."""
    tried = 0
    for arguments in commands():
        name, options = parsed(arguments)
        if name not in ("run", "show-data", "compare", "ablate") or options["recipe"] not in recipe_names():
            continue
        sets = [pair for pair in options["sets"] or () if name == "run" or not pair.startswith("method.")]
        method = options.get("method") if name == "run" else None
        if method is None or ":" not in method:
            resolve(resolve_source(options["recipe"])[1], layers(sets=sets, method=method))
            tried += 1
    assert tried > 40


HERE = [c for c in commands() if not any(name in word for name in ELSEWHERE for word in c)]
RUNS = [c for c in HERE if c[0] == "run"]
COMPARISONS = [c for c in HERE if c[0] in ("compare", "ablate", "sweep")]


@pytest.mark.parametrize("arguments", RUNS, ids=" ".join)
def test_runs_could_start(arguments: list[str], folder: Path) -> None:
    done = CliRunner().invoke(app, [*arguments, "--dry-run", "--json"])
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["parameters"] > 0
    assert [path.name for path in folder.iterdir() if path.name != "__pycache__"] == ["my_fedprox.py"]


@pytest.mark.parametrize("arguments", COMPARISONS, ids=" ".join)
def test_comparisons_could_start(arguments: list[str], folder: Path) -> None:
    done = CliRunner().invoke(app, [*arguments, "--dry-run", "--json"])
    assert done.exit_code == 0, done.stderr
    assert [path.name for path in folder.iterdir() if path.name != "__pycache__"] == ["my_fedprox.py"]


def test_folders_and_arrays_of_the_page_on_domains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What makes data is executed, and the commands on folders could start; without its setting they are refused."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(lifecycle, "_pictures", lambda *args: None)
    folders, arrays, _ = blocks(DOMAINS, "python")
    exec(folders, {})
    found = [c for c in commands() if any("folder:digits" in word for word in c)]
    assert len(found) == 2
    for arguments in found:
        done = CliRunner().invoke(app, [*arguments, "--dry-run", "--json"])
        assert done.exit_code == 0, done.stderr
        assert json.loads(done.stdout)["data"]["domain_names"] in (["board", "paper"], ["paper", "board"])
    bare = [word.replace("data.domain=folders", "data.domain=null") for word in found[0]]
    assert bare != found[0]
    done = CliRunner().invoke(app, [*bare, "--dry-run"])
    assert done.exit_code == 2 and "look like domains" in done.stderr
    few = re.sub(r"load_digits\(\)", "load_digits(n_class=3)", arrays).replace('"rounds": 2', '"rounds": 1')
    assert few != arrays
    exec(few, shown := {})
    assert shown["run"].summary["domain_accuracy"].keys() == {"board", "paper"}


def carried_out(line: str, more: Sequence[str] = ()) -> str:
    """What a command line prints, run in the working folder. more: appended to what trains."""
    arguments = shlex.split(line, comments=True)
    trains = arguments[:2] == ["deploy", "local-demo"] or arguments[0] in ("run", "compare", "ablate")
    done = CliRunner().invoke(app, [*arguments, *(more if trains else ())])
    assert done.exit_code == 0, f"fedloom {line}: {done.stderr}"
    return done.stdout


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder; single runs draw no pictures."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(lifecycle, "_pictures", lambda *args: None)
    return tmp_path


SETS = [part for pair in TINY for part in ("--set", pair)]
DEAR = ("compare", "ablate", "deploy local-demo", "--engine flower")  # of README, too long for every change
README_LINES = [text for kind, text in shown(README) if kind == "fedloom"]


def test_the_readme_is_carried_out_from_the_first_command_to_the_last(here: Path) -> None:
    """In order and in one folder, with runs made small; what is dear has tests of its own below."""
    digits = load_digits()
    Image.fromarray((digits.images[0] * 15).astype("uint8")).save("digit.png")
    lines = [line for line in README_LINES if not any(word in line for word in DEAR)]
    assert len(lines) >= 12
    printed = {line: carried_out(line, SETS) for line in lines}
    assert "fedfmx" in printed[next(line for line in lines if line.startswith("list methods"))]
    assert {"quickstart-app", "quickstart-data.png", "runs"} <= {path.name for path in here.iterdir()}
    assert {"report.html", "export.safetensors"} <= {path.name for path in (here / "runs" / "eight").iterdir()}


def test_the_readmes_python_runs(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = [text for kind, text in shown(README) if kind == "python"]
    small = code.replace('training={"rounds": 3}', 'training={"rounds": 1}, stream={"tasks": 2}, model="linear"')
    assert small != code
    exec(small, found := {})
    assert f"{found['run'].summary['final_accuracy']} {found['run'].folder}" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("line", [line for line in README_LINES if any(word in line for word in DEAR)])
def test_the_readmes_dear_commands_are_carried_out(line: str, here: Path) -> None:
    assert carried_out(line, SETS)


def follow(here: Path, small: dict[str, Any]) -> dict[str, Any]:
    """Do what the tutorial says, word for word. small: put into the reader's file. The names of its Python, last."""
    names: dict[str, Any] = {}
    for kind, text in shown(TUTORIAL):
        if kind.startswith("file "):
            told = yaml.safe_load(text)
            (here / kind.removeprefix("file ")).write_text(yaml.safe_dump({**told, **small}), encoding="utf-8")
        elif kind == "python":
            exec(text, names)
        else:
            names[text] = carried_out(text)
    return names


def check_what_the_tutorial_left(here: Path, names: dict[str, Any]) -> None:
    assert {"data.png", "comparison.png", "mine.yaml", "runs"} <= {path.name for path in here.iterdir()}
    assert {"summary.json", "DONE"} <= {path.name for path in (here / "runs" / "second").iterdir()}
    assert (here / "runs" / "comparison" / "report.html").is_file()
    done = [path.parent for path in (here / "runs" / "comparison" / "runs").glob("*/DONE")]
    assert len(done) == 16, "four methods over four seeds, each once"
    assert [len(runs) for runs in names["found"].runs.values()] == [4, 4, 4, 4]
    lines = names["axes"].get_lines()
    assert [line.get_label() for line in lines] == ["fedavg", "fedlwf", "replay", "joint"]
    for line, runs in zip(lines, names["found"].runs.values(), strict=True):
        final = [run.summary["final_accuracy"] for run in runs.values()]  # the digits' tasks are nearly of one size
        assert line.get_ydata()[-1] == pytest.approx(sum(final) / len(final), abs=0.05)


def test_the_tutorial_leads_to_a_comparison_with_a_plot(here: Path) -> None:
    """Every line as it stands; the reader's own file makes the runs small."""
    small = {"training": {"rounds": 1, "local_epochs": 1}, "stream": {"tasks": 2}, "model": {"name": "linear"}}
    small |= {"partition": {"clients": 3}, "evaluate": {"personal": False}, "checkpoint": {"every": 0}}
    check_what_the_tutorial_left(here, follow(here, small))


@pytest.mark.slow
def test_the_tutorial_says_what_comes_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with nothing made small: the orders of its table, and its words about forgetting."""
    monkeypatch.chdir(tmp_path)
    names = follow(tmp_path, {})
    check_what_the_tutorial_left(tmp_path, names)
    assert {"report.html", "accuracy.png"} <= {path.name for path in (tmp_path / "runs" / "first").iterdir()}
    final = {row["label"]: row["final_accuracy"] for row in names["found"].table()}
    assert final["fedavg"] < 0.3 < final["fedlwf"] < 0.6 < 0.8 < final["replay"] < final["joint"]


def test_the_arrays_of_the_page_on_data_run(here: Path) -> None:
    (code,) = blocks(DOCS / "data.md", "python")
    exec(code.replace('"rounds": 5', '"rounds": 1'), found := {})
    assert found["run"].class_names == ["high", "low", "middle"]


def test_the_five_lines_of_the_home_page_run(here: Path) -> None:
    (code,) = blocks(DOCS / "index.md", "python")
    small = code.replace('training={"rounds": 3}', 'training={"rounds": 1}, stream={"tasks": 2}, model="linear"')
    assert small != code
    exec(small, found := {})
    assert found["run"].summary["dataset"] == "arrays"
