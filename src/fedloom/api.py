"""The Python API: `run`, `load_run`, `Run`. The command line calls the same functions, so runs are the same."""

from __future__ import annotations

import json
import secrets
import shutil
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedloom import __version__
from fedloom.build import Built, build
from fedloom.config import Config, resolve, resolve_source
from fedloom.core.errors import CheckpointError, ConfigError, FedloomError, Interrupted, RunError, origin

if TYPE_CHECKING:
    from torch import nn

    from fedloom.engine.experiment import Observer
    from fedloom.engine.folder import RunFolder
    from fedloom.served import Served

REPORT, PICTURE, PARTITION = "report.html", "accuracy.png", "partition.png"


class Run:
    """What a run left. summary: as in summary.json. folder: where everything is."""

    def __init__(self, folder: Path, summary: Mapping[str, Any], model: Any = None):
        self.folder, self.summary, self._own_model = folder, dict(summary), model

    def __repr__(self) -> str:
        accuracy = self.summary.get("final_accuracy")
        shown = "" if accuracy is None else f", final accuracy {accuracy:.3f}"
        return f"Run({self.summary.get('method')} on {self.summary.get('dataset')}{shown}, '{self.folder}')"

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Rows of metrics.jsonl: one per stage, round and scope."""
        path = self.folder / "metrics.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.strip()]

    @property
    def class_names(self) -> list[str]:
        """Class names by id; `predict` gives ids."""
        return self._served.class_names

    @property
    def model(self) -> nn.Module:
        """The network of the method with the final global values, in evaluation mode."""
        from fedloom.served import module_of

        return module_of(self._served)

    def scores(self, x: Any) -> Any:
        """Scores [n, classes] of the global view; a tensor for a tensor, else an array.

        x: inputs as the data set holds them (8-bit images stay 8-bit). Classes never seen are -inf.
        """
        return _like(self._served.scores(x), x)

    def predict(self, x: Any) -> Any:
        """Class ids [n] of the global view, without task or domain; `class_names` names them. x: see `scores`."""
        return _like(self._served.scores(x).argmax(1), x)

    @cached_property
    def _served(self) -> Served:
        from fedloom.served import open_served

        return open_served(self.folder, self._own_model)


def run(
    recipe_or_config: str | Path | Mapping[str, Any] | Config | None = None,
    *,
    method: str | Mapping[str, Any] | None = None,
    data: Any = None,
    model: Any = None,
    out: str | Path | None = None,
    engine: str | Mapping[str, Any] | None = None,
    observers: Sequence[Observer] = (),
    verbose: bool | None = None,
    **overrides: Any,
) -> Run:
    """Train, evaluate and write a run folder.

    recipe_or_config: a recipe's name, a YAML file, or a mapping; None is the quickstart, or with `data` the defaults.
    method: a name, or a mapping with `name` and options. data: a name, a mapping of the section, or arrays
    `(x, y)`, `(x_train, y_train, x_test, y_test)`, a torch dataset or a pair of them. model: a name, a mapping of
    the section, a module (a classifier giving logits [batch, classes], or a backbone with `num_features` giving
    features), or a function that makes one. out: folder, by default `runs/<recipe>/<time>-<id>`. verbose: a line per
    round on stderr; None does so in a terminal and in a notebook. overrides: sections of the configuration
    (`training={"rounds": 1}`), dotted keys (`**{"training.rounds": 1}`) and `seed`. Raises `FedloomError` with one
    sentence.
    """
    name, config, own_data, own_model = configure(
        recipe_or_config, method=method, data=data, model=model, engine=engine, **overrides
    )
    built = build(config, data=own_data, model=own_model)
    from fedloom.progress import Lines, quiet_by_default

    if verbose or (verbose is None and not quiet_by_default()):
        observers = [*observers, Lines()]
    return start(built, checked_path("out", out) if out is not None else new_folder(name), observers, own_model)


def configure(
    recipe_or_config: str | Path | Mapping[str, Any] | Config | None,
    *,
    method: str | Mapping[str, Any] | None = None,
    data: Any = None,
    model: Any = None,
    engine: str | Mapping[str, Any] | None = None,
    **overrides: Any,
) -> tuple[str, Config, Any, Any]:
    """(name for the folder, checked tree, the user's data or None, the user's model or None)."""
    if recipe_or_config is None and data is None:
        recipe_or_config = "quickstart"
    name, base = resolve_source(str(recipe_or_config) if isinstance(recipe_or_config, Path) else recipe_or_config)
    if recipe_or_config is None and data is not None:
        name = "own-data"
    layer = dict(overrides)
    for section, value in (("method", method), ("data", data), ("model", model), ("engine", engine)):
        if section in ("method", "engine") and not isinstance(value, str | Mapping | None):
            raise ConfigError(f"{section} must be a name or a mapping of the section, got a {type(value).__name__}")
        if isinstance(value, str):
            layer[section] = {"name": value}
        elif isinstance(value, Mapping):
            layer[section] = dict(value)
    own_data = None if data is None or isinstance(data, str | Mapping) else data
    own_model = None if model is None or isinstance(model, str | Mapping) else model
    return name, resolve(base, layer), own_data, own_model


def new_folder(name: str) -> Path:
    """`runs/<name>/<time>-<id>`; the id tells runs of the same second apart."""
    return Path("runs") / name / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"


def start(built: Built, out: Path, observers: Sequence[Observer] = (), model: Any = None) -> Run:
    """Make the run folder and carry the run out."""
    from fedloom.engine.files import write_json
    from fedloom.engine.folder import RunFolder
    from fedloom.engine.serial import recipe
    from fedloom.environment import environment

    recipe(built.experiment, built.options.workers)
    with _gone_unless_begun(out) as watch, RunFolder.create(out, built.config.as_dict(), environment(built)) as folder:
        write_json(folder.path / "partition.json", built.experiment.plan.describe())
        folder.log(f"fedloom {__version__}, configuration {built.hash}")
        for note in built.experiment.plan.notes:
            _note(folder, observers, note)
        return Run(folder.path, _carry_out(built, folder, [*observers, watch]), model)


@contextmanager
def _gone_unless_begun(out: Path) -> Iterator[Observer]:
    """Remove the folders that are new here when a run is refused before a client has worked.

    Yields the observer that notices the first client.
    """
    from fedloom.engine.experiment import Observer

    class Watch(Observer):
        begun = False

        def client_done(self, done: int, total: int) -> None:
            self.begun = True

    out = out.expanduser().absolute()
    new = [path for path in (out, *out.parents) if not path.exists()]
    watch = Watch()
    try:
        yield watch
    except FedloomError as error:
        if error.exit_code == ConfigError.exit_code and not watch.begun and new:
            _keep_log(error, out / "log.txt")
            shutil.rmtree(out, ignore_errors=True)
            for path in new[1:]:
                with suppress(OSError):  # another run has moved in
                    path.rmdir()
        raise


def _keep_log(error: FedloomError, log: Path) -> None:
    """Where the sentence points to the log of a folder that goes, keep the log elsewhere and point there."""
    if str(log) in str(error) and log.is_file():
        kept = Path(tempfile.mkdtemp(prefix="fedloom-")) / "log.txt"
        shutil.copyfile(log, kept)
        error.args = (str(error).replace(str(log), str(kept)),)


def resume(
    path: str | Path,
    *,
    workers: int | None = None,
    data: Any = None,
    model: Any = None,
    observers: Sequence[Observer] = (),
) -> Run:
    """Continue a run from its newest checkpoint; one that is done is only opened.

    data, model: objects that the run was given from Python, where it was given any. Raises `CheckpointError` when
    the folder is no run folder or its configuration has changed.
    """
    from fedloom.engine.folder import RunFolder

    path = _run_folder("path", path)
    if (path / "DONE").exists() and (path / "summary.json").exists():
        found = load_run(path, model=model)
        (path / "FAILED").unlink(missing_ok=True)  # of an earlier try
        return found
    with RunFolder.open(path) as folder:
        built = _rebuilt(folder, workers, data, model)
        return Run(folder.path, _carry_out(built, folder, observers), model)


def _rebuilt(folder: RunFolder, workers: int | None, data: Any, model: Any) -> Built:
    from fedloom.config import read_yaml

    more = {} if workers is None else {"engine": {"workers": workers}}
    built = build(resolve(read_yaml(folder.path / "config.yaml"), more), data=data, model=model)
    try:
        known = json.loads((folder.path / "env.json").read_text(encoding="utf-8"))["config_hash"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder.path / 'env.json'} is missing or damaged; start a new run") from error
    if known != built.hash:
        raise CheckpointError(
            f"the configuration of {folder.path} or its data or device have changed since the run began; "
            "restore config.yaml, or start a new run with the changed one"
        )
    return built


def load_run(folder: str | Path, *, model: Any = None) -> Run:
    """Open a finished run. model: the user's own network, where the run was given one."""
    path = _run_folder("folder", folder)
    try:
        summary = json.loads((path / "summary.json").read_text(encoding="utf-8"))
        if not isinstance(summary, dict) or "final_accuracy" not in summary:
            raise ValueError("it holds no summary of a run")
    except FileNotFoundError:
        raise CheckpointError(
            f"'{path}' holds no summary.json: the run has not ended; continue it with `fedloom resume {path}`"
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"'{path / 'summary.json'}' is damaged ({error}); to write it again delete '{path / 'DONE'}' and run "
            f"`fedloom resume {path}`"
        ) from error
    return Run(path, summary, model)


