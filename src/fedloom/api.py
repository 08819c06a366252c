"""The Python API: `run`, `load_run`, `Run`. The command line calls the same functions, so runs are the same."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedloom.build import Built, build
from fedloom.config import Config, resolve, resolve_source
from fedloom.core.errors import CheckpointError, ConfigError
from fedloom.trackers import check_installed

if TYPE_CHECKING:
    from torch import nn

    from fedloom.engine.experiment import Observer
    from fedloom.served import Served


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
    `(x, y)`, `(x_train, y_train, x_test, y_test)`, either with domain after y, a torch dataset or a pair of them.
    model: a name, a mapping of the section, a module (a classifier giving logits [batch, classes], or a backbone with
    `num_features` giving features), or a function that makes one. out: folder, by default `runs/<recipe>/<time>-<id>`.
    verbose: a line per round on stderr; None does so in a terminal and in a notebook. overrides: sections of the
    configuration (`training={"rounds": 1}`), dotted keys (`**{"training.rounds": 1}`) and `seed`. Raises `FedloomError`
    with one sentence.
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
    config = resolve(base, layer)
    check_installed(config.as_dict()["tracker"])
    return name, config, own_data, own_model


def new_folder(name: str) -> Path:
    """`runs/<name>/<time>-<id>`; the id tells runs of the same second apart."""
    return Path("runs") / name / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"


def start(built: Built, out: Path, observers: Sequence[Observer] = (), model: Any = None) -> Run:
    """Make the run folder and carry the run out."""
    from fedloom.lifecycle import begin

    return Run(*begin(built, out, observers), model)


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
    from fedloom.config import read_yaml
    from fedloom.lifecycle import go_on

    path = _run_folder("path", path)
    if (path / "DONE").exists() and (path / "summary.json").exists():
        found = load_run(path, model=model)
        (path / "FAILED").unlink(missing_ok=True)  # of an earlier try
        return found
    more = {} if workers is None else {"engine": {"workers": workers}}

    def rebuilt(folder: Path) -> Built:
        return build(resolve(read_yaml(folder / "config.yaml"), more), data=data, model=model)

    return Run(*go_on(path, rebuilt, observers), model)


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
