"""`fedloom deploy local-demo`: a recipe on a whole federation on this machine."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedloom.core.errors import CheckpointError, ConfigError, FedloomError, Interrupted, RunError

if TYPE_CHECKING:
    from fedloom.deploy.events import Follower
    from fedloom.engine.experiment import Observer
    from fedloom.engine.flower.federation import Federation, NodeSpec

NAP = 0.1  # seconds between two looks at the run's progress
LOOK = 3.0  # seconds between two questions whether the run is still alive
PATIENCE = 120.0  # seconds that a run which was told to stop has for its checkpoint
PRELOAD = (  # what every app imports, once for all of them
    "torch",
    "fedloom.deploy.apps",
    "fedloom.data",
    "fedloom.models",
    "fedloom.local",
    "fedloom.engine.flower.client",
    "fedloom.engine.flower.server",
    "fedloom.engine.loop",
)


def run_demo(
    recipe: str,
    layer: Mapping[str, Any],
    *,
    nodes: int = 2,
    out: str | None = None,
    resume: bool = False,
    observers: Sequence[Observer] = (),
) -> Path:
    """Run a recipe on one SuperLink and some SuperNodes, with TLS and node authentication; the run's folder.

    layer: overrides of the configuration; `data.root` is given to every node. Everything that was started is ended
    before this returns or raises. Raises what the run raised: `ConfigError`, `RunError`, `Interrupted`, ...
    """
    from fedloom.api import checked_path, new_folder
    from fedloom.build import build
    from fedloom.config import resolve, resolve_source
    from fedloom.deploy.folder import app_name, deployed, write_app
    from fedloom.engine.flower.compat import require

    require()
    name, base = resolve_source(recipe)
    config = resolve(base, layer)
    deployed(config)
    build(config)  # refuses, before anything is started, what the server would refuse
    if resume and out is None:
        raise ConfigError("--resume continues the run in --out; name its folder")
    folder = (checked_path("--out", out) if out is not None else new_folder(name)).expanduser().absolute()
    _check_folder(folder, nodes, resume)
    home = Path(tempfile.mkdtemp(prefix="fedloom-"))
    # The federation's processes find the same modules as this one: a method beside the user, say.
    path, before = os.pathsep.join(entry or os.getcwd() for entry in sys.path), os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = path
    try:
        app = write_app(config, home / "app", name=app_name(name))
        settings = {"run.out": str(folder), "run.resume": resume, "run.events": str(home / "events.jsonl")}
        if config.data.root is not None:
            settings["data.root"] = str(Path(config.data.root).expanduser().absolute())
        return _supervise(home, config.partition.clients, nodes, folder, app, settings, observers)
    finally:
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before
        shutil.rmtree(home, ignore_errors=True)


def _check_folder(folder: Path, nodes: int, resume: bool) -> None:
    """Refuse a folder before anything is started that the run would refuse, or where nodes would miss their states."""
    from fedloom.config import read_yaml, resolve

    record = folder / "config.yaml"
    if not resume:
        if record.exists():
            raise ConfigError(f"out is {folder}, which holds a run; name another folder, or continue it with --resume")
        return
    if not record.is_file():
        raise CheckpointError(f"{folder} is not a run folder: it has no config.yaml")
    if (folder / "DONE").exists():
        raise ConfigError(f"--resume: the run in {folder} is done; nothing is left to continue")
    if resolve(read_yaml(record), {}).engine.runtime != "deployment":
        raise ConfigError(
            f"--resume: the run in {folder} has not begun on a deployed federation; "
            f"continue it with `fedloom resume {shlex.quote(str(folder))}`"
        )
    if (began := len(list((folder / "nodes").glob("*/home.json")))) not in (0, nodes):
        raise ConfigError(
            f"--nodes is {nodes}, but the run in {folder} has its clients' states on {began}; give --nodes {began}"
        )


def _supervise(
    home: Path,
    clients: int,
    nodes: int,
    folder: Path,
    app: Path,
    settings: Mapping[str, Any],
    observers: Sequence[Observer],
) -> Path:
    from fedloom.deploy.certs import make_certificates
    from fedloom.deploy.events import Follower
    from fedloom.engine.flower.federation import Federation

    certificates = make_certificates(home / "certs", nodes=nodes, days=30)
    specs = _specs(clients, certificates.node_keys, folder, settings.get("data.root"))

    def note(text: str) -> None:
        for observer in observers:
            observer.note(text)

    ca, certificate, key = certificates.ca, certificates.certificate, certificates.key
    follower = Follower(Path(settings["run.events"]), observers)
    try:
        with Federation(
            home, ca=ca, certificate=certificate, key=key, nodes=specs, note=note, preload=PRELOAD
        ) as federation:
            _follow(federation, federation.submit(app, settings), follower, Path(settings["run.events"]), note)
    except BaseException as error:
        _keep_logs(home, folder, error)
        if isinstance(error, RunError) and (folder / "config.yaml").is_file():
            raise RunError(f"{error}; continue with the same command, --out {folder} and --resume") from error
        raise
    if isinstance(follower.error, Interrupted):
        raise Interrupted(f"stopped by the user; continue with the same command, --out {folder} and --resume")
    if follower.error is not None:
        _keep_logs(home, folder, follower.error)
        raise follower.error
    return folder


def _specs(total: int, keys: Sequence[Path], folder: Path, root: str | None) -> list[NodeSpec]:
    from fedloom.engine.flower.federation import NodeSpec
    from fedloom.engine.flower.hosting import spread

    specs = []
    for k, (clients, key) in enumerate(zip(spread(total, len(keys)), keys, strict=True)):
        config = {"clients": clients, "state-root": str(folder / "nodes" / str(k)), "name": f"node {k}"}
        specs.append(NodeSpec(f"node-{k}", key, config | ({"data-root": root} if root is not None else {})))
    return specs


def _follow(federation: Federation, run: int, follower: Follower, events: Path, note: Callable[[str], None]) -> None:
    """Pass on the run's progress until it has ended; Ctrl-C asks it to stop, a second one does not wait."""
    looked, asked, told = time.monotonic(), None, set[str]()
    while True:
        try:
            came = follower.look()
            if follower.ended:
                return
            if asked is not None and time.monotonic() - asked > PATIENCE:
                raise Interrupted("stopped by the user; the run did not end in time")
            if time.monotonic() - looked > LOOK:
                looked = time.monotonic()
                for name, cause in federation.ended().items():
                    if name not in told:
                        told.add(name)
                        note(f"{name} has ended: {cause}")
                _check_alive(federation, run, follower)
            if not came:
                time.sleep(NAP)
        except KeyboardInterrupt:
            if asked is not None:
                raise
            asked = time.monotonic()
            events.with_name(f"{events.name}.stop").touch()


def _check_alive(federation: Federation, run: int, follower: Follower) -> None:
    status = federation.status(run)
    if not status.startswith("finished"):
        return
    follower.look()
    if not follower.ended:
        lines = federation.log(run).strip().splitlines()
        last = f"; the last that it wrote is '{lines[-1][:200]}'" if lines else ""
        raise RunError(
            f"the ServerApp has ended ({status}) without a word{last}; its log is {federation.home / 'superlink.log'}"
        )


def _keep_logs(home: Path, folder: Path, error: BaseException) -> None:
    """What Flower's processes wrote, beside the run that did not end well; an error that names a log names that copy.

    Without a run folder they are kept only for an error that names one.
    """
    logs = list(home.glob("*.log"))
    named = any(str(log) in str(error) for log in logs)
    with suppress(OSError):
        if folder.is_dir():
            kept = folder / "logs"
            kept.mkdir(exist_ok=True)
        elif named:
            kept = Path(tempfile.mkdtemp(prefix="fedloom-logs-"))
        else:
            return
        for log in logs:
            shutil.copyfile(log, kept / log.name)
        if named and isinstance(error, FedloomError):
            error.args = (str(error).replace(f"{home}{os.sep}", f"{kept}{os.sep}"),)
