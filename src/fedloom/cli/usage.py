"""What is said about wrong usage: `--lr 0.1` gets its `--set`, and no framework speaks to the user."""

from __future__ import annotations

import difflib
import re
import typing
from collections.abc import Sequence
from typing import Any

from typer.core import TyperCommand
from typer.models import ArgumentInfo

from fedloom.cli.examples import shown

OTHER_WORDS = {
    "dataset": "data.name",
    "optim": "training.optimizer.name",
    "learning_rate": "training.optimizer.lr",
    "epochs": "training.local_epochs",
    "batch": "training.batch_size",
    "num_rounds": "training.rounds",
    "num_clients": "partition.clients",
    "clients_per_round": "training.cohort",
    "num_tasks": "stream.tasks",
    "gpu": "engine.device",
}


def examples(ctx: Any, formatter: Any) -> None:
    """Write the examples of the command of a context at the end of its help."""
    words: list[str] = []
    while ctx.parent is not None:
        words.insert(0, ctx.info_name)
        ctx = ctx.parent
    if text := shown(" ".join(words)):
        formatter.write(f"\n{text}\n")


class Command(TyperCommand):
    """A command that words refusals of its arguments itself, and whose help ends with examples."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Arguments and options, without two slips of typer beside a newer click.

        The help of arguments is lost between the two, and brackets are escaped for a markup that is not used.
        """
        told = _told(self.callback)
        for param in self.params:
            param.help = getattr(param, "help", None) or told.get(param.name)  # type: ignore[attr-defined]
        before = len(formatter.buffer)
        super().format_options(ctx, formatter)
        formatter.buffer[before:] = [text.replace("\\[", "[") for text in formatter.buffer[before:]]

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """The examples."""
        examples(ctx, formatter)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse; an unknown option and a value of the wrong kind get a sentence with a mend."""
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            # By name: typer carries a click of its own from some version on.
            if type(error).__name__ == "NoSuchOption":
                options = [name for param in self.params for name in param.opts if name.startswith("--")]
                error.message, error.possibilities = self.stray(error.option_name, given, options), None  # type: ignore
            elif hasattr(error, "message"):
                error.message = plain(str(error.message))
            raise

    def stray(self, option: str, given: Sequence[str], options: Sequence[str]) -> str:
        """The sentence about an option that the command does not have."""
        near = difflib.get_close_matches(option, options, n=1, cutoff=0.75)
        return f"no such option: {option}." + (f" Did you mean {near[0]}?" if near else "")


class Settable(Command):
    """A command with `--set`: an unknown option is answered with the key that was probably meant."""

    def stray(self, option: str, given: Sequence[str], options: Sequence[str]) -> str:
        """The `--set` to use instead, or else the closest option."""
        key = meant(option.lstrip("-").replace("-", "_"))
        if key is not None:
            return f"no such option: {option}; use --set {key}={_value(option, given)}"
        text = super().stray(option, given, options)
        return text if "mean" in text else f"{text} Keys of the configuration are set with --set KEY=VALUE."


def _told(command: Any) -> dict[str | None, str | None]:
    """Argument -> its help, as the signature of a command says it."""
    hints = typing.get_type_hints(command, include_extras=True)
    marks = {name: getattr(hint, "__metadata__", ()) for name, hint in hints.items()}
    return {name: mark.help for name, found in marks.items() for mark in found if isinstance(mark, ArgumentInfo)}


def plain(message: str) -> str:
    """Typer's message without the words of the library that checked the value, whichever that was."""
    message = message.replace("Value error, ", "")
    kinds = {"integer": "a whole number", "number": "a number", "float": "a number", "boolean": "true or false"}
    message = re.sub(
        r"('.*') is not a valid (\w+)\.?$",
        lambda found: f"must be {kinds.get(found[2], found[2])}, got {found[1]}",
        message,
    )
    return re.sub(
        r"Input should be a valid (\w+)(, unable to parse string as an? \w+)?",
        lambda found: f"must be {kinds.get(found[1], found[1])}",
        message,
    ).replace("Input should be", "must be")


def meant(word: str) -> str | None:
    """The dotted key of the configuration that a word stands for, the shortest where there are several."""
    from fedloom.config.options import schema
    from fedloom.config.sections import NAMED, Config
    from fedloom.config.words import keys
    from fedloom.methods import names

    sections = {path[-1]: ".".join((*path, key)) for path, key in NAMED.items()}
    if found := OTHER_WORDS.get(word) or sections.get(word):
        return found
    known = [key for key in keys(Config) if key == word or key.endswith(f".{word}")]
    if known:
        return min(known, key=len)
    if any(word in schema(name).model_fields for name in names()):
        return f"method.{word}"
    return None


def _value(option: str, args: Sequence[str]) -> str:
    for k, given in enumerate(args):
        if given.startswith(f"{option}="):
            return given.partition("=")[2]
        if given == option and k + 1 < len(args) and not args[k + 1].startswith("--"):
            return args[k + 1]
    return "VALUE"
