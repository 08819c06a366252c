"""`deploy`: an app folder for a Flower federation, certificates, and a whole federation on this machine."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from click.shell_completion import CompletionItem
from typer.core import TyperGroup

from fedloom.cli.application import (
    Json,
    Method,
    Quiet,
    Recipe,
    Root,
    Seed,
    Set,
    Verbose,
    guarded,
    layers,
    print_json,
)
from fedloom.cli.completion import recipes
from fedloom.cli.usage import Command, Settable, examples
from fedloom.terminal import say

RECIPE = "recipe"  # the command behind `fedloom deploy RECIPE`; hidden, for it has no word of its own


class Deploy(TyperGroup):
    """A group whose first word may be a recipe: what is no command of the group is an argument of `RECIPE`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the hidden command in front, unless a command or help is asked for."""
        visible = {name for name, command in self.commands.items() if not command.hidden}
        if args and args[0] not in (*visible, *ctx.help_option_names):
            args = [RECIPE, *args]
        return super().parse_args(ctx, args)

    def format_usage(self, ctx: Any, formatter: Any) -> None:
        """Both ways to call it."""
        formatter.write_usage(ctx.command_path, "[OPTIONS] RECIPE|FILE")
        formatter.write_usage(ctx.command_path, "COMMAND [ARGS]...")

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """The options of the hidden command, then the commands of the group."""
        self.commands[RECIPE].format_options(ctx, formatter)
        self.format_commands(ctx, formatter)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """The examples of the hidden command."""
        examples(ctx, formatter)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """The commands of the group, and the recipes that the hidden one takes."""
        found = super().shell_complete(ctx, incomplete)
        return [*found, *(CompletionItem(name) for name in recipes(incomplete))]


class Unnamed(Settable):
    """A command that is called, and spoken of, by the name of its group."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """The context in the place of the group's own."""
        return super().make_context(parent.info_name, args, parent=parent.parent, **extra)

    def stray(self, option: str, given: Sequence[str], options: Sequence[str]) -> str:
        """As of `run`, whose data root has another home here."""
        if option == "--data-root":
            return f"no such option: {option}; nodes name their data themselves, as the README of the app says."
        return super().stray(option, given, options)


deploy = typer.Typer(cls=Deploy, no_args_is_help=True, rich_markup_mode=None)


@deploy.command(RECIPE, cls=Unnamed, hidden=True)
@guarded
def write(
    recipe: Recipe,
    out: Annotated[
        str | None, typer.Option("--out", "-o", metavar="APP", help="Folder to write; RECIPE-app by default.")
    ] = None,
    method: Method = None,
    sets: Set = None,
    seed: Seed = None,
    as_json: Json = False,
) -> None:
    """Write a Flower app folder that runs a recipe on a deployed federation.

    Its README has every command, from the certificates to the report. Where the data lie is told to the nodes, not to
    the app.
    """
    from fedloom.api import checked_path
    from fedloom.build import method as made
    from fedloom.config import resolve, resolve_source
    from fedloom.deploy.folder import app_name, write_app

    source, base = resolve_source(recipe)
    config = resolve(base, layers(sets=sets, method=method, seed=seed))
    made(config)  # refuses options that do not go together
    name = app_name(source)
    project = name.replace("_", "-")
    folder = write_app(config, checked_path("--out", out if out is not None else f"{project}-app"), name=name)
    clients = config.partition.clients
    if as_json:
        print_json({"app": str(folder), "name": project, "clients": clients, "readme": str(folder / "README.md")})
        return
    if config.data.root is not None:
        say(
            f"note: data.root is left out of the app; every node names its own, as {folder / 'README.md'} says",
            err=True,
        )
    say(f"app: {folder}")
    say(f"next: follow {folder / 'README.md'}, from `fedloom deploy certs` to `flwr run {shlex.quote(str(folder))}`")


@deploy.command("certs", cls=Command)
@guarded
def certs(
    out: Annotated[str, typer.Option("--out", "-o", metavar="DIR", help="Folder to write; it must not exist yet.")],
    hosts: Annotated[
        list[str] | None,
        typer.Option("--host", metavar="H", help="Name or address of the SuperLink's machine; repeat it for several."),
    ] = None,
    nodes: Annotated[int, typer.Option("--nodes", metavar="N", help="How many nodes get a key pair.")] = 2,
    days: Annotated[int, typer.Option("--days", metavar="D", help="How long the certificates are valid.")] = 365,
    as_json: Json = False,
) -> None:
    """Make an authority, a server certificate and node keys for a test federation.

    The certificate is always valid for localhost and 127.0.0.1 too. Private keys are readable by you alone.
    """
    from fedloom.api import checked_path
    from fedloom.deploy.certs import LOOPBACK, make_certificates

    made = make_certificates(checked_path("--out", out), hosts=hosts or LOOPBACK, nodes=nodes, days=days)
    if as_json:
        keys = [str(key) for key in made.node_keys]
        print_json({**{key: str(path) for key, path in made._asdict().items()}, "node_keys": keys, "days": days})
        return
    for what, path in (("authority", made.ca), ("certificate", made.certificate), ("key", made.key)):
        say(f"{what}: {path}")
    for key in made.node_keys:
        say(f"node key: {key}, public half {key.name}.pub")
    register = shlex.join(["flwr", "supernode", "register", f"{made.node_keys[0]}.pub", "fedloom"])
    say(f"next: keep {made.ca_key} to yourself, give each node its key and {made.ca.name}, and let it in: `{register}`")


@deploy.command("local-demo", cls=Settable)
@guarded
def local_demo(
    recipe: Recipe = "quickstart",
    method: Method = None,
    sets: Set = None,
    seed: Seed = None,
    data_root: Root = None,
    nodes: Annotated[int, typer.Option("--nodes", min=1, metavar="N", help="How many SuperNodes to start.")] = 2,
    out: Annotated[str | None, typer.Option("--out", "-o", metavar="DIR", help="Run folder.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Run a recipe on a whole federation on this machine, with TLS and node authentication; then stop it all.

    One SuperLink, N SuperNodes, certificates and keys for this run alone. The exit code is that of the run.
    """
    from fedloom.api import load_run
    from fedloom.cli.train import show, watched
    from fedloom.deploy.demo import run_demo

    layer = layers(sets=sets, method=method, seed=seed, root=data_root)
    folder = watched(
        lambda observers: run_demo(recipe, layer, nodes=nodes, out=out, resume=resume, observers=observers),
        quiet or as_json,
        verbose,
    )
    show(load_run(folder), as_json)