def _carry_out(built: Built, folder: RunFolder, observers: Sequence[Observer]) -> dict[str, Any]:
    """Train to the end and write what a finished run leaves; DONE or FAILED says how it ended."""
    from fedloom.engine.start import carry_out
    from fedloom.served import describe

    folder.mark(None)
    card = {"config": built.config.as_dict(), "model": describe(built)}
    try:
        measured = carry_out(built.experiment, built.options, folder, [*observers, _log(folder)], card)
        summary = _finish(built, folder, measured)
    except Interrupted as error:
        raise Interrupted(f"{error}; continue with `fedloom resume {folder.path}`") from error
    except FedloomError as error:
        folder.log(traceback.format_exc())
        if error.exit_code == RunError.exit_code:
            folder.mark("FAILED", str(error))
        raise
    except Exception as error:
        folder.log(traceback.format_exc())
        folder.mark("FAILED", f"{type(error).__name__}: {error}")
        raise RunError(
            f"the run failed with {type(error).__name__}: {error} "
            f"({origin(error)}; traceback in {folder.path / 'log.txt'})"
        ) from error
    _pictures(built, folder, observers)
    folder.mark("DONE", f"final accuracy {summary['final_accuracy']}")
    for observer in observers:
        observer.finished(summary)
    return summary


