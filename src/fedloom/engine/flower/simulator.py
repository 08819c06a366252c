"""Main function of the process in which Flower's simulation runs: starts Ray, and hands its grid to the run's loop.

Started as `python -m fedloom.engine.flower.simulator FOLDER`. It ends when its parent ends, however that happened,
and Ray's processes with it. Whatever Flower, Ray and the clients print goes to stderr.
"""

from __future__ import annotations

import functools
import os
import pickle
import queue
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, BinaryIO

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedloom.core import Net
from fedloom.engine.experiment import Experiment
from fedloom.engine.flower.client import client_app
from fedloom.engine.flower.hosting import parse_clients
from fedloom.engine.flower.node import Node
from fedloom.engine.serial import receive, send

STORE = 2**30  # bytes of shared memory for messages on their way; more of them goes to disk
ENDING = threading.Lock()


def main(temporary: Path) -> None:
    """Serve the parent over stdin and stdout until it closes them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    inward, outward = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    code = 1
    try:
        settings = receive(inward)
        try:
            grid = _start(temporary, settings)
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            send(outward, f"{type(error).__name__}: {error}")
        else:
            send(outward, "")
            _serve(grid, inward, outward)
    except (EOFError, BrokenPipeError):
        code = 0
    finally:
        _end(temporary, code)


def _start(temporary: Path, settings: Mapping[str, Any]) -> Grid:
    """Ray, and Flower's simulation on it; its grid."""
    import ray

    ray.init(
        address="local",
        num_cpus=settings["actors"],
        num_gpus=0,
        include_dashboard=False,
        object_store_memory=STORE,
        log_to_driver=False,
        _temp_dir=str(temporary),
    )
    handed: queue.Queue[Any] = queue.Queue()
    app = client_app(
        functools.partial(node_of, str(temporary / "recipe"), settings["root"], settings["log"], settings["blocks"])
    )
    arguments = (temporary, app, len(settings["blocks"]), handed)
    threading.Thread(target=_simulate, args=arguments, name="fedloom-simulation", daemon=True).start()
    found = handed.get()
    if isinstance(found, BaseException):
        raise found
    return found


def _simulate(temporary: Path, app: ClientApp, nodes: int, handed: queue.Queue[Any]) -> None:
    """Run the simulation for as long as this process lives; one that ends before takes this process with it."""
    begun = threading.Event()
    server = ServerApp()

    @server.main()
    def serve(grid: Grid, context: Context) -> None:
        handed.put(grid)
        begun.set()
        threading.Event().wait()

    # A process that dies is started again, and its message given to it once more; the next one waits for it.
    resources = {"num_cpus": 1, "num_gpus": 0.0, "max_restarts": -1, "max_task_retries": 1}
    try:
        from flwr.simulation import run_simulation

        run_simulation(server, app, nodes, backend_config={"init_args": {}, "client_resources": resources})
        raise RuntimeError("the simulation ended by itself")
    except BaseException as error:
        traceback.print_exc()
        if begun.is_set():
            _end(temporary, 1)
        handed.put(error)


def _serve(grid: Grid, inward: BinaryIO, outward: BinaryIO) -> None:
    """Answer the parent's questions to the grid."""
    while True:
        what, arguments = receive(inward)
        try:
            if what == "push_messages":
                arguments = ([Message(content, node, kind) for content, node, kind in arguments[0]],)
            answer = False, list(getattr(grid, what)(*arguments))
        except Exception as error:
            traceback.print_exc()
            answer = True, f"{type(error).__name__}: {error}"
        send(outward, answer)


def _end(temporary: Path, code: int) -> None:
    """End this process, and Ray's at once: asked to end, some take a minute, and Flower's threads trip over it."""
    with ENDING:
        shutil.rmtree(temporary, ignore_errors=True)
        sys.stderr.flush()
        if os.name == "posix" and os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        import ray

        ray.shutdown()
        os._exit(code)


def node_of(recipe: str, root: str, log: str, blocks: Sequence[str], context: Context) -> Node:
    """The node of a context, in one of Ray's processes; any of them may be given any node's messages."""
    k = int(context.node_config["partition-id"])
    return _node(recipe, root, log, f"node {k} (clients {blocks[k]})", blocks[k])


@functools.cache
def _node(recipe: str, root: str, log: str, name: str, clients: str) -> Node:
    experiment = _experiment(recipe, log)
    return Node(experiment, Path(root), parse_clients(clients, experiment.plan.num_clients), name)


@functools.cache
def _experiment(recipe: str, log: str) -> Experiment:
    """The experiment of this process, whose words go to the log from now on."""
    with open(log, "ab") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    made = pickle.loads(Path(recipe).read_bytes())()
    return _OneNet(**{field.name: getattr(made, field.name) for field in fields(made)})


class _OneNet(Experiment):
    """An experiment whose nodes in this process take turns with one network."""

    def net(self) -> Net:
        """The network of this process."""
        return self._net

    @functools.cached_property
    def _net(self) -> Net:
        return super().net()


if __name__ == "__main__":
    # Under its own name: what Ray's processes share by name must not be a part of `__main__`.
    from fedloom.engine.flower import simulator

    simulator.main(Path(sys.argv[1]))
