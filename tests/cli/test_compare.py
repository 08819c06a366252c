"""`compare` and `ablate` on the command line: exit codes, sentences, what is printed where."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import fedloom
from fedloom import lifecycle
from fedloom.cli import app
from fedloom.report import comparison as report
from fedloom.terminal import OutputLost

FAST = ["-s", "model.name=linear", "-s", "training.rounds=1", "-s", "training.local_epochs=1",
        "-s", "partition.clients=3", "-s", "stream.tasks=2"]  # fmt: skip


def call(*arguments: Any) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], prog_name="fedloom")


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures take a second."""
    monkeypatch.setattr(lifecycle, "_pictures", lambda *args: None)
    monkeypatch.setattr("fedloom.report.pareto.save", lambda *args: False)


def test_a_comparison_ends_with_its_table_and_its_files(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    result = call("compare", "quickstart", "-m", "fedavg,fedprox+mu=1", "--seeds", "0,1", "--out", folder, *FAST)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("Comparison of 2 methods, quickstart (sklearn/digits; class_incremental, 2 tasks;")
    for name in ("compare.md", "compare.tex", "compare.csv", "compare.json"):
        assert str(folder / name) in result.stdout and (folder / name).exists()
    assert result.stdout.endswith(f"folder: {folder}\n") and not (folder / "summary.json").exists()
    said = result.stderr.splitlines()
    assert [line for line in said if line.startswith("run ")] == [
        "run 1 of 4: fedavg, seed 0", "run 2 of 4: fedprox+mu=1, seed 0",
        "run 3 of 4: fedavg, seed 1", "run 4 of 4: fedprox+mu=1, seed 1",
    ]  # fmt: skip
    assert sum("round 0 of 1: 3 clients" in line for line in said) == 8

    assert "\nSet: model.name=linear, partition.clients=3, stream.tasks=2, training.local_epochs=1," in result.stdout
    assert content_of(folder)["settings"]["training.rounds"] == 1

    again = call("compare", "-m", "fedavg,fedprox+mu=1", "--seeds", "0,1", "--out", folder, "--json", *FAST)
    content = json.loads(again.stdout)
    assert again.exit_code == 0 and not again.stderr and again.stdout.count("\n") == 1
    assert content.pop("folder") == str(folder)
    assert content == content_of(folder)

    python = fedloom.compare(
        "quickstart", ["fedavg", "fedprox+mu=1"], [0, 1], model="linear", training={"rounds": 1, "local_epochs": 1},
        partition={"clients": 3}, stream={"tasks": 2}, out=folder,
    )  # fmt: skip
    assert python.summary == content, "the same hashes, so the same runs"


def content_of(folder: Path) -> Any:
    return json.loads((folder / "compare.json").read_text())


def test_quiet_says_nothing_and_verbose_more(tmp_path: Path) -> None:
    quiet = call("compare", "-m", "fedavg", "--seed", 0, "--out", tmp_path / "c", "-q", *FAST)
    assert quiet.exit_code == 0 and not quiet.stderr and "One seed: no interval and no test" in quiet.stdout
    loud = call("compare", "-m", "fedavg", "--seed", 1, "--out", tmp_path / "c", "-v", *FAST)
    assert "up " in loud.stderr


def test_a_dry_run_lists_the_runs_and_starts_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    arguments = ["compare", "-m", "fedavg,fedfmx+body=[8,4]", "--seeds", "0,1", "--out", folder, "--dry-run", *FAST]
    result = call(*arguments)
    lines = result.stdout.splitlines()
    assert result.exit_code == 0 and not folder.exists()
    assert [line.split()[0] for line in lines[:4]] == ["fedavg"] * 2 + ["fedfmx+body=[8,4]"] * 2
    assert lines[4] == f"4 runs in {folder}: 4 missing"
    assert all(re.search(r"  [0-9a-f]{12}…  missing$", line) for line in lines[:4])
    call("compare", "-m", "fedavg", "--seed", "0", "--out", folder, "-q", *FAST)
    found = json.loads(call(*arguments, "--json").stdout)
    assert [run["state"] for run in found["runs"]] == ["done", "missing", "missing", "missing"]
    assert (folder / "runs" / found["runs"][0]["hash"] / "DONE").exists()


def test_lists_that_are_given_in_parts_are_joined(tmp_path: Path) -> None:
    parts = ["-m", "fedavg", "--methods", "fedfmx+body=[8,4],joint", "--seed", "0", "--seeds", "2,1"]
    found = json.loads(call("compare", *parts, "--out", tmp_path / "c", "--dry-run", "--json", *FAST).stdout)
    assert [(run["label"], run["seed"]) for run in found["runs"]] == [
        (label, seed) for label in ("fedavg", "fedfmx+body=[8,4]", "joint") for seed in (0, 2, 1)
    ]
    parts = ["fedfmx+experts=2", "--switches", "top1", "--switches", "no-rar", "--seed", "1"]
    found = json.loads(call("ablate", *parts, "--out", tmp_path / "a", "--dry-run", "--json", *FAST).stdout)
    assert [run["label"] for run in found["runs"]] == ["full", "top1", "no-rar"]


def test_an_ablation(tmp_path: Path) -> None:
    result = call("ablate", "fedfmx+experts=2", "quickstart", "--switches", "no-rar,top1", "--seeds", "0",
                  "--reference", "top1", "--out", tmp_path / "a", "-q", *FAST)  # fmt: skip
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("Ablation of fedfmx+experts=2, quickstart")
    content = json.loads((tmp_path / "a" / "compare.json").read_text())
    assert list(content["methods"]) == ["full", "no-rar", "top1"] and content["reference"] == "top1"


def test_an_ablation_takes_options_of_its_method_for_every_run(tmp_path: Path) -> None:
    parts = ("fedfmx", "quickstart", "--switches", "top1", "--seeds", "0", "--out", tmp_path / "a", "--dry-run", *FAST)
    result = call("ablate", *parts, "--set", "method.experts=2", "--json")
    assert result.exit_code == 0, result.stderr
    found, plain = (json.loads(text)["runs"] for text in (result.stdout, call("ablate", *parts, "--json").stdout))
    assert [run["label"] for run in found] == ["full", "top1"]
    assert all(run["hash"] != other["hash"] for run, other in zip(found, plain, strict=True))


@pytest.mark.parametrize("key", ["out", "tell", "seeds", "switches", "reference", "metric", "mu"])
def test_a_key_that_is_no_section_is_refused_whatever_the_commands_call_theirs(key: str) -> None:
    for command in (("compare", "-m", "fedprox"), ("ablate", "fedfmx")):
        result = call(*command, "quickstart", "--dry-run", "--set", f"{key}=1")
        assert result.exit_code == 2 and f"unknown key '{key}'." in result.stderr, result.output


def test_switches_are_listed_with_their_method() -> None:
    text = call("list", "methods", "fedfmx").stdout
    assert "switches, for `fedloom ablate fedfmx`\n" in text and "  top1: stop 1\n" in text
    assert json.loads(call("list", "methods", "fedfmx", "--json").stdout)["switches"]["top2"] == {"stop": 2}
    assert "switches" not in call("list", "methods", "fedavg").stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["compare"], "methods is empty; name at least one, such as fedavg,fedprox+mu=0.1"),
        (["compare", "-m", "fedavg,fedprx"], "unknown method 'fedprx'. Did you mean 'fedprox'?"),
        (["compare", "-m", "fedavg,fedavg"], "methods: 'fedavg' is given twice"),
        (["compare", "-m", "fedprox+mu"], "options of 'fedprox+mu' are written +option=value"),
        (["compare", "-m", "fedprox+mu=x"], "error: fedprox+mu=x: method.mu must be a number, got 'x'"),
        (["compare", "-m", "fedavg+name=fedprox"], "'fedavg+name=fedprox' sets name as an option; write name@preset"),
        (["compare", "-m", "fedavg", "--methods", "fedavg"], "methods: 'fedavg' is given twice"),
        (["compare", "-m", "fedavg", "--seed", "0", "--seeds", "0"], "seeds: '0' is given twice"),
        (["ablate", "fedfmx", "--switches", "top1", "--switches", "top1"], "switches: 'top1' is given twice"),
        (["compare", "-m", "fedavg", "--seeds", "0,one"], "seeds must be whole numbers from 0"),
        (["compare", "-m", "fedavg", "--seeds", "1,1"], "seeds: '1' is given twice"),
        (["compare", "-m", "fedavg", "--seeds", "-1"], "seeds must be whole numbers from 0, such as 0,1,2, got -1"),
        (["compare", "-m", "fedavg", "--reference", "fedvg"], "unknown reference 'fedvg'. Did you mean 'fedavg'?"),
        (
            ["compare", "-m", "fedavg", "--metric", "domain_meen"],
            "unknown metric 'domain_meen'. Did you mean 'domain_mean'? Kn",
        ),
        (
            ["compare", "-m", "fedavg", "--metric", "bytes_up"],
            "Known: accuracy_within_task, average_incremental_accuracy,",
        ),
        (["ablate", "fedfmx", "--metric", "domain_accuracy[x"], "domain_accuracy[NAME], domain_mean, domain_std,"),
        (
            ["compare", "-m", "fedavg", "--metric", "domain_mean"],
            "metric is 'domain_mean', but the data have no domains;",
        ),
        (
            ["ablate", "fedfmx", "--metric", "domain_accuracy[x]"],
            "metric is 'domain_accuracy[x]', but the data have no",
        ),
        (
            ["compare", "-m", "fedavg", "-s", "stream=static", "--metric", "forgetting"],
            "but the stream has a single stage;",
        ),
        (
            ["compare", "quickstart-domains", "-m", "fedavg", "--metric", "domain_accuracy[rotate]"],
            "metric: unknown domain 'rotate'. Did you mean 'rotated'? Known: blurred, inverted, noisy, rotated.",
        ),
        (["compare", "-m", "fedavg", "-s", "seed=1"], "seed is set for every run by the seeds of the comparison"),
        (["compare", "-m", "fedavg,joint", "-s", "method.uniform=true"], "of them name fedavg+uniform=true instead."),
        (["compare", "-m", "fedavg", "-s", "method=joint"], "method.name is set by the entries of the comparison"),
        (["compare", "quikstart", "-m", "fedavg"], "unknown recipe 'quikstart'"),
        (["compare", "-m", "fedavg", "--out", ""], "out is empty; name a folder"),
        (["compare", "-m", "fedavg", "--jobs", "two"], "jobs must be auto or a whole number in [1, 512], got 'two'"),
        (["ablate", "fedfmx", "--jobs", "0"], "jobs must be auto or a whole number in [1, 512], got '0'"),
        (["compare", "-m", "fedavg", "--jobs", "0", "--dry-run"], "jobs must be auto or a whole number in [1, 512]"),
        (["compare", "missing.yaml"], "configuration file 'missing.yaml' does not exist"),
        (["compare", "-m", "fedavg", "--out", "/dev/null"], "out is '/dev/null', which is a file; name a folder"),
        (["compare", "-m", "fedavg", "--out", "/proc/x"], "out is '/proc/x', which cannot be written"),
        (["ablate", "fedavg"], "method 'fedavg' declares no switches"),
        (["ablate", "fedfmx", "--switches", "topp1"], "unknown switch of fedfmx 'topp1'. Did you mean 'top1'?"),
        (["ablate", "fedfmx@code"], "unknown preset of fedfmx 'code'"),
    ],
)
def test_errors_are_one_sentence_and_exit_code_2(arguments: list[str], sentence: str) -> None:
    result = call(*arguments)
    assert result.exit_code == 2
    assert sentence in result.stderr
    lines = [line for line in result.stderr.splitlines() if not line.startswith("checking run ")]  # if it takes long
    assert len(lines) == 1 and lines[0].startswith("error: ")
    assert not result.stdout


