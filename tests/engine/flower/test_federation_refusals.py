"""What a federation refuses before anything is started."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedloom.core import ConfigError, RunError
from fedloom.deploy.certs import Certificates, make_certificates
from fedloom.engine.flower.federation import Federation, NodeSpec

pytest.importorskip("cryptography")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("made") / "certificates", nodes=2)


@pytest.fixture
def made(tmp_path: Path, certificates: Certificates) -> Callable[..., Federation]:
    """Makes a federation of one node, or what the arguments say."""

    def make(**other: Any) -> Federation:
        files = {"ca": certificates.ca, "certificate": certificates.certificate, "key": certificates.key}
        nodes = [NodeSpec("node", certificates.node_keys[0], {})]
        return Federation(tmp_path / "home", **{**files, "nodes": nodes, "note": lambda text: None, **other})

    return make


@pytest.mark.parametrize("name", ["", "a b", "../a", "superlink", "warm", "flwr", "-a"])
def test_a_node_name_must_do_for_a_file(name: str, made: Callable[..., Federation], certificates: Certificates) -> None:
    with pytest.raises(ConfigError, match="is taken or unfit for a file"):
        made(nodes=[NodeSpec(name, certificates.node_keys[0], {})])


def test_node_names_differ(made: Callable[..., Federation], certificates: Certificates) -> None:
    with pytest.raises(ConfigError, match="node name 'a' is taken"):
        made(nodes=[NodeSpec("a", key, {}) for key in certificates.node_keys])


def test_a_node_config_holds_scalars_alone(made: Callable[..., Federation], certificates: Certificates) -> None:
    with pytest.raises(ConfigError, match=r"node config of a: clients is \[0, 1\], which Flower cannot carry"):
        made(nodes=[NodeSpec("a", certificates.node_keys[0], {"clients": [0, 1]})])


@pytest.mark.parametrize("which", ["ca", "certificate", "key"])
def test_a_file_that_is_not_there(which: str, made: Callable[..., Federation], tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=f"{which} is .*/none, which is no file; make one with `fedloom deploy certs`"
    ):
        made(**{which: tmp_path / "none"})


def test_a_node_key_without_its_public_half(
    made: Callable[..., Federation], certificates: Certificates, tmp_path: Path
) -> None:
    (tmp_path / "n").write_bytes(certificates.node_keys[0].read_bytes())
    with pytest.raises(ConfigError, match=r"public key of a is .*/n.pub, which is no file"):
        made(nodes=[NodeSpec("a", tmp_path / "n", {})])


def test_a_key_that_is_not_the_certificates(made: Callable[..., Federation], tmp_path: Path) -> None:
    other = make_certificates(tmp_path / "other", nodes=1)
    with pytest.raises(ConfigError, match="do not belong together"):
        made(key=other.key)


def test_a_certificate_that_is_none(made: Callable[..., Federation], certificates: Certificates) -> None:
    with pytest.raises(ConfigError, match="do not belong together, or one cannot be read"):
        made(ca=certificates.node_keys[0])


def test_a_home_that_is_a_file(made: Callable[..., Federation], tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    (tmp_path / "home").write_text("")
    with pytest.raises(ConfigError, match=r"home is .*, which cannot be written: Not a directory"), made():
        pass


def test_nothing_can_be_asked_before_the_start(made: Callable[..., Federation]) -> None:
    with pytest.raises(RunError, match=r"the SuperLink is not running; its log is .*/superlink.log"):
        made().status(1)
