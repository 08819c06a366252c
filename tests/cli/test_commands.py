"""The command line: exit codes, sentences, what is printed where."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner, Result

from fedloom import api, lifecycle
from fedloom.cli import app
from fedloom.cli.application import layers
from fedloom.core.errors import Interrupted

FAST = ["--set", "model.name=linear", "--set", "training.rounds=1", "--set", "partition.clients=3", "-m", "fedavg"]
TWO = [*FAST, "--set", "stream.tasks=2"]


def call(*arguments: Any) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], prog_name="fedloom")


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures take a second."""
    monkeypatch.setattr(lifecycle, "_pictures", lambda *args: None)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the command line, pictures and report included."""
    folder = tmp_path_factory.mktemp("runs") / "one"
    result = call("run", "quickstart", *TWO, "--out", folder)
    assert result.exit_code == 0, result.stderr
    (folder / "printed.txt").write_text(result.stdout)
    (folder / "said.txt").write_text(result.stderr)
    return folder


def test_a_run_ends_with_table_picture_and_report(finished: Path) -> None:
    printed = (finished / "printed.txt").read_text()
    assert "Final accuracy" in printed
    assert f"picture: {finished / 'accuracy.png'}" in printed
    assert f"report: {finished / 'report.html'}" in printed
    said = (finished / "said.txt").read_text().splitlines()
    assert sum("round 0 of 1: " in line for line in said) == 2
    assert sum("done: accuracy" in line for line in said) == 2


def test_json_is_one_object_on_stdout(tmp_path: Path, no_pictures: None) -> None:
    result = call("run", *TWO, "--out", tmp_path / "a", "--json")
    summary = json.loads(result.stdout)
    assert result.exit_code == 0 and result.stdout.count("\n") == 1
    assert summary.pop("folder") == str(tmp_path / "a")
    assert summary.pop("report") is None and summary.pop("tracker") is None
    assert summary == json.loads((tmp_path / "a" / "summary.json").read_text())
    assert not result.stderr


def test_quiet_prints_the_result_only(tmp_path: Path, no_pictures: None) -> None:
    result = call("run", *TWO, "--out", tmp_path / "a", "-q")
    assert "Final accuracy" in result.stdout and not result.stderr
    loud = call("run", *TWO, "--out", tmp_path / "b", "-v")
    assert "up " in loud.stderr


def test_the_same_run_from_python(tmp_path: Path, no_pictures: None) -> None:
    assert call("run", *TWO, "--out", tmp_path / "a", "--seed", 4).exit_code == 0
    api.run(
        "quickstart", method="fedavg", model={"name": "linear"}, training={"rounds": 1}, partition={"clients": 3},
        stream={"tasks": 2}, seed=4, out=tmp_path / "b",
    )  # fmt: skip
    records = [json.loads((tmp_path / k / "env.json").read_text()) for k in "ab"]
    summaries = [json.loads((tmp_path / k / "summary.json").read_text()) for k in "ab"]
    assert records[0]["config_hash"] == records[1]["config_hash"]
    assert summaries[0]["state_sha256"] == summaries[1]["state_sha256"]


def test_the_default_folder_is_named_after_the_recipe(
    tmp_path: Path, no_pictures: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call("run", *TWO, "-q").exit_code == 0
    assert len(list((tmp_path / "runs" / "quickstart").iterdir())) == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["run", "quikstart"], "unknown recipe 'quikstart'. Did you mean 'quickstart'?"),
        (["run", "nope.yaml"], "configuration file 'nope.yaml' does not exist"),
        (["run", "-m", "fedprx"], "unknown method 'fedprx'. Did you mean 'fedprox'?"),
        (["run", "--engine", "serail"], "unknown engine 'serail'. Did you mean 'serial'?"),
        (["run", "--engine", "cohort"], "unknown engine 'cohort'. Known: flower, serial."),
        (["run", "--set", "engine.runtime=grid"], "engine.runtime is grid, but the engine serial has no runtimes"),
        (["run", "--engine", "flower", "--workers", "2"], "engine.workers is 2, but a federation's nodes do the work"),
        (["run", "--engine", "flower", "-s", "engine.runtime=deployment"], "write the app with `fedloom deploy`"),
        (["run", "--set", "fedprx.mu=0.1"], "Did you mean 'fedprox.mu'?"),
        (["run", "--set", "training.rounds"], "--set takes key=value"),
        (["run", "--set", "training.optimizer.lr=.nan"], "training.optimizer.lr must be a finite number, got nan"),
        (["run", "--set", "partition.alpha=0"], "partition.alpha must be above 0, got 0"),
        (["run", "--set", "partition.clients=99999"], "partition.clients is 99999 but there are only"),
        (["run", "--set", "stream.tasks=11"], "stream.tasks is 11 but there are 10 classes"),
        (["run", "--set", "stream.class_order=[0, 1]"], "stream.class_order: class 2 is missing"),
        (["run", "--device", "cuda:99"], "engine.device is cuda:99, but this machine"),
        (["run", "--workers", "0"], "engine.workers must be auto or a whole number of at least 1, got 0"),
        (["run", "--seed", "-1"], "seed must be at least 0, got -1"),
        (["resume", "/no/such/folder"], "'/no/such/folder' does not exist"),
        (["predict", "/no/such/folder", "--input", "x.npy"], "is not a run folder"),
        (["report", "/no/such/folder"], "is not a folder"),
        (["export", "/no/such/folder", "--format", "safetensors"], "is not a run folder"),
        (["show-data", "quikstart"], "unknown recipe"),
        (["run", "--set", "data.name=uoft-cs/cifar10", "--data-root", "/no/such"], "/no/such/uoft-cs/cifar10"),
    ],
)
def test_errors_are_one_sentence_and_exit_code_2(arguments: list[str], sentence: str) -> None:
    result = call(*arguments)
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert not result.stdout


@pytest.mark.parametrize(
    "arguments", [["run", "--no-such-option"], ["nonsense"], ["run", "--seed", "abc"], ["list", "nonsense"]]
)
def test_usage_errors_exit_2(arguments: list[str]) -> None:
    assert call(*arguments).exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["run", "--lr", "0.1"], "no such option: --lr; use --set training.optimizer.lr=0.1"),
        (["run", "--model=mlp"], "no such option: --model; use --set model.name=mlp"),
        (["show-data", "--clients", 3], "no such option: --clients; use --set partition.clients=3"),
        (["run", "--local-epochs"], "use --set training.local_epochs=VALUE"),
        (["run", "--mu", "0.1"], "use --set method.mu=0.1"),
        (["run", "--zzz", "1"], "Keys of the configuration are set with --set KEY=VALUE"),
        (["run", "--seeed", "1"], "Did you mean --seed?"),
        (["report", "x", "--outt", "1"], "no such option: --outt. Did you mean --out?"),
        (["run", "--seed", "abc"], "must be a whole number"),
        (["export", "x", "--format", "pt"], "'pt' is not one of"),
        (["list", "options", "nope"], "unknown key 'nope'"),
        (["list", "models", "mlpp"], "unknown model 'mlpp'. Did you mean 'mlp'?"),
        (["list", "methods", "fedprx"], "unknown method 'fedprx'. Did you mean 'fedprox'?"),
    ],
)
def test_wrong_usage_is_answered_with_what_was_meant(arguments: list[str], sentence: str) -> None:
    result = call(*arguments)
    assert result.exit_code == 2
    assert sentence in " ".join(result.stderr.split())
    assert "Value error" not in result.stderr and "Input should" not in result.stderr


def test_list_shows_the_options_of_a_method_and_every_key() -> None:
    text = call("list", "methods", "fedprox").stdout
    assert text.startswith("FedProx: FedAvg with a proximal term") and "Source: Li et al." in text
    assert "method.mu           0.01   a number at least 0" in text and "paper: the defaults above" in text
    found = json.loads(call("list", "methods", "fedfmx", "--json").stdout)
    rho = {
        "key": "method.rho",
        "default": "0.95",
        "allowed": "a number in [0, 1)",
        "about": "decay of the running Fisher",
    }
    assert rho in found["options"]
    text = call("list", "options").stdout
    assert "training.optimizer.name=adamw: AdamW" in text and "\n  seed" in text
    some = call("list", "options", "checkpoint").stdout
    assert "checkpoint.keep" in some and "training" not in some
    assert json.loads(call("list", "options", "seed", "--json").stdout)["options"][0]["settings"][0]["key"] == "seed"


def test_a_folder_in_use_or_not_empty_is_refused(finished: Path) -> None:
    result = call("run", *TWO, "--out", finished)
    assert result.exit_code == 2 and "which is not empty" in result.stderr


def test_a_folder_without_permission_is_refused() -> None:
    result = call("run", *TWO, "--out", "/proc/fedloom")
    assert result.exit_code == 2 and "cannot be written" in result.stderr


def test_interruption_exits_130(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (Interrupted("stopped by the user"), KeyboardInterrupt()):

        def train(*args: Any, error: BaseException = error) -> None:
            raise error

        monkeypatch.setattr("fedloom.engine.loop.run", train)
        result = call("run", *TWO, "--out", tmp_path / type(error).__name__)
        assert result.exit_code == 130
        assert result.stderr.splitlines()[-1].startswith("error: ")


def test_an_unforeseen_error_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr("fedloom.config.resolve_source", fail)
    result = call("run")
    assert result.exit_code == 1
    assert "Traceback" not in result.stderr
    path = result.stderr.partition("the traceback is in ")[2].rstrip(")\n")
    assert "ZeroDivisionError" in Path(path).read_text()


def test_a_run_that_fails_in_training_exits_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(*args: Any, **kwargs: Any) -> None:
        raise ValueError("my bug")

    monkeypatch.setattr("fedloom.methods.fedavg.FedAvg.client_update", work)
    result = call("run", *TWO, "--out", tmp_path / "a", "--workers", 1)
    assert result.exit_code == 1
    assert "my bug (test_commands.py:" in result.stderr.splitlines()[-1]
    assert f"traceback in {tmp_path / 'a' / 'log.txt'})" in result.stderr.splitlines()[-1]
    assert (tmp_path / "a" / "FAILED").exists()


def test_resume_of_a_finished_run_prints_it(finished: Path) -> None:
    result = call("resume", finished, "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["method"] == "fedavg"
    assert json.loads(result.stdout)["report"] == str(finished / "report.html")
    assert "is done; nothing to resume" in result.stderr


def test_resume_refuses_a_changed_configuration(tmp_path: Path, no_pictures: None) -> None:
    assert call("run", *TWO, "--out", tmp_path / "a", "-q").exit_code == 0
    (tmp_path / "a" / "DONE").unlink()
    path = tmp_path / "a" / "config.yaml"
    path.write_text(path.read_text().replace("rounds: 1", "rounds: 2"))
    result = call("resume", tmp_path / "a")
    assert result.exit_code == 2 and "have changed since the run began" in result.stderr


def test_dry_run_starts_nothing(tmp_path: Path) -> None:
    result = call("run", *TWO, "--out", tmp_path / "a", "--dry-run")
    assert result.exit_code == 0 and not (tmp_path / "a").exists()
    text = result.stdout
    assert yaml.safe_load(text[: text.index("\n\n")])["method"]["name"] == "fedavg"
    assert "3 clients, 2 stages" in text and "parameters; 3 clients a round" in text
    found = json.loads(call("run", *TWO, "--dry-run", "--json").stdout)
    assert found["parameters"] == 64 * 10 + 10
    assert found["bytes_down_first_round"] == 3 * 4 * (64 + 1) * 5
    assert found["bytes_down_last_round"] == 3 * 4 * (64 + 1) * 10


def test_show_data(tmp_path: Path) -> None:
    result = call("show-data", "quickstart", "--set", "partition.clients=3", "--out", tmp_path / "p" / "x.png")
    assert result.exit_code == 0
    assert "3 clients, 5 stages" in result.stdout
    assert (tmp_path / "p" / "x.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("kind", "name"),
    [("methods", "fedfmx"), ("datasets", "uoft-cs/cifar100"), ("models", "resnet8_gn"), ("recipes", "quickstart")],
)
def test_lists(kind: str, name: str) -> None:
    assert name in call("list", kind).stdout
    assert name in [row["name"] for row in json.loads(call("list", kind, "--json").stdout)[kind]]


def test_predict_reads_arrays_images_and_tables(finished: Path, tmp_path: Path) -> None:
    from PIL import Image

    x = np.random.default_rng(0).integers(0, 256, (4, 8, 8), dtype=np.uint8)
    np.save(tmp_path / "x.npy", x)
    np.savez(tmp_path / "x.npz", x=x[:, None])
    np.savetxt(tmp_path / "x.csv", x.reshape(4, -1), fmt="%d", delimiter=",", header="a,b", comments="")
    (tmp_path / "images").mkdir()
    for k in range(4):
        Image.fromarray(x[k]).save(tmp_path / "images" / f"{k}.png")
    found = {}
    for name in ("x.npy", "x.npz", "x.csv", "images"):
        result = call("predict", finished, "--input", tmp_path / name, "--json", "--top", 10)
        assert result.exit_code == 0, result.stderr
        found[name] = [row["scores"] for row in json.loads(result.stdout)["predictions"]]
    assert all(rows == found["x.npy"] for rows in found.values())
    assert sum(found["x.npy"][0].values()) == pytest.approx(1)
    lines = call("predict", finished, "--input", tmp_path / "images" / "0.png").stdout.splitlines()
    assert len(lines) == 1 and lines[0].startswith("0.png")


def test_predict_says_what_it_did_to_an_image(finished: Path, tmp_path: Path) -> None:
    from PIL import Image

    for k in range(2):
        Image.new("RGB", (32, 32)).save(tmp_path / f"{k}.png")
    result = call("predict", finished, "--input", tmp_path)
    assert result.exit_code == 0
    changed = (
        "was converted from RGB to grey and resized from 32x32 to 8x8 to fit the model, and 1 more images likewise"
    )
    assert f"0.png' {changed}" in result.stderr and result.stderr.count("note:") == 1


def test_predict_takes_no_scaled_floats(finished: Path, tmp_path: Path) -> None:
    for x, words in ((np.full((2, 8, 8), 0.5), "from 0 to 255"), (np.full((2, 8, 8), np.nan), "inputs hold NaN")):
        np.save(tmp_path / "x.npy", x)
        result = call("predict", finished, "--input", tmp_path / "x.npy")
        assert result.exit_code == 2 and words in result.stderr
    assert "values from 0 to 255" in " ".join(call("predict", "--help").stdout.split())


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("x.npy", b"not an array", "cannot be read as an array"),
        ("x.txt", b"", "must end in .npy"),
        ("x.png", b"not an image", "cannot be read"),
        ("x.csv", b"1,2\n3,x\n", "data row 1 is not 2 numbers"),
        ("y.csv", b"1,2\n", "the model needs [batch, 1, 8, 8]"),
        ("z.csv", b"", "holds no rows"),
    ],
)
def test_predict_refuses_what_it_cannot_read(
    finished: Path, tmp_path: Path, name: str, content: bytes, sentence: str
) -> None:
    (tmp_path / name).write_bytes(content)
    result = call("predict", finished, "--input", tmp_path / name)
    assert result.exit_code == 2 and sentence in result.stderr


def test_export_safetensors_holds_the_global_model(finished: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    result = call("export", finished, "--format", "safetensors", "--out", tmp_path / "m.safetensors")
    assert result.exit_code == 0
    tensors = load_file(tmp_path / "m.safetensors")
    assert {k: tuple(v.shape) for k, v in tensors.items()} == {"head.weight": (10, 64), "head.bias": (10,)}
    assert call("export", finished, "--format", "pickle").exit_code == 2


@pytest.mark.parametrize(
    ("client", "sentence"),
    [
        (3, "--client is 3, but the run has the clients 0 to 2"),
        (1, "with fedavg every client predicts with the global"),
    ],
)
def test_export_of_a_client_that_there_is_not_or_that_has_no_model(
    finished: Path, tmp_path: Path, client: int, sentence: str
) -> None:
    for form in ("safetensors", "onnx"):
        result = call("export", finished, "--format", form, "--client", client, "--out", tmp_path / "m")
        assert result.exit_code == 2 and sentence in result.stderr and result.stderr.count("\n") == 1
    assert not (tmp_path / "m").exists()


def test_the_export_of_a_client_has_a_name_of_its_own(tmp_path: Path, no_pictures: None) -> None:
    from safetensors import safe_open

    folder = tmp_path / "run"
    assert call("run", *TWO, "-m", "fedbn", "--out", folder, "-q").exit_code == 0
    for arguments, name, client in ([], "export", "null"), (["--client", 2], "export-client2", "2"):
        result = call("export", folder, "--format", "safetensors", *arguments)
        assert result.exit_code == 0, result.stderr
        assert result.stdout == f"model: {folder / name}.safetensors\n"
        with safe_open(folder / f"{name}.safetensors", "pt") as file:
            assert file.metadata()["client"] == client and file.metadata()["model"] == "linear"


def test_report_of_several_runs(finished: Path, tmp_path: Path) -> None:
    result = call("report", finished, "--out", tmp_path / "page.html")
    assert result.exit_code == 0 and (tmp_path / "page.html").stat().st_size > 1000


def test_doctor_names_a_mend_for_every_finding(tmp_path: Path) -> None:
    found = json.loads(call("doctor", "--json").stdout)["findings"]
    assert all(item["mend"] for item in found if item["level"] != "ok")
    extras = [item for item in found if item["level"] == "note" and item["what"].startswith("extra")]
    assert all(item["mend"].startswith("pip install -e '.[") for item in extras), "these are the sources"
    missing = call("doctor", "--data-root", tmp_path / "nope")
    assert missing.exit_code == 1 and "is not a folder" in missing.stderr
    (tmp_path / "uoft-cs" / "cifar10").mkdir(parents=True)
    (tmp_path / "uoft-cs" / "cifar10" / "train.parquet").touch()
    assert "uoft-cs/cifar10: found" in call("doctor", "--data-root", tmp_path).stdout


def test_version_and_help() -> None:
    from fedloom import __version__

    assert call("--version").stdout.strip() == f"fedloom {__version__}"
    assert call("--help").exit_code == 0


def test_sets_win_over_named_options() -> None:
    assert layers(seed=1, sets=["seed=2"]) == {"seed": 2}
    assert layers(method="fedavg", workers="auto", root="/x") == {
        "method": {"name": "fedavg"},
        "data": {"root": "/x"},
        "engine": {"workers": "auto"},
    }


def test_doctor_knows_which_flower_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("flwr")
    monkeypatch.setattr("fedloom.engine.flower.compat._installed", lambda package: "1.20.0")
    result = call("doctor")
    assert result.exit_code == 1
    assert (
        "problem flwr 1.20.0 is installed, and FedLoom needs flwr >= 1.28 and < 2.0 -> install another" in result.stdout
    )


def test_a_recipe_is_listed_with_all_that_it_says_of_itself() -> None:
    told = call("list", "recipes", "fedfmx/table1-cifar10-qli").stdout
    assert "shards" in told and "partition.alpha_q 2, 4 (here), 6" in told and "base:" not in told


def test_the_list_of_recipes_tells_what_they_say_and_none_of_what_they_set() -> None:
    told = call("list", "recipes").stdout
    assert "base:" not in told and ": {" not in told
