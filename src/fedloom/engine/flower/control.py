"""Flower's command line, speaking to one SuperLink: register nodes, submit runs, ask how they are."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedloom.core import ConfigError, RunError
from fedloom.core.errors import unknown
from fedloom.engine.flower import standin
from fedloom.engine.flower.processes import COLOURS, Value, toml

CONNECTION = "federation"
PATIENCE = 120.0  # seconds for one command
TRIES = 3
NOISE = re.compile(
    r"^(Using SuperLink: .*|\W*(Loading|Listing|Displaying|Stopping) .*\.\.\.|INFO .*|[╭╰].*)$|│", re.MULTILINE
)
FIRST = (r"Exit Code: \d+\s+([^\n]+)", r"Invalid Flower App configuration[^\n]*\n- ([^\n]+)")


class Refused(Exception):
    """What Flower says about a request that it does not carry out."""

    @property
    def unreached(self) -> bool:
        """Whether the SuperLink has not been asked at all."""
        return "connection" in str(self).lower()


class Control:
    """The commands of `flwr` for one SuperLink.

    folder: becomes their FLWR_HOME. address: `host:port` of the SuperLink's Control API. script: path of `flwr`.
    warm: path of a warm process's socket; empty to start a process for each command.
    """

    def __init__(self, folder: Path, address: str, ca: Path, script: Path, environment: Mapping[str, str], warm: str):
        self._folder, self._address, self._script = folder, address, script
        self._environment, self._warm = environment, warm
        folder.mkdir(parents=True, exist_ok=True)
        connection = toml({"address": address, "root-certificates": str(ca)}, "connection")
        text = f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n{connection}'
        (folder / "config.toml").write_text(text, encoding="utf-8")

    def register(self, key: Path) -> int:
        """Register a SuperNode's public key; returns its node id. Raises `RunError` when it is refused."""
        try:
            return int(self._ask("supernode", "register", str(key), CONNECTION)["node-id"])
        except Refused as error:
            raise RunError(f"the SuperLink does not take the key {key}: {error}") from error

    def nodes(self) -> dict[int, str]:
        """The status of every registered SuperNode (registered, online, offline) by node id."""
        try:
            found = self._ask_again("supernode", "list", CONNECTION)["nodes"]
        except Refused as error:
            raise RunError(f"the SuperLink does not say who is online: {error}") from error
        return {int(node["node-id"]): str(node["status"]) for node in found}

    def submit(self, app: Path, config: Mapping[str, Value]) -> int:
        """Start a run of the app in a folder and return its id.

        config: replaces values of the app's own. Raises `ConfigError` when the app or the config is refused.
        """
        known = app_config(app)
        for name in config:
            if name not in known:
                raise ConfigError(f"run config of {app}: {unknown('key', name, known)}")
        overrides = self._folder / "run-config.toml"
        overrides.write_text(toml(config, "run config"), encoding="utf-8")
        try:
            return int(self._ask("run", str(app), CONNECTION, *(["-c", str(overrides)] if config else []))["run-id"])
        except Refused as error:
            if error.unreached:
                raise RunError(f"the SuperLink does not take the run: {error}") from error
            raise ConfigError(f"Flower refuses the app {app}: {error}") from error

    def run(self, run_id: int) -> dict[str, Any]:
        """What the SuperLink knows of a run: `status` (`pending` ... `finished:failed`), `status-details` and more."""
        try:
            found = self._ask_again("list", CONNECTION, "--run-id", str(run_id))["runs"]
        except Refused as error:
            raise RunError(f"the SuperLink does not tell the status of run {run_id}: {error}") from error
        return dict(found[0])

    def log(self, run_id: int) -> str:
        """What the run's ServerApp has written, its log and its standard output in one."""
        code, out, err = self._call("log", str(run_id), CONNECTION, "--show")
        if code:
            raise RunError(f"the SuperLink does not give the log of run {run_id}: {_reason(err or out)}")
        return COLOURS.sub("", out).removeprefix(f"Using SuperLink: {CONNECTION} ({self._address})\n").strip("\n")

    def stop(self, run_id: int) -> None:
        """Stop a run; the ServerApp is told to end."""
        try:
            self._ask("stop", str(run_id), CONNECTION)
        except Refused as error:
            raise RunError(f"the SuperLink does not stop run {run_id}: {error}") from error

    def _ask_again(self, *arguments: str) -> dict[str, Any]:
        """Ask what changes nothing, a few times if the SuperLink is too busy to answer."""
        for _ in range(TRIES - 1):
            try:
                return self._ask(*arguments)
            except Refused as error:
                if not error.unreached:
                    raise
            time.sleep(1.0)
        return self._ask(*arguments)

    def _ask(self, *arguments: str) -> dict[str, Any]:
        _, out, err = self._call(*arguments, "--format", "json")
        begin = out.find("{")
        try:
            answer: dict[str, Any] = json.loads(out[begin:])
        except ValueError:
            raise Refused(_reason(err or out)) from None
        if not answer.get("success"):
            raise Refused(_reason(str(answer.get("error-message", ""))))
        return answer

    def _call(self, *arguments: str) -> tuple[int, str, str]:
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, open(os.devnull, "rb") as nothing:
            try:
                code = self._carry_out(arguments, [file.fileno() for file in (nothing, out, err)])
            except (TimeoutError, subprocess.TimeoutExpired) as error:
                raise RunError(f"`flwr {arguments[0]}` has not ended within {PATIENCE:g} s") from error
            texts = []
            for file in (out, err):
                file.seek(0)
                texts.append(file.read().decode(errors="replace"))
        return code, texts[0], texts[1]

    def _carry_out(self, arguments: Sequence[str], files: Sequence[int]) -> int:
        if self._warm:
            request = standin.errand(str(self._script), arguments, self._environment, str(self._folder))
            if (code := standin.ask(self._warm, request, files, PATIENCE)) is not None:
                return code
        given, out, err = files
        command, variables = [str(self._script), *arguments], dict(self._environment)
        return subprocess.run(
            command,
            stdin=given,
            stdout=out,
            stderr=err,
            env=variables,
            cwd=self._folder,
            timeout=PATIENCE,
            check=False,
        ).returncode


def app_config(app: Path) -> dict[str, Value]:
    """The run config of the app in a folder, nested tables as dotted names; `ConfigError` when it is no app."""
    path = app / "pyproject.toml"
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))["tool"]["flwr"]["app"].get("config", {})
    except (OSError, ValueError, KeyError, AttributeError) as error:
        mend = "make one with `fedloom deploy RECIPE --out APP`"
        raise ConfigError(f"{app} is not a Flower app ({path.name}: {type(error).__name__}); {mend}") from error
    return _flat(found)


def _flat(table: Mapping[str, Any]) -> dict[str, Value]:
    flat: dict[str, Value] = {}
    for name, value in table.items():
        below = {f"{name}.{key}": inner for key, inner in _flat(value).items()} if isinstance(value, dict) else None
        flat |= {name: value} if below is None else below
    return flat


def _reason(text: str) -> str:
    """What Flower says, in one line: its first complaint where it lists several, else its last paragraph."""
    plain = NOISE.sub("", COLOURS.sub("", text)).strip()
    found = [match[1] for pattern in FIRST if (match := re.search(pattern, plain))] or plain.split("\n\n")[-1:]
    return re.sub(r"\[code: \d+\] ?", "", " ".join(found[0].split())).rstrip(".") or "it gives no reason"
