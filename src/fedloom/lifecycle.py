"""From an assembled run to a finished run folder: begin, go on, and what is left at the end.

`carry` is who carries the experiment out (see `fedloom.engine.start.carry_out`, the default).
"""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedloom import __version__
from fedloom.core.errors import CheckpointError, ConfigError, FedloomError, Interrupted, RunError, origin

if TYPE_CHECKING:
    from fedloom.build import Built
    from fedloom.config import Config
    from fedloom.engine.experiment import Observer
    from fedloom.engine.folder import RunFolder
    from fedloom.trackers import Card

REPORT, PICTURE, PARTITION = "report.html", "accuracy.png", "partition.png"

Carry = Callable[..., dict[str, Any]]


def begin(
    built: Built, out: Path, observers: Sequence[Observer] = (), carry: Carry | None = None
) -> tuple[Path, dict[str, Any]]:
    """Make a run folder and carry the run out; (folder, summary)."""
    from fedloom.engine.files import write_json
    from fedloom.engine.folder import RunFolder
    from fedloom.engine.serial import recipe
    from fedloom.environment import environment
    from fedloom.trackers import check_installed

    check_installed(built.config.as_dict()["tracker"])
    recipe(built.experiment, built.options.workers)
    with _gone_unless_begun(out) as watch, RunFolder.create(out, built.config.as_dict(), environment(built)) as folder:
        watch.ours = True
        write_json(folder.path / "partition.json", built.experiment.plan.describe())
        folder.log(f"fedloom {__version__}, configuration {built.hash}")
        for note in built.experiment.plan.notes:
            _note(folder, observers, note)
        return folder.path, _carry_out(built, folder, [*observers, watch], carry)


def go_on(
    path: Path, rebuild: Callable[[Path], Built], observers: Sequence[Observer] = (), carry: Carry | None = None
) -> tuple[Path, dict[str, Any]]:
    """Continue the run of a folder from its newest checkpoint; (folder, summary).

    rebuild: assembles the run again. Raises `CheckpointError` when what it assembles is not what the run began with.
    """
    from fedloom.engine.folder import RunFolder
    from fedloom.trackers import check_installed

    with RunFolder.open(path) as folder:
        built = rebuild(folder.path)
        check_installed(built.config.as_dict()["tracker"])
        for note in _check_same(folder, built):
            _note(folder, observers, note)
        return folder.path, _carry_out(built, folder, observers, carry)


@contextmanager
def _gone_unless_begun(out: Path) -> Iterator[Any]:
    """Remove the folders that are new here when a run is refused before a client has worked.

    Yields the observer that notices the first client; `ours` says that the folder is not of another process, which may
    have been faster.
    """
    from fedloom.engine.experiment import Observer

    class Watch(Observer):
        begun = ours = False

        def client_done(self, done: int, total: int) -> None:
            self.begun = True

    out = out.expanduser().absolute()
    new = [path for path in (out, *out.parents) if not path.exists()]
    watch = Watch()
    try:
        yield watch
    except FedloomError as error:
        if error.exit_code == ConfigError.exit_code and not watch.begun and new:
            if watch.ours:
                _keep_log(error, out / "log.txt")
                shutil.rmtree(out, ignore_errors=True)
            for path in new:
                with suppress(OSError):  # another run has moved in
                    path.rmdir()
        raise


def _keep_log(error: FedloomError, log: Path) -> None:
    """Where the sentence points to the log of a folder that goes, keep the log elsewhere and point there."""
    if str(log) in str(error) and log.is_file():
        kept = Path(tempfile.mkdtemp(prefix="fedloom-")) / "log.txt"
        shutil.copyfile(log, kept)
        error.args = (str(error).replace(str(log), str(kept)),)


def _check_same(folder: RunFolder, built: Built) -> list[str]:
    """Raise `CheckpointError` unless this is the run that began; what is different all the same, in words."""
    from fedloom.environment import sources

    try:
        known = json.loads((folder.path / "env.json").read_text(encoding="utf-8"))
        began = known["config_hash"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder.path / 'env.json'} is missing or damaged; start a new run") from error
    if began != built.hash:
        raise CheckpointError(
            f"the configuration of {folder.path} or its data or device have changed since the run began; "
            "restore config.yaml, or start a new run with the changed one"
        )
    return [
        f"the file of the {key.removesuffix('_source')} has changed since the run began; what was computed before is "
        "by the old one"
        for key, value in sources(built.config).items()
        if known.get(key) not in (None, value)
    ]


def _carry_out(built: Built, folder: RunFolder, observers: Sequence[Observer], carry: Carry | None) -> dict[str, Any]:
    """Carry the run out, its tracker among the observers."""
    from fedloom.trackers import tracked

    told = {
        "tell": functools.partial(_note, folder, observers),
        "log": folder.log,
        "pictures": (PICTURE, PARTITION),
        "files": (REPORT, "summary.json", "config.yaml"),
    }
    with tracked(_card(built, folder), **told) as tracking:
        return _train(built, folder, [*observers, *tracking], carry)


def _card(built: Built, folder: RunFolder) -> Card | None:
    """What the tracker is told of the run; None for a run without one."""
    from fedloom.trackers import Card

    tree = built.config.as_dict()
    title = f"{tree['method']['name']}, seed {tree['seed']}"
    return None if tree["tracker"] is None else Card(tree["tracker"], folder.path, title, tree, built.hash)


def _train(built: Built, folder: RunFolder, observers: Sequence[Observer], carry: Carry | None) -> dict[str, Any]:
    """Train to the end and write what a finished run leaves; DONE or FAILED says how it ended."""
    from fedloom.engine.start import carry_out
    from fedloom.served import describe

    carry = carry or carry_out

    folder.mark(None)
    card = {"config": built.config.as_dict(), "model": describe(built)}
    try:
        measured = carry(built.experiment, built.options, folder, [*observers, _log(folder)], card)
        summary = _finish(built, folder, measured)
    except Interrupted as error:
        raise Interrupted(f"{error}; {_how_to_continue(built, folder)}") from error
    except FedloomError as error:
        folder.log(traceback.format_exc())
        if error.exit_code == RunError.exit_code:
            folder.mark("FAILED", str(error))
        raise
    except (Exception, SystemExit) as error:  # a method's sys.exit() must not pass for a finished run
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


def _how_to_continue(built: Built, folder: RunFolder) -> str:
    if built.options.runtime == "deployment":
        return f"continue through Flower with run.resume=true and run.out='{folder.path}'"
    return f"continue with `fedloom resume {folder.path}`"


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
    from fedloom.config.defaults import defaults
    from fedloom.report import read_run, save_accuracy, write_report

    try:
        built.experiment.plan.draw(folder.path / PARTITION)
        save_accuracy(read_run(folder.path), folder.path / PICTURE)
        write_report([folder.path], folder.path / REPORT, defaults=defaults)
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
