"""Flags of each version, configurations as TOML, and why a process ended."""

from __future__ import annotations

import math
import os
import socket
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedloom.core import ConfigError
from fedloom.engine.flower.processes import (
    TAKEN,
    Ports,
    cause,
    environment,
    free_ports,
    link_command,
    node_command,
    opened,
    toml,
)

LINK = {"ca": Path("/c/ca.crt"), "certificate": Path("/c/s.pem"), "key": Path("/c/s.key"), "database": Path("/h/db")}
SECURED = ["--ssl-ca-certfile", "/c/ca.crt", "--ssl-certfile", "/c/s.pem", "--ssl-keyfile", "/c/s.key"]


@pytest.mark.parametrize(
    ("version", "where"),
    [
        ((1, 28), "--serverappio-api-address H:1 --fleet-api-address H:2 --control-api-address H:3"),
        ((1, 34), "--serverappio-api-address H:1 --fleet-api-address H:2 --control-api-address H:3"),
        ((1, 35), "--host H --port 1 --fleet-api-address H:2 --control-api-address H:3"),
        ((1, 36), "--host H --port 1 --fleet-api-address H:2 --control-api-address H:3"),
        ((1, 37), "--host H --port 1 --fleet-api-address H:2"),
        ((1, 39), "--host H --port 1 --fleet-api-address H:2"),
        ((1, 40), "--host H --port 1"),
        ((1, 42), "--host H --port 1"),
    ],
)
def test_a_superlink_gets_the_flags_of_its_version(version: tuple[int, ...], where: str) -> None:
    command = link_command(version, "H", Ports(1, 2, 3), **LINK)
    assert command == [*where.split(), *SECURED, "--enable-supernode-auth", "--database", "/h/db"]


@pytest.mark.parametrize(
    ("version", "where"), [((1, 34), "--clientappio-api-address H:5"), ((1, 35), "--host H --port 5")]
)
def test_a_supernode_gets_the_flags_of_its_version(version: tuple[int, ...], where: str) -> None:
    paths = {"ca": Path("/c/ca.crt"), "key": Path("/c/n"), "config": Path("/h/n.toml")}
    joined = ["--superlink", "H:2", "--root-certificates", "/c/ca.crt"]
    own = ["--auth-supernode-private-key", "/c/n", "--node-config", "/h/n.toml"]
    assert node_command(version, "H", 5, 2, **paths) == [*joined, *where.split(), *own]


@pytest.mark.parametrize(("version", "different"), [((1, 36), 3), ((1, 37), 2), ((1, 39), 2), ((1, 40), 1)])
def test_a_superlink_has_as_many_ports_as_its_version_wants(version: tuple[int, ...], different: int) -> None:
    ports = Ports.free(version, "127.0.0.1")
    assert len({ports.runtime, ports.fleet, ports.control}) == different
    assert (ports.control == ports.runtime) == (version >= (1, 37))


def test_free_ports_can_be_taken() -> None:
    ports = free_ports("127.0.0.1", 5)
    assert len(set(ports)) == 5
    for port in ports:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", port))


def test_flower_is_told_to_keep_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLWR_INTERNAL_GRPC_FLEET_API", "1")
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "1")
    monkeypatch.setenv("NO_PROXY", "intra.net")
    monkeypatch.setenv("PATH", "/usr/bin")
    found = environment(Path("/h o"), [Path("/stand ins"), Path("/scripts")], "127.0.0.1", {"MINE": "1"})
    assert found["FLWR_HOME"] == "/h o"
    assert found["PATH"] == os.pathsep.join(["/stand ins", "/scripts", "/usr/bin"])
    assert found["NO_PROXY"] == "127.0.0.1,localhost,intra.net"
    assert found["MINE"] == "1"
    assert {name: value for name, value in found.items() if name.startswith("FLWR_") and name != "FLWR_HOME"} == {
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
    }


numbers = st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False)


@given(st.dictionaries(st.text(st.characters(codec="utf-8")), st.booleans() | numbers | st.text()))
def test_a_configuration_survives_toml(values: dict[str, bool | float | str]) -> None:
    try:
        read = tomllib.loads(toml(values, "node config"))
    except UnicodeEncodeError:
        return
    assert read == values
    assert {name: type(value) for name, value in read.items()} == {name: type(value) for name, value in values.items()}


def test_not_a_number_survives_toml() -> None:
    assert math.isnan(tomllib.loads(toml({"x": math.nan}, "node config"))["x"])


@pytest.mark.parametrize("value", [None, [1], {"a": 1}, b"x"])
def test_what_flower_cannot_carry_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r"node config of a: data-root is .*, which Flower cannot carry; give a text"):
        toml({"data-root": value}, "node config of a:")


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (
            "ERROR: Exit Code: 305\nFailed to initialize the connection to the SuperLink.\n"
            "[code: 2004] Failed to activate SuperNode.\n",
            "the SuperLink refuses its key: it is not registered, or a SuperNode with the same key is online",
        ),
        (
            "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: certificate has expired (_ssl.c:1006)",
            "the server's certificate has expired; make new ones with `fedloom deploy certs`",
        ),
        (
            "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: unable to get local issuer certificate",
            "the server's certificate was not signed by the CA given",
        ),
        (
            "certificate verify failed: IP address mismatch, certificate is not valid for '127.0.0.1'",
            "the server's certificate was made for another address",
        ),
        ("Tls handshake failed (TSI_PROTOCOL_FAILURE)", "the server's certificate was not signed by the CA given"),
        ("ERROR: Exit Code: 302\nUnable to parse the private key file.", "its key is not a private EC key in OpenSSH"),
        ("[Errno 98] error while attempting to bind on address ('127.0.0.1', 9): address already in use", TAKEN),
        ("Port in server address 127.0.0.1:59513 is already in use.", TAKEN),
        ("ERROR: Exit Code: 104\nInvalid arguments.\nUse `--help`.\n", "exit code 1 (Invalid arguments.)"),
        ("Traceback (most recent call last):\n  File\nKeyError: 'x'\n\n", "exit code 1 (KeyError: 'x')"),
        ("", "exit code 1"),
    ],
)
def test_the_cause_is_read_from_the_log(said: str, expected: str) -> None:
    assert cause(said, 1).startswith(expected)


@pytest.mark.parametrize("code", [-9, 137])
def test_a_killed_process_has_no_last_word(code: int) -> None:
    assert cause("INFO: all is well\n", code) == "it was killed by signal 9"


def test_a_port_is_open_when_the_log_says_so() -> None:
    begun = "INFO: Starting the SuperLink Runtime HTTP API on 127.0.0.1:4581.\n"
    assert not opened(begun, 4581)
    assert opened(f"{begun}INFO Uvicorn running on http://127.0.0.1:4581 (Press CTRL+C to quit)", 4581)
    assert not opened("INFO Uvicorn running on http://127.0.0.1:45811 (Press CTRL+C to quit)", 4581)
