"""The processes of a federation on this machine: their commands, ports and environment, and why they ended."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from importlib.metadata import distribution
from itertools import pairwise
from pathlib import Path

from fedloom.core import ConfigError
from fedloom.engine.flower import keeper, standin

Value = bool | int | float | str
GRACE = 6.0  # seconds for an orderly end
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
PRESET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",  # seconds; 1 is the default, once for every message
    "PYTHONUNBUFFERED": "1",
}
TAKEN = "a port that it needs is taken"
CAUSES = (  # what a log says, and what it means
    (r"certificate has expired", "the server's certificate has expired; make new ones with `fedloom deploy certs`"),
    (r"certificate is not yet valid", "the server's certificate is not valid yet; check the clock"),
    (r"(?i)(hostname|ip address) mismatch|not valid for", "the server's certificate was made for another address"),
    (r"(?i)CERTIFICATE_VERIFY_FAILED|handshake failed", "the server's certificate was not signed by the CA given"),
    (r"code: 2001\b", "SuperNode authentication is on, and its key is not registered"),
    (
        r"code: 2004\b|Failed to activate SuperNode|No SuperNode found with the given public key",
        "the SuperLink refuses its key: it is not registered, or a SuperNode with the same key is online",
    ),
    (r"Exit Code: 302|parse the private key", "its key is not a private EC key in OpenSSH format"),
    (r"(?i)address already in use|failed to bind|port in server address \S+ is already in use", TAKEN),
    (r"Exit Code: 105", "its database was written by another version of Flower"),
)


@dataclass(frozen=True)
class Ports:
    """Where a SuperLink listens. runtime: for its own apps; fleet: for SuperNodes; control: for the command line."""

    runtime: int
    fleet: int
    control: int

    @classmethod
    def free(cls, version: tuple[int, ...], address: str) -> Ports:
        """Free ports: Flower moved everything to one port by and by, up to 1.40."""
        runtime, fleet, control = free_ports(address, 3)
        return cls(runtime, runtime if version >= (1, 40) else fleet, runtime if version >= (1, 37) else control)


class Kept:
    """A running command with a log file; it ends when this process does, and all that it started ends with it."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], folder: Path, log: Path):
        self.name, self.log = name, log
        folder.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as out:
            self._begin = out.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", keeper.__file__, str(GRACE), *command],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                cwd=folder,
                start_new_session=True,
            )

    @property
    def code(self) -> int | None:
        """The exit code; None while it runs."""
        return self._process.poll()

    def said(self) -> str:
        """What it has written to its log since it was started."""
        with self.log.open("rb") as file:
            file.seek(self._begin)
            return COLOURS.sub("", file.read().decode(errors="replace"))

    def cause(self) -> str:
        """Why it ended, in words for a sentence."""
        return cause(self.said(), self.code)

    def broken(self) -> bool:
        """Whether it has ended, or fallen over while it was starting: some versions then stay as they are."""
        return self.code is not None or re.search(r"^Traceback|Exit Code: \d{3}", self.said(), re.MULTILINE) is not None

    def ask(self) -> None:
        """Ask for an orderly end; returns at once."""
        self._order(b"s")

    def wait(self) -> None:
        """Return when it and all that it started are gone; what is left after the grace is killed."""
        try:
            self._process.wait(GRACE + keeper.PATIENCE)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()

    def kill(self) -> None:
        """Kill it and all that it started, and return when they are gone."""
        self._order(b"k")
        self.wait()

    def _order(self, letter: bytes) -> None:
        assert self._process.stdin is not None
        with suppress(OSError, ValueError):  # it has ended already
            self._process.stdin.write(letter)
            self._process.stdin.flush()


def opened(said: str, port: int) -> bool:
    """Whether a SuperLink 1.35 or 1.36 says that its port without TLS is open, the last one that it opens."""
    return re.search(rf"Uvicorn running on \S*:{port}\b", said) is not None


