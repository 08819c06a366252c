"""A real federation on this machine: one SuperLink with TLS and node authentication, and its SuperNodes."""

from __future__ import annotations

import re
import shutil
import socket
import ssl
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from fedloom.core import ConfigError, RunError
from fedloom.engine.flower import standin
from fedloom.engine.flower.compat import require
from fedloom.engine.flower.control import Control
from fedloom.engine.flower.processes import (
    TAKEN,
    Kept,
    Ports,
    Value,
    cause,
    environment,
    free_ports,
    link_command,
    node_command,
    opened,
    scripts,
    toml,
    write_stand_ins,
)

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
LINK, WARM, COMMAND_LINE = "superlink", "warm", "flwr"
APPS = ("flwr-clientapp", "flwr-serverapp")
TRIES = 3  # to find ports that nobody takes first
HEARTBEATS = 90.0  # seconds; a SuperLink misses a killed SuperNode after two heartbeats of 30
NOTICE = 4.0  # seconds; a waiting ServerApp looks for replies every 3


@dataclass(frozen=True)
class NodeSpec:
    """One SuperNode. name: for messages and files. key: private EC key in OpenSSH format, with `.pub` beside it.

    config: its node config. env: more environment variables for it and its apps.
    """

    name: str
    key: Path
    config: Mapping[str, Value]
    env: Mapping[str, str] = field(default_factory=dict)


