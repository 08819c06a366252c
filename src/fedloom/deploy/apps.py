"""The two apps behind the shims of an app folder: the server's run, and a node's clients."""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedloom.build import Built, build
from fedloom.config import read_yaml, resolve
from fedloom.config.words import shown
from fedloom.core.errors import CheckpointError, ConfigError, FedloomError, RunError, unknown
from fedloom.deploy.flatten import Deployment, flatten, read_run_config
from fedloom.engine.flower.compat import require
from fedloom.engine.flower.hosting import parse_clients

if TYPE_CHECKING:
    from flwr.app import Context
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp

    from fedloom.engine.experiment import Experiment, Observer, Options
    from fedloom.engine.flower.node import Node
    from fedloom.engine.folder import RunFolder

NODE_CONFIG = ("clients", "data-root", "state-root", "device", "name")
OF_FLOWER = ("partition-id", "num-partitions")  # what Flower itself puts into a node's configuration


def server_app() -> ServerApp:
    """The app that runs the federation on the SuperLink's machine."""
    require()
    from flwr.serverapp import ServerApp

    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        failure = ""
        try:
            serve(grid, context.run_config)
        except FedloomError as error:
            failure = str(error)
        if failure:  # raised here, so that Flower's traceback is short
            raise RunFailed(failure)

    return app


def client_app() -> ClientApp:
    """The app that runs the clients of a node."""
    require()
    from fedloom.engine.flower.client import client_app as answering

    return answering(Hosts())


def serve(grid: Grid, flat: Mapping[str, Any]) -> Path:
    """Carry out or continue a run over a grid and return its folder.

    Raises `FedloomError`, after the sentence was printed and recorded, so that Flower calls the run failed.
    """
    from fedloom.api import checked_path, new_folder
    from fedloom.deploy.events import Recorder
    from fedloom.progress import Lines
    from fedloom.terminal import say

    events = flat.get("run.events")
    recorder = Recorder(Path(str(events))) if events else None
    observers: list[Observer] = [Lines(), *([recorder] if recorder is not None else [])]
    out: Path | None = None
    failure: FedloomError | None = None
    try:
        config, deployment = read_run_config(flat)
        out = checked_path("run.out", deployment.out) if deployment.out else new_folder(deployment.name)
        out = out.expanduser().absolute()
        say(f"folder: {out}", err=True)
        return _run(grid, build(config), deployment, out, observers)
    except BaseException as error:
        failure = error if isinstance(error, FedloomError) else RunError(f"{type(error).__name__}: {error}")
        say(f"error: {failure}", err=True)
        raise
    finally:
        if recorder is not None:
            recorder.ended(out, failure)


def _run(grid: Grid, built: Built, deployment: Deployment, out: Path, observers: Sequence[Observer]) -> Path:
    from fedloom.lifecycle import begin, go_on

    carry = functools.partial(_carry, grid)
    if not deployment.resume:
        return begin(built, out, observers, carry)[0]
    if not deployment.out:
        raise ConfigError("run.resume is true, but run.out is empty; name the folder of the run to continue")
    if (out / "DONE").exists():
        raise ConfigError(f"run.resume is true, but the run in {out} is done; nothing is left to continue")
    _check_config(built, out)
    return go_on(out, lambda folder: built, observers, carry)[0]


def _check_config(built: Built, out: Path) -> None:
    """Nodes learn the configuration from Flower, so it must be the one that the run began with."""
    if not (out / "config.yaml").is_file():
        raise CheckpointError(f"run.resume is true, but {out} is no run folder: it has no config.yaml")
    began, now = flatten(read_yaml(out / "config.yaml")), flatten(built.config.as_dict())
    free = {"data.root", "engine.name", "engine.runtime", "engine.workers", "engine.join"}
    for key in sorted((began.keys() | now.keys()) - free):
        if began.get(key) != now.get(key):
            raise CheckpointError(
                f"{key} was {shown(began.get(key))} when the run in {out} began, and is {shown(now.get(key))} now; "
                "give the same keys after -c as at first"
            )


def _carry(
    grid: Grid,
    experiment: Experiment,
    options: Options,
    folder: RunFolder,
    observers: Sequence[Observer],
    card: Mapping[str, Any],
) -> dict[str, Any]:
    from fedloom.engine.flower.server import hire
    from fedloom.engine.loop import run

    return run(experiment, options, folder, observers, functools.partial(hire, grid, card))


class RunFailed(Exception):
    """Tells Flower that a run has failed; the sentence has been said."""


class Hosts:
    """Finds the node of a context; a process that serves many messages makes it once."""

    def __init__(self) -> None:
        self._key: Any = None
        self._node: Node | None = None

    def __call__(self, context: Context) -> Node:
        """The node; `ConfigError` for a `--node-config` that names no clients or what does not exist."""
        key = (tuple(context.run_config.items()), tuple(context.node_config.items()))
        if self._node is None or key != self._key:
            self._node, self._key = node_of(context.run_config, context.node_config), key
        return self._node


def node_of(flat: Mapping[str, Any], given: Mapping[str, Any]) -> Node:
    """The node that a run config and a node config describe.

    given: `clients` (as in "0-4,7"), and optionally `data-root`, `state-root` (where client states lie; else below
    `FEDLOOM_STATE` or `~/.local/share/fedloom`), `device` and `name`.
    """
    from fedloom.engine.flower.node import Node

    for key in given:
        if key not in (*NODE_CONFIG, *OF_FLOWER):
            raise ConfigError(f"--node-config: {unknown('key', str(key), NODE_CONFIG)}")
    for key in ("data-root", "state-root", "device", "name"):
        if key in given and not (isinstance(given[key], str) and str(given[key]).strip()):
            raise ConfigError(f"--node-config: {key} must be a text in double quotes, got {shown(given[key])}")
    config, _ = read_run_config(flat)
    if "clients" not in given:
        raise ConfigError('--node-config names no clients; add clients="0-4", the logical clients of this node')
    clients = str(given["clients"])
    hosted = parse_clients(clients, config.partition.clients)
    layer: dict[str, Any] = {}
    if "data-root" in given:
        layer["data"] = {"root": str(Path(str(given["data-root"])).expanduser())}
    if "device" in given:
        layer["engine"] = {"device": str(given["device"])}
    name = str(given.get("name", f"{socket.gethostname()}, clients {clients}"))
    made = build(resolve(config.as_dict(), layer))
    return Node(made.experiment, _state_root(given.get("state-root")), hosted, name)


def _state_root(given: Any) -> Path:
    if given is not None:
        return Path(str(given)).expanduser().absolute()
    home = os.environ.get("FEDLOOM_STATE")
    return (Path(home) if home else Path.home() / ".local" / "share" / "fedloom").absolute() / "nodes"
