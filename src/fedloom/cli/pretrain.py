"""`pretrain-clip`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from fedloom.cli.application import Json, Quiet, Recipe, Root, Seed, Set, guarded, layers, print_json
from fedloom.cli.usage import Command
from fedloom.terminal import say


class Pretraining(Command):
    """A command whose `--set` takes keys of recipes for pretraining."""

    def stray(self, option: str, given: Sequence[str], options: Sequence[str]) -> str:
        """The keys that end in the option's word, or else the closest option."""
        from fedloom.config.words import keys
        from fedloom.pretraining import recipe

        word = option.lstrip("-").replace("-", "_")
        found = [key for key in keys(recipe.Recipe) if key == word or key.endswith(f".{word}")]
        if found:
            return f"no such option: {option}; use {' or '.join(f'--set {key}=VALUE' for key in found)}"
        return super().stray(option, given, options)


@guarded
def pretrain_clip(
    recipe: Recipe,
    sets: Set = None,
    seed: Seed = None,
    data_root: Root = None,
    out: Annotated[
        str | None, typer.Option("--out", "-o", metavar="DIR", help="Folder to write; examples/RECIPE by default.")
    ] = None,
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")] = "auto",
    threads: Annotated[
        int | None, typer.Option("--threads", min=1, max=1024, metavar="N", help="Threads of the CPU; all by default.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Begin anew where the folder holds a model.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train a small CLIP on pictures and the words of their classes, and measure it zero-shot.

    The same command goes on where it was interrupted.
    """
    import torch

    from fedloom.api import checked_path
    from fedloom.pretraining import machine, run
    from fedloom.pretraining.recipe import resolve

    tree = resolve(recipe, layers(sets=sets, seed=seed, root=data_root))
    name = Path(recipe).stem
    folder = checked_path("--out", out if out is not None else f"examples/{name}")
    place = machine.device(device)
    if threads is not None:
        torch.set_num_threads(threads)
    silent = quiet or as_json
    told = run.pretrain(
        name, tree, folder, place=place, force=force, tell=lambda line: None if silent else say(line, err=True)
    )
    if as_json:
        print_json({**told, "folder": str(folder.absolute())})
        return
    for data, row in told["zeroshot"].items():
        say(
            f"{data}: zero-shot accuracy {row['one_template']:.2%} with one template, {row['templates']:.2%} with "
            f"{len(told['templates'])}, chance {row['chance']:.2%}"
        )
    say(f"folder: {folder}")