class Federation:
    """A SuperLink and its SuperNodes as processes. Use as a context manager; it leaves none of them behind.

    home: a folder for their state, and for their output in `superlink.log` and `NAME.log`. ca, certificate, key: the
    CA's certificate, and the server's certificate and key. note: told what happens, in lines for the user.
    preload: modules that one warm process imports for all apps, so that a message costs a fork and not a start of
    Python and torch; None starts Flower's own processes. patience: seconds that starting may take.

    Raises `ConfigError` for what cannot be started, `RunError` naming the process, the cause and its log for what
    does not come up.
    """

    def __init__(
        self,
        home: Path,
        *,
        ca: Path,
        certificate: Path,
        key: Path,
        nodes: Sequence[NodeSpec],
        note: Callable[[str], None],
        address: str = "127.0.0.1",
        preload: Sequence[str] | None = ("torch",),
        patience: float = 120.0,
    ):
        self.home, self.nodes, self.address = Path(home).absolute(), tuple(nodes), address
        self._ca, self._certificate, self._key = (Path(path).absolute() for path in (ca, certificate, key))
        self._note, self._patience = note, patience
        self._preload = preload if sys.platform.startswith("linux") else None
        self._link: Kept | None = None
        self._warm: Kept | None = None
        self._running: list[Kept | None] = [None for _ in self.nodes]
        self._control: Control | None = None
        self._ports: Ports | None = None
        self._killed: set[str] = set()
        self._run_folder = ""
        self._check()

    def __enter__(self) -> Federation:
        try:
            self._open()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        """End the nodes, then the SuperLink; whoever does not end in time is killed."""
        try:
            for batch in (self._running, [self._link], [self._warm]):
                for process in filter(None, batch):
                    process.ask()
                for process in filter(None, batch):
                    process.wait()
        finally:
            shutil.rmtree(self._run_folder, ignore_errors=True)

    def submit(self, app: Path, config: Mapping[str, Value]) -> int:
        """Start a run of a Flower app and return its id. config: replaces values of the app's run config.

        Raises `ConfigError` with Flower's reason when the app or the config is refused.
        """
        return self._command_line().submit(Path(app).absolute(), config)

    def status(self, run_id: int) -> str:
        """`pending`, `starting`, `running`, or `finished:` and `completed`, `failed` or `stopped`."""
        return str(self._command_line().run(run_id)["status"])

    def details(self, run_id: int) -> str:
        """What the SuperLink says of a run's end; empty when it says nothing."""
        told = str(self._command_line().run(run_id).get("status-details", ""))
        return "" if told == "N/A" else told

    def log(self, run_id: int) -> str:
        """What the ServerApp has written."""
        return self._command_line().log(run_id)

    def stop_run(self, run_id: int) -> None:
        """Stop a run."""
        self._command_line().stop(run_id)

    def ended(self) -> dict[str, str]:
        """The processes that have ended by themselves, with the cause."""
        found = (process for process in (self._link, *self._running) if process is not None)
        return {one.name: one.cause() for one in found if one.code is not None and one.name not in self._killed}

    def kill_node(self, k: int) -> None:
        """Kill a SuperNode and all processes of its apps, and return when they are gone."""
        self._kill(self._running[k])

    def start_node(self, k: int) -> None:
        """Start a SuperNode again, with the same key and so the same node id, and return when it is online.

        A SuperLink lets a key in again only when it has missed the killed node, which takes up to a minute.
        """
        process = self._running[k]
        if process is not None:
            if process.code is None:
                raise RunError(f"{process.name} is running already")
            process.wait()
        self._await_offline(k)
        self._launch(k)
        self._await([k])

    def kill_link(self) -> None:
        """Kill the SuperLink and its ServerApps, and return when they are gone; the nodes keep trying to reach it."""
        self._kill(self._link)

    def start_link(self) -> None:
        """Start the SuperLink, with its ports and state if it has run before, and return when it answers.

        Nodes that have lost it come back within 20 seconds.
        """
        if self._link is not None:
            if self._link.code is None:
                raise RunError(f"{LINK} is running already")
            self._link.wait()
        for left in reversed(range(TRIES)):
            ports = self._ports or Ports.free(self._version, self.address)
            self._link = self._start_link(ports)
            if self._answers(self._link, ports):
                self._ports = ports
                return
            self._link.kill()
            if not left or self._link.cause() != TAKEN:
                raise _failed(self._link)
            time.sleep(1.0 if self._ports else 0.0)

    def _check(self) -> None:
        names = [node.name for node in self.nodes]
        for name in names:
            if not NAME.fullmatch(name) or name in (LINK, WARM, COMMAND_LINE) or names.count(name) > 1:
                raise ConfigError(f"node name {name!r} is taken or unfit for a file; use letters, digits, - and _")
        files = {"ca": self._ca, "certificate": self._certificate, "key": self._key}
        for node in self.nodes:
            toml(node.config, f"node config of {node.name}:")
            files |= {f"key of {node.name}": node.key, f"public key of {node.name}": _public(node.key)}
        for what, path in files.items():
            if not Path(path).is_file():
                raise ConfigError(f"{what} is {path}, which is no file; make one with `fedloom deploy certs`")
        try:
            self._trust = ssl.create_default_context(cafile=str(self._ca))
            pair = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            pair.load_cert_chain(self._certificate, self._key, password=lambda: "")
        except OSError as error:
            which = f"ca {self._ca}, certificate {self._certificate} and key {self._key}"
            why = error.reason if isinstance(error, ssl.SSLError) else error.strerror
            raise ConfigError(f"{which} do not belong together, or one cannot be read ({why})") from error

    def _open(self) -> None:
        self._version = require()
        if sys.platform == "win32":
            raise ConfigError("a federation on this machine needs Linux or macOS")
        self._scripts = scripts()
        try:
            (self.home / LINK).mkdir(parents=True, exist_ok=True)
            for left in self.home.glob("state.db*"):
                left.unlink()
        except OSError as error:
            raise ConfigError(f"home is {self.home}, which cannot be written: {error.strerror}") from error
        self._run_folder = tempfile.mkdtemp(prefix="fedloom-")  # a socket's path must be short
        self._path, self._socket = [self._scripts], ""
        if self._preload is not None:
            self._start_warm(self._preload)
        self.start_link()
        assert self._ports is not None
        self._note(f"SuperLink on {self.address}:{self._ports.fleet}")
        address = f"{self.address}:{self._ports.control}"
        folder = self.home / COMMAND_LINE
        variables = environment(folder, [self._scripts], self.address, {})
        self._control = Control(folder, address, self._ca, self._scripts / COMMAND_LINE, variables, self._socket)
        with ThreadPoolExecutor(2) as pool:
            keys = [_public(node.key) for node in self.nodes]
            self._ids = list(pool.map(self._control.register, keys))
        for k in range(len(self.nodes)):
            self._launch(k)
        self._await(range(len(self.nodes)))

    def _start_warm(self, preload: Sequence[str]) -> None:
        folder, self._socket = self.home / WARM, f"{self._run_folder}/socket"
        write_stand_ins(folder, self._socket, self._scripts, APPS)
        self._path = [folder, self._scripts]
        served = ",".join((COMMAND_LINE, *APPS))
        command = [sys.executable, "-P", "-m", "fedloom.engine.flower.warm", self._socket, served, ",".join(preload)]
        variables = environment(folder, [self._scripts], self.address, {})
        self._warm = Kept(WARM, command, variables, folder, self.home / f"{WARM}.log")

    def _start_link(self, ports: Ports) -> Kept:
        arguments = link_command(
            self._version,
            self.address,
            ports,
            ca=self._ca,
            certificate=self._certificate,
            key=self._key,
            database=self.home / "state.db",
        )
        self._killed.discard(LINK)
        folder = self.home / LINK
        variables = environment(folder, self._path, self.address, {})
        command = [str(self._scripts / "flower-superlink"), *arguments]
        return Kept(LINK, command, variables, folder, self.home / f"{LINK}.log")

    def _answers(self, link: Kept, ports: Ports) -> bool:
        """Whether a SuperLink comes up, or ends; `RunError` when it stays mute or cannot be trusted."""
        deadline = time.monotonic() + self._patience
        todo, apart = {ports.fleet, ports.control}, (1, 35) <= self._version < (1, 37)
        while (todo or (apart and not opened(link.said(), ports.runtime))) and link.code is None:
            if time.monotonic() > deadline:
                raise RunError(f"{LINK} does not answer after {self._patience:g} s; its log is {link.log}")
            try:
                for port in sorted(todo):
                    with socket.create_connection((self.address, port), 5.0) as line:
                        self._trust.wrap_socket(line, server_hostname=self.address).close()
                    todo.discard(port)
                time.sleep(0.05 if apart else 0.0)
            except ssl.SSLCertVerificationError as error:
                raise RunError(f"{self._certificate}: {cause(str(error), None)}") from error
            except OSError:
                time.sleep(0.05)
        return link.code is None

    def _launch(self, k: int) -> None:
        node = self.nodes[k]
        assert self._ports is not None
        folder = self.home / node.name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "node.toml").write_text(toml(node.config, "node config"), encoding="utf-8")
        arguments = node_command(
            self._version,
            self.address,
            free_ports(self.address, 1)[0],
            self._ports.fleet,
            ca=self._ca,
            key=Path(node.key).absolute(),
            config=folder / "node.toml",
        )
        self._killed.discard(node.name)
        variables = environment(folder, self._path, self.address, node.env)
        command = [str(self._scripts / "flower-supernode"), *arguments]
        self._running[k] = Kept(node.name, command, variables, folder, self.home / f"{node.name}.log")

    def _await(self, which: Iterable[int]) -> None:
        """Return when these nodes are online; `RunError` when one ends or the patience does."""
        begin, listed, waiting = time.monotonic(), 0.0, set(which)
        tries: dict[int, int] = {}
        online: dict[int, str] = {}
        while waiting:
            self._link_alive()
            waited = time.monotonic() - begin
            if waited - listed > 10.0:  # its log is quicker, and another version may word it otherwise
                online, listed = self._command_line().nodes(), waited
            for k in sorted(waiting):
                process = self._running[k]
                assert process is not None
                if "SuperNode ID" in process.said() or online.get(self._ids[k]) == "online":
                    waiting.discard(k)
                    self._note(f"{process.name} is online")
                elif process.broken():
                    process.kill()
                    tries[k] = tries.get(k, 1) + 1
                    if process.cause() != TAKEN or tries[k] > TRIES:
                        raise _failed(process)
                    self._launch(k)
                elif waited > self._patience:
                    raise RunError(f"{process.name} is not online after {waited:.0f} s; its log is {process.log}")
            time.sleep(0.1)

    def _await_offline(self, k: int) -> None:
        deadline = time.monotonic() + HEARTBEATS
        if self._command_line().nodes().get(self._ids[k]) != "online":
            return
        while self._command_line().nodes().get(self._ids[k]) == "online":
            if time.monotonic() > deadline:
                raise RunError(f"{self.nodes[k].name} is dead, but the SuperLink still takes it for online")
            time.sleep(2.0)
        # Only while it is offline does a ServerApp that waits for its reply learn that none will come.
        time.sleep(NOTICE)

    def _kill(self, process: Kept | None) -> None:
        if process is not None and process.code is None:
            self._killed.add(process.name)
            process.kill()
            if self._socket:
                standin.settle(self._socket)

    def _command_line(self) -> Control:
        self._link_alive()
        assert self._control is not None
        return self._control

    def _link_alive(self) -> None:
        if self._link is None or self._link.code is not None:
            why = "" if self._link is None or LINK in self._killed else f": {self._link.cause()}"
            raise RunError(f"the SuperLink is not running{why}; its log is {self.home / f'{LINK}.log'}")


def _public(key: Path) -> Path:
    return Path(f"{key}.pub").absolute()


def _failed(process: Kept) -> RunError:
    return RunError(f"{process.name} ended while starting: {process.cause()}; its log is {process.log}")