def test_wrong_options_are_answered_with_what_was_meant() -> None:
    for arguments, sentence in (
        (["compare", "--lr", "0.1"], "use --set training.optimizer.lr=0.1"),
        (["compare", "--methodz", "x"], "Did you mean --method"),
        (["ablate", "fedfmx", "--switch", "x"], "Did you mean --switches?"),
    ):
        result = call(*arguments)
        assert result.exit_code == 2 and sentence in " ".join(result.stderr.split())


def test_failed_runs_are_named_after_the_table_and_exit_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(*args: Any, **kwargs: Any) -> None:
        raise ValueError("my bug")

    monkeypatch.setattr("fedloom.methods.scaffold.Scaffold.client_update", work)
    result = call("compare", "-m", "fedavg,scaffold", "--seeds", "0", "--out", tmp_path / "c", *FAST)
    assert result.exit_code == 1
    assert "Missing: scaffold, seed 0: " in result.stdout and "fedavg" in result.stdout
    last = result.stderr.splitlines()[-1]
    assert last.startswith("error: 1 of 2 runs failed: scaffold, seed 0: ") and "my bug" in last


def test_a_table_that_cannot_be_printed_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*args: Any) -> None:
        raise OutputLost("standard output cannot be written (full)")

    monkeypatch.setattr(sys.modules["fedloom.cli.compare"], "_print", lost)
    result = call("compare", "-m", "fedavg", "--seeds", "0", "--out", tmp_path / "c", "-q", *FAST)
    assert result.exit_code == 0 and "the comparison is done, see" in result.stderr


