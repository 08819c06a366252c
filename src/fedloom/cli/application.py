"""The Typer application, its common options, and the way errors leave it: one sentence and an exit code."""

from __future__ import annotations

import functools
import json
import re
import signal
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from fedloom.cli.completion import among, methods, recipes
from fedloom.cli.examples import shown
from fedloom.terminal import OutputLost, open_missing, say

app = typer.Typer(
    name="fedloom",
    help="Federated learning when clients differ. `fedloom run` alone runs the quickstart.",
    no_args_is_help=True,
    epilog=f"\b\n{shown('')}",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Recipe = Annotated[
    str,
    typer.Argument(metavar="RECIPE|FILE", help="Name of a recipe, or a YAML file.", autocompletion=recipes),
]
Method = Annotated[
    str | None,
    typer.Option("--method", "-m", help="Method, or package.module:attribute.", autocompletion=methods),
]
Set = Annotated[list[str] | None, typer.Option("--set", "-s", metavar="KEY=VALUE", help="Dotted key, YAML value.")]
Seed = Annotated[int | None, typer.Option("--seed", help="Seed of every random stream.")]
Root = Annotated[str | None, typer.Option("--data-root", metavar="DIR", help="Local mirror of hub repositories.")]
Engine = Annotated[
    str | None, typer.Option("--engine", help="serial or flower.", autocompletion=among("serial", "flower"))
]
Device = Annotated[
    str | None,
    typer.Option(
        "--device", help="auto, cpu, cuda, cuda:N or mps.", autocompletion=among("auto", "cpu", "cuda", "mps")
    ),
]
Workers = Annotated[str | None, typer.Option("--workers", metavar="N", help="Processes: a number, or auto.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would run, and start nothing.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print the result only.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Print every measure of every round.")]


def _version(value: bool) -> None:
    if value:
        from fedloom import __version__

        say(f"fedloom {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Federated learning when clients differ. `fedloom run` alone runs the quickstart."""
    open_missing()


def guarded(command: Callable[..., None]) -> Callable[..., None]:
    """Turn what a command raises into `error: ...` on stderr and the exit code of the error.

    An error that nobody foresaw gets a sentence too; its traceback goes to a log file that the sentence names.
    """

    @functools.wraps(command)
    def call(*args: Any, **kwargs: Any) -> None:
        try:
            with stoppable():
                command(*args, **kwargs)
        except KeyboardInterrupt:
            fail("interrupted", 130)
        except (typer.Exit, typer.Abort):
            raise
        except OutputLost as error:
            fail(str(error), 1)
        except (Exception, SystemExit) as error:  # code of the user may call sys.exit(), which ends no command well
            from fedloom.core.errors import FedloomError, origin

            if isinstance(error, FedloomError):
                fail(str(error), error.exit_code)
            where = f"{origin(error)}, unexpected; the traceback is in {_keep_traceback()}"
            fail(f"{type(error).__name__}: {error} ({where})", 1)

    return call


@contextmanager
def stoppable() -> Iterator[None]:
    """SIGTERM stops a command as Ctrl-C does; while clients train, the engine takes both over.

    A signal may come in the middle of an import, which then fails with an error of its own: that is an
    interruption too.
    """
    asked: list[int] = []

    def stop(number: int, frame: Any) -> None:
        asked.append(number)
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except Exception as error:
        if asked and not hasattr(error, "exit_code"):
            raise KeyboardInterrupt from error
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def fail(sentence: str, code: int) -> None:
    """End the command with a sentence on stderr."""
    text = re.sub(r"[^\s/\\]{160,}", lambda found: f"{found[0][:57]}...", " ".join(sentence.split()))
    say(f"error: {text}", err=True)
    raise typer.Exit(code)


def layers(
    *,
    sets: list[str] | None = None,
    method: str | None = None,
    seed: int | None = None,
    engine: str | None = None,
    root: str | None = None,
    device: str | None = None,
    workers: str | None = None,
) -> dict[str, Any]:
    """One layer of configuration from the options of a command; `--set` wins over the named options."""
    from fedloom.config import overrides
    from fedloom.config.layers import merge

    named: dict[str, Any] = {}
    if method is not None:
        named["method"] = {"name": method}
    if seed is not None:
        named["seed"] = seed
    if root is not None:
        named["data"] = {"root": root}
    engine_layer = {
        "name": engine,
        "device": device,
        "workers": int(workers) if workers and re.fullmatch(r"-?[0-9]{1,18}", workers) else workers,
    }
    if given := {key: value for key, value in engine_layer.items() if value is not None}:
        named["engine"] = given
    return merge(named, overrides(sets or []))


def print_json(value: Any) -> None:
    """One JSON object on stdout, and nothing else there."""
    say(json.dumps(value, allow_nan=False))


def _keep_traceback() -> Path:
    path = Path(tempfile.mkdtemp(prefix="fedloom-")) / "log.txt"
    path.write_text(traceback.format_exc(), encoding="utf-8")
    return path