def _log(folder: RunFolder) -> Observer:
    """An observer that keeps one line per stage in log.txt; notes get there by themselves."""
    from fedloom.engine.experiment import Observer

    class Log(Observer):
        def started(self, info: Mapping[str, Any]) -> None:
            folder.log("training: " + ", ".join(f"{key} {value}" for key, value in info.items() if value is not None))

        def stage_done(self, row: Mapping[str, Any]) -> None:
            folder.log(f"stage {row['stage']} done: accuracy {row.get('accuracy')}")

    return Log()


def _finish(built: Built, folder: RunFolder, measured: Mapping[str, Any]) -> dict[str, Any]:
    from fedloom.engine.files import write_json
    from fedloom.evaluate.cost import peak_rss_bytes
    from fedloom.evaluate.summary import make_summary
    from fedloom.served import META, MODEL, describe

    config = built.config
    known = {
        "method": config.method["name"],
        "preset": config.method["preset"],
        "dataset": built.source.name,
        "scenario": scenario(config, built),
        "engine": config.engine.name,
        "seed": config.seed,
        "peak_rss_bytes": peak_rss_bytes(),
    }
    summary = make_summary(**{**known, **measured})
    write_json(folder.path / MODEL / META, describe(built))
    write_json(folder.path / "summary.json", summary)
    return summary


def _pictures(built: Built, folder: RunFolder, observers: Sequence[Observer]) -> None:
    """Pictures and the report; their failure is told and leaves the run as it is, for its numbers are on disk."""
    from fedloom.report import read_run, save_accuracy, write_report

    try:
        built.experiment.plan.draw(folder.path / PARTITION)
        save_accuracy(read_run(folder.path), folder.path / PICTURE)
        write_report([folder.path], folder.path / REPORT)
    except Exception as error:
        folder.log(traceback.format_exc())
        reason = f"{type(error).__name__}: {error}"
        _note(folder, observers, f"pictures and report could not be made ({reason}); see log.txt")


def _note(folder: RunFolder, observers: Sequence[Observer], text: str) -> None:
    folder.log(text)
    for observer in observers:
        observer.note(text)


def scenario(config: Config, built: Built) -> str:
    """The stream and the partition in words."""
    stream, part = config.stream, config.partition
    tasks = len(built.experiment.plan.tasks)
    first = stream.kind if stream.kind == "static" else f"{stream.kind}, {tasks} tasks"
    named = {k: getattr(part, k) for k in ("alpha", "alpha_q", "qli_mode", "per_client") if hasattr(part, k)}
    second = ", ".join([part.kind, *(f"{k} {v}" for k, v in named.items())])
    return f"{first}; {second}"


def checked_path(name: str, value: Any) -> Path:
    """A path that the user gave, `~` expanded; `ConfigError` for what is none."""
    if not isinstance(value, str | Path):
        raise ConfigError(f"{name} must be the path of a folder, got a {type(value).__name__}")
    if not str(value):
        raise ConfigError(f"{name} is empty; name a folder")
    try:
        path = Path(value).expanduser()
        path.exists()
    except (OSError, RuntimeError, ValueError) as error:  # too long a name, an unknown user, a null byte
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{name} '{str(value)[:60]}' is no usable path: {reason}; name another") from error
    return path


def _run_folder(name: str, value: Any) -> Path:
    path = checked_path(name, value)
    if not path.is_dir():
        found = "is a file" if path.exists() else "does not exist"
        raise CheckpointError(f"'{path}' {found}; name the folder of a run")
    return path


def _like(found: Any, given: Any) -> Any:
    import torch

    return found if isinstance(given, torch.Tensor) else found.numpy()