def test_a_comparison_that_is_killed_or_interrupted_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    arguments = ["compare", "-m", "fedavg,fedprox+mu=1,joint", "--seeds", "0,1", "--out", str(folder), *FAST]
    for number, after in ((signal.SIGKILL, "run 2 of 6"), (signal.SIGINT, "run ")):
        process = subprocess.Popen(
            [sys.executable, "-m", "fedloom", *arguments], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
        )
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith(after):
                os.kill(process.pid, number)
                break
        rest = process.stderr.read()
        process.stderr.close()
        code = process.wait(60)
        content = json.loads((folder / "compare.json").read_text())
        assert content["complete"] is False
        done = sum(1 for _ in folder.glob("runs/*/DONE"))
        told = sum(len(entry["runs"]) - len(entry["missing"]) for entry in content["methods"].values())
        assert done - 1 <= told <= done, "what is written knows every run but perhaps the newest"
    assert code == 130 and "the same command goes on there" in rest.splitlines()[-1]
    began = {path: path.stat().st_mtime_ns for path in folder.glob("runs/*/DONE")}
    assert call(*arguments, "-q").exit_code == 0
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in began.items())
    assert json.loads((folder / "compare.json").read_text())["complete"] is True


def test_the_report_of_a_comparison_is_one_page(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    assert call("compare", "-m", "fedavg,joint", "--seeds", "0", "--out", folder, "-q", *FAST).exit_code == 0
    result = call("report", folder)
    assert result.exit_code == 0 and result.stdout == f"report: {folder / 'report.html'}\n"
    assert "Comparison of 2 methods" in (folder / "report.html").read_text()


SLOW = """
import time
from pathlib import Path
from fedloom.methods.fedavg import FedAvg, fedavg

class Slow(FedAvg):
    def client_update(self, *args):
        if not Path(__file__).with_name("hurry").exists():
            time.sleep(0.3)
        return super().client_update(*args)

def slow(*, local):
    made = fedavg(local=local)
    object.__setattr__(made, "__class__", Slow)
    return made
"""


def test_runs_side_by_side_stop_and_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow_method.py").write_text(SLOW)
    monkeypatch.syspath_prepend(str(tmp_path))
    folder, wanted = tmp_path / "c", {**os.environ, "PYTHONPATH": str(tmp_path)}
    arguments = ["compare", "-m", "slow_method:slow", "--seeds", "0,1", "--out", str(folder), *FAST]
    arguments += ["-s", "training.rounds=5"]
    process = subprocess.Popen(
        [sys.executable, "-m", "fedloom", *arguments, "--jobs", "2"],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env=wanted,
        text=True,
    )
    for _ in range(1200):
        if len({path.parents[2] for path in folder.glob("runs/*/checkpoints/*/meta.json")}) == 2:
            break
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    said = process.communicate(timeout=60)[1].splitlines()
    assert process.returncode == 130, said
    assert said == [
        "run 1 of 2: slow_method:slow, seed 0",
        "run 2 of 2: slow_method:slow, seed 1",
        "stopping after the current clients; Ctrl-C again stops at once",
        "error: interrupted in run 1 of 2: slow_method:slow, seed 0 and 1 more; what is done stays in "
        f"'{folder}', and the same command goes on there",
    ]
    assert not list(folder.glob("runs/*/DONE")) and not list(folder.glob("runs/*/FAILED"))
    (tmp_path / "hurry").touch()
    result = call(*arguments)
    assert result.exit_code == 0 and result.stderr.count("resumed at") == 2, result.stderr


def test_a_file_of_a_comparison_is_taken_like_a_recipe(tmp_path: Path) -> None:
    file = tmp_path / "study.yaml"
    file.write_text("methods: [fedavg, fedprox+mu=1]\nseeds: [4]\nreference: fedprox+mu=1\nset: {training.rounds: 1}\n")
    found = json.loads(call("compare", file, "--out", tmp_path / "c", "--dry-run", "--json").stdout)["runs"]
    assert [(run["label"], run["seed"]) for run in found] == [("fedavg", 4), ("fedprox+mu=1", 4)]
    named = json.loads(call("compare", "-m", "fedavg,fedprox+mu=1", "--seeds", 4, "-s", "training.rounds=1",
                            "--out", tmp_path / "c", "--dry-run", "--json").stdout)["runs"]  # fmt: skip
    assert named == found, "the same runs"
    over = json.loads(call("compare", file, "-m", "joint", "--reference", "joint", "--seeds", "0,1", "--dry-run",
                           "--json").stdout)["runs"]  # fmt: skip
    assert [(run["label"], run["seed"]) for run in over] == [("joint", 0), ("joint", 1)]
    file.write_text("methods: [fedavg]\nsettings: {a: {}}\n")
    for command in ("run", "show-data"):
        refused = call(command, file)
        assert refused.exit_code == 2 and "names methods to compare; call `fedloom compare` or" in refused.stderr
    refused = call("compare", file, "--dry-run")
    assert refused.exit_code == 2 and "call `fedloom sweep` with it" in refused.stderr


class Terminal(io.StringIO):
    """A standard output that is a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_tables_that_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = fedloom.compare("quickstart", ["fedavg", "joint"], [0], model="linear", stream={"tasks": 2},
                           training={"rounds": 1}, out=tmp_path / "c")  # fmt: skip
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("COLUMNS", "60")
    sys.modules["fedloom.cli.compare"]._print(done, False)
    lines = sys.stdout.getvalue().splitlines()
    assert max(len(line) for line in lines if line.startswith("  ")) <= 60
    for cell in (cell for row in report.grid(done.summary)[1:] for cell in row):
        assert any(cell in line for line in lines)
