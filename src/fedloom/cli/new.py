"""`new method`: a method of one's own to begin with, and its test."""

from __future__ import annotations

import builtins
import importlib.util
import keyword
import os
import re
from pathlib import Path
from typing import Annotated

import typer

from fedloom.cli.application import Json, guarded, print_json
from fedloom.cli.usage import Command
from fedloom.terminal import say

SCAFFOLD = Path(__file__).parent / "scaffold"

new = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@new.callback()
def kinds() -> None:
    """Begin something of your own from a file that runs."""


@new.command("method", cls=Command)
@guarded
def method(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the file, its function and its module.")],
    out: Annotated[str, typer.Option("--out", "-o", metavar="DIR", help="Folder to write into.")] = ".",
    as_json: Json = False,
) -> None:
    """Write NAME.py, a method that runs, and test_NAME.py, its test that passes.

    The method is FedAvg with one more loss term and one option; change it into yours. Nothing is overwritten.
    """
    from fedloom.api import checked_path

    texts = {kind: (SCAFFOLD / f"{kind}.py.txt").read_text(encoding="utf-8") for kind in ("method", "test_method")}
    _check_name(name, texts["method"] + texts["test_method"])
    folder = checked_path("--out", out)
    paths = {"method": folder / f"{name}.py", "test_method": folder / f"test_{name}.py"}
    title = "".join(word.title() for word in name.split("_"))
    _write({path: _named(texts[kind], name, f"{title}Method") for kind, path in paths.items()})
    word = f"{name}:{name}"
    if as_json:
        print_json({"method": str(paths["method"]), "test": str(paths["test_method"]), "name": word})
        return
    say(f"method: {paths['method']}")
    say(f"test: {paths['test_method']}")
    where = "" if folder.resolve() == Path.cwd() else f"cd {folder}; "
    say(f"next: {where}python -m pytest test_{name}.py; fedloom run quickstart --method {word}")


def _check_name(name: str, text: str) -> None:
    """Raise `ConfigError` for a name that cannot be that of a file, its function and its module."""
    from fedloom.config.words import shown
    from fedloom.core.errors import ConfigError
    from fedloom.methods import names

    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name) or len(name) > 60:
        raise ConfigError(f"NAME must be a Python name in small letters, such as my_method; got {shown(name)}")
    if name in names():
        raise ConfigError(f"NAME is {name}, which is a method of FedLoom; name another, such as my_{name}")
    taken = name in (*dir(builtins), "conftest") or name.startswith("test_") or re.search(rf"\b{name}\b", text)
    if taken or _is_taken(name):
        raise ConfigError(f"NAME is {name}, which is taken in Python or in the file itself; name another")


def _is_taken(name: str) -> bool:
    """Whether a module that is installed has the name; a file of the working folder does not count."""
    found = importlib.util.find_spec(name)
    return found is not None and (found.origin is None or Path(found.origin).parent != Path.cwd())


def _named(text: str, name: str, kind: str) -> str:
    return re.sub(r"\bCLASS\b", kind, text.replace("NAME", name))


def _write(texts: dict[Path, str]) -> None:
    """Write new files, all or none. Raises `ConfigError` where one exists or cannot be written."""
    from fedloom.core.errors import ConfigError

    for path in texts:
        if os.path.lexists(path):
            raise ConfigError(f"'{path}' exists; name another method, or another folder with --out")
    begun: list[Path] = []
    try:
        for path, text in texts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "x", encoding="utf-8") as file:
                begun.append(path)
                file.write(text)
    except OSError as error:
        for path in begun:
            path.unlink()
        raise ConfigError(f"'{error.filename}' cannot be written: {error.strerror}; name another with --out") from error
