"""`fedloom deploy`: a recipe or a word as its first argument, what is printed, what is refused."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

import fedloom
from fedloom import lifecycle
from fedloom.cli import app
from test_api import DIGITS

POOLED = (
    "error: method 'joint' has the data view pooled_cumulative, for which all data must be on one machine; "
    "`fedloom run` it there without engine.runtime deployment, or deploy another method\n"
)


def call(*arguments: Any) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], prog_name="fedloom")


def said(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]


def test_a_recipe_becomes_an_app_with_the_options_of_run(tmp_path: Path) -> None:
    out = tmp_path / "app"
    result = call("deploy", "quickstart", "-o", out, "-m", "fedprox", "--set", "method.mu=0.5", "--seed", 7)
    assert result.exit_code == 0, result.stderr
    assert f"app: {out}\n" in result.stdout and f"next: follow {out / 'README.md'}" in result.stdout
    assert not result.stderr
    found = said(out)
    assert found["method"]["name"] == "fedprox" and found["method"]["mu"] == 0.5 and found["seed"] == 7
    assert found["run"]["name"] == "quickstart"


def test_options_may_come_before_the_recipe(tmp_path: Path) -> None:
    result = call("deploy", "--out", tmp_path / "app", "--json", "small")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout) == {
        "app": str(tmp_path / "app"),
        "name": "small",
        "clients": 100,
        "readme": str(tmp_path / "app" / "README.md"),
    }


def test_the_default_folder_is_named_after_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "My Run.yaml").write_text(yaml.safe_dump({"training": {"rounds": 2}}))
    assert call("deploy", "My Run.yaml").exit_code == 0
    assert said(tmp_path / "my-run-app")["training"]["rounds"] == 2


def test_the_data_root_stays_here_and_is_said_to(tmp_path: Path) -> None:
    result = call("deploy", "small", "--out", tmp_path / "app", "--set", f"data.root={tmp_path}")
    assert result.exit_code == 0 and "note: data.root is left out of the app" in result.stderr
    assert said(tmp_path / "app")["data"]["root"] == "yaml:null"
    assert str(tmp_path) not in (tmp_path / "app" / "pyproject.toml").read_text()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["quikstart"], "unknown recipe 'quikstart'. Did you mean 'quickstart'?"),
        (["quickstart", "--out", ""], "--out is empty; name a folder"),
        (["quickstart", "-m", "fedprx"], "unknown method 'fedprx'. Did you mean 'fedprox'?"),
        (["quickstart", "--set", "training.rounds=0"], "training.rounds must be at least 1, got 0"),
        (["quickstart", "--set", "data.name=folder:cats"], "a path that nodes cannot follow"),
        (["quickstart", "-m", "joint"], POOLED),
        (["local-demo", "quickstart", "-m", "joint"], POOLED),
        (["certs", "--out", "certs", "--host", "a:1"], "host 'a:1' is neither a DNS name nor an IP address"),
        (["certs", "--out", "certs", "--nodes", "0"], "nodes must be a whole number in [1, 1000], got 0"),
        (["certs", "--out", "certs", "--days", "9999"], "days must be a whole number in [1, 3650], got 9999"),
    ],
)
def test_errors_are_one_sentence_and_exit_code_2(
    arguments: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cryptography")
    monkeypatch.chdir(tmp_path)
    result = call("deploy", *arguments)
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert not result.stdout and not list(tmp_path.iterdir())


def test_a_run_for_nodes_is_refused_a_pooled_view_too(tmp_path: Path) -> None:
    sets = ["--set", "engine.name=flower", "--set", "engine.runtime=deployment"]
    for more in ([], ["--dry-run"]):
        result = call("run", "quickstart", "-m", "joint", *sets, "--out", tmp_path / "run", *more)
        assert (result.exit_code, result.stderr, result.stdout) == (2, POOLED, "")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["quickstart", "--lr", "0.1"], "no such option: --lr; use --set training.optimizer.lr=0.1"),
        (
            ["quickstart", "--data-root", "x"],
            "no such option: --data-root; nodes name their data themselves, as the README of the app says",
        ),
        (["--out", "x"], "Missing argument"),
        (["certs"], "Missing option"),
        (["certs", "--hots", "x"], "no such option: --hots. Did you mean --host?"),
        (["certs", "--nodes", "two"], "must be a whole number"),
        (["local-demo", "--nodes", "0"], "Invalid value for '--nodes'"),
    ],
)
def test_wrong_usage_is_answered_with_what_was_meant(arguments: list[str], sentence: str) -> None:
    result = call("deploy", *arguments)
    assert result.exit_code == 2
    assert sentence in " ".join(result.stderr.split())


def test_help_shows_both_ways() -> None:
    text = call("deploy", "--help").stdout
    assert "Usage: fedloom deploy [OPTIONS] RECIPE|FILE\nUsage: fedloom deploy COMMAND [ARGS]..." in text
    assert all(word in text for word in ("--out", "--method", "certs", "local-demo"))
    assert call("deploy").output == text
    usage = call("deploy", "quickstart", "--help").stdout.partition("\n")[0]
    assert usage.replace("{", "").replace("}", "") == "Usage: fedloom deploy [OPTIONS] RECIPE|FILE"
    assert call("deploy", "certs", "--help").stdout.startswith("Usage: fedloom deploy certs [OPTIONS]")


def test_certificates_are_made_and_named(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    result = call("deploy", "certs", "--out", tmp_path / "a", "--host", "fl.example.org", "--nodes", 1)
    assert result.exit_code == 0, result.stderr
    for line in (f"authority: {tmp_path / 'a' / 'ca.crt'}", f"node key: {tmp_path / 'a' / 'node-0'}"):
        assert line in result.stdout
    found = json.loads(call("deploy", "certs", "--out", tmp_path / "b", "--nodes", 3, "--days", 9, "--json").stdout)
    assert found["days"] == 9 and len(found["node_keys"]) == 3
    paths = [found["ca"], found["ca_key"], found["certificate"], found["key"], *found["node_keys"]]
    assert all(Path(path).is_file() and Path(path).parent == tmp_path / "b" for path in paths)


def test_the_demo_gets_what_was_asked_for_and_its_run_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "_pictures", lambda *args: None)
    done = fedloom.run(DIGITS, out=tmp_path / "run")
    seen: list[Any] = []

    def run_demo(*args: Any, observers: Any, **kwargs: Any) -> Path:
        seen.append((args, kwargs))
        return done.folder

    monkeypatch.setattr("fedloom.deploy.demo.run_demo", run_demo)
    assert "Final accuracy" in call("deploy", "local-demo").stdout
    given = ["-m", "fedavg", "--seed", 3, "--nodes", 4, "--out", "x", "--resume", "--json", "--data-root", "/d"]
    shown = json.loads(call("deploy", "local-demo", "small", *given, "--set", "training.rounds=1").stdout)
    assert shown["state_sha256"] == done.summary["state_sha256"] and shown["folder"] == str(done.folder)
    plain = {"nodes": 2, "out": None, "resume": False}
    assert seen[0] == (("quickstart", {}), plain)
    layer = {"method": {"name": "fedavg"}, "seed": 3, "data": {"root": "/d"}, "training": {"rounds": 1}}
    assert seen[1] == (("small", layer), {**plain, "nodes": 4, "out": "x", "resume": True})