def link_command(
    version: tuple[int, ...], address: str, ports: Ports, *, ca: Path, certificate: Path, key: Path, database: Path
) -> list[str]:
    """Arguments of `flower-superlink`, which has kept few of its flags over the versions."""
    where = ["--host", address, "--port", str(ports.runtime)]
    if version < (1, 35):
        where = ["--serverappio-api-address", f"{address}:{ports.runtime}"]
    if version < (1, 40):
        where += ["--fleet-api-address", f"{address}:{ports.fleet}"]
    if version < (1, 37):
        where += ["--control-api-address", f"{address}:{ports.control}"]
    secured = ["--ssl-ca-certfile", str(ca), "--ssl-certfile", str(certificate), "--ssl-keyfile", str(key)]
    return [*where, *secured, "--enable-supernode-auth", "--database", str(database)]


def node_command(
    version: tuple[int, ...], address: str, port: int, fleet: int, *, ca: Path, key: Path, config: Path
) -> list[str]:
    """Arguments of `flower-supernode`. port: where its apps find it; config: a TOML file with its node config."""
    where = ["--host", address, "--port", str(port)]
    if version < (1, 35):
        where = ["--clientappio-api-address", f"{address}:{port}"]
    joined = ["--superlink", f"{address}:{fleet}", "--root-certificates", str(ca)]
    return [*joined, *where, "--auth-supernode-private-key", str(key), "--node-config", str(config)]


def environment(home: Path, path: Sequence[Path], address: str, more: Mapping[str, str]) -> dict[str, str]:
    """The environment of one of Flower's processes. home: its FLWR_HOME; path: folders that come first on PATH."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FLWR_")}
    kept |= {"PATH": os.pathsep.join([*map(str, path), kept.get("PATH", os.defpath)]), "FLWR_HOME": str(home)}
    for name in ("NO_PROXY", "no_proxy"):  # a proxy would be asked for our own loopback address
        kept[name] = ",".join(filter(None, (address, "localhost", kept.get(name))))
    return {**kept, **PRESET, **more}


def scripts() -> Path:
    """The folder with Flower's console scripts; `ConfigError` when they cannot be found."""
    for file in distribution("flwr").files or ():
        if file.stem == "flower-superlink" and Path(str(file.locate())).is_file():
            return Path(str(file.locate())).resolve().parent
    if (found := shutil.which("flower-superlink")) is not None:
        return Path(found).parent
    raise ConfigError("flwr is installed without its commands (flower-superlink); install it again")


def write_stand_ins(folder: Path, line: str, real: Path, names: Sequence[str]) -> None:
    """Write commands that do the work of those of the same names in `real`. line: a warm process's socket."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        words = [sys.executable, "-I", "-S", standin.__file__, line, str(real / name)]
        (folder / name).write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        (folder / name).chmod(0o755)


def free_ports(address: str, count: int) -> list[int]:
    """Different ports that nobody listens on just now."""
    with ExitStack() as stack:
        taken = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in taken:
            one.bind((address, 0))
        return [one.getsockname()[1] for one in taken]


def toml(values: Mapping[str, Value], what: str) -> str:
    """A flat TOML table. Raises `ConfigError` naming `what` for a value that Flower's configurations cannot hold."""
    lines = []
    for name, value in values.items():
        if not isinstance(value, Value):
            raise ConfigError(
                f"{what} {name} is {value!r}, which Flower cannot carry; give a text, a number, true or false"
            )
        written = _quoted(value) if isinstance(value, str) else str(value)
        lines.append(f"{_quoted(name)} = {written.lower() if isinstance(value, bool) else written}\n")
    return "".join(lines)


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + re.sub(r"[\x00-\x1f\x7f]", lambda found: f"\\u{ord(found[0]):04x}", escaped) + '"'


def cause(said: str, code: int | None) -> str:
    """Why a process of Flower ended, from its log, in words for a sentence."""
    for pattern, meaning in CAUSES:
        if re.search(pattern, said):
            return meaning
    if code is not None and (code < 0 or code > 128):
        return f"it was killed by signal {-code if code < 0 else code - 128}"
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    told = [after for line, after in pairwise(lines) if "Exit Code:" in line] or lines[-1:]
    return " ".join([f"exit code {code}", *(f"({line[:200]})" for line in told[-1:])])
