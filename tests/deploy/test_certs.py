"""Certificates and keys: what they say, who may read them, and whether a handshake takes them."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest

x509 = pytest.importorskip("cryptography.x509", reason="cryptography comes with the extra 'flower'")
from cryptography.hazmat.primitives.asymmetric import ec  # noqa: E402
from cryptography.hazmat.primitives.serialization import (  # noqa: E402
    load_pem_private_key,
    load_ssh_private_key,
    load_ssh_public_key,
)

from fedloom.core.errors import ConfigError  # noqa: E402
from fedloom.deploy.certs import Certificates, make_certificates  # noqa: E402

DAY = timedelta(days=1)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """For three nodes and four hosts, valid for 30 days."""
    folder = tmp_path_factory.mktemp("certs") / "new" / "certs"
    return make_certificates(
        folder, hosts=["FL.example.org", "192.0.2.7", "2001:db8::1", "localhost"], nodes=3, days=30
    )


def certificate(path: Path) -> Any:
    return x509.load_pem_x509_certificate(path.read_bytes())


def extension(found: Any, kind: Any) -> Any:
    return found.extensions.get_extension_for_class(kind)


def test_the_authority_may_sign_and_the_server_may_serve(made: Certificates) -> None:
    ca, server = certificate(made.ca), certificate(made.certificate)
    server.verify_directly_issued_by(ca)
    basic, usage = extension(ca, x509.BasicConstraints), extension(ca, x509.KeyUsage)
    assert basic.critical and basic.value.ca
    assert usage.critical and usage.value.key_cert_sign and usage.value.crl_sign
    assert not usage.value.digital_signature
    assert not extension(server, x509.BasicConstraints).value.ca
    assert list(extension(server, x509.ExtendedKeyUsage).value) == [x509.ExtendedKeyUsageOID.SERVER_AUTH]
    issued_by = extension(server, x509.AuthorityKeyIdentifier).value.key_identifier
    assert issued_by == extension(ca, x509.SubjectKeyIdentifier).value.digest
    assert ca.serial_number != server.serial_number


def test_the_server_is_named_by_its_hosts_and_loopback(made: Certificates) -> None:
    names = extension(certificate(made.certificate), x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["fl.example.org", "localhost"]
    addresses = ["192.0.2.7", "2001:db8::1", "127.0.0.1"]
    assert names.get_values_for_type(x509.IPAddress) == [ip_address(text) for text in addresses]


def test_the_server_is_valid_from_now_and_no_longer_than_the_authority(made: Certificates) -> None:
    ca, server = certificate(made.ca), certificate(made.certificate)
    assert server.not_valid_before_utc < datetime.now(UTC)
    assert 29 * DAY < server.not_valid_after_utc - datetime.now(UTC) <= 30 * DAY
    assert ca.not_valid_before_utc <= server.not_valid_before_utc
    assert server.not_valid_after_utc <= ca.not_valid_after_utc


def test_keys_belong_to_what_they_open(made: Certificates) -> None:
    for path, key in ((made.ca, made.ca_key), (made.certificate, made.key)):
        private = load_pem_private_key(key.read_bytes(), None)
        assert private.public_key() == certificate(path).public_key()
    publics = set()
    for path in made.node_keys:
        private = load_ssh_private_key(path.read_bytes(), None)
        public = load_ssh_public_key(path.with_name(f"{path.name}.pub").read_bytes())
        assert isinstance(private.curve, ec.SECP384R1) and private.public_key() == public
        publics.add(public.public_numbers())
    assert [path.name for path in made.node_keys] == ["node-0", "node-1", "node-2"] and len(publics) == 3


def test_only_the_owner_reads_private_keys(made: Certificates) -> None:
    assert made.ca.parent.stat().st_mode & 0o777 == 0o700
    for path in (made.ca_key, made.key, *made.node_keys):
        assert path.stat().st_mode & 0o777 == 0o600


def test_an_empty_folder_becomes_private(tmp_path: Path) -> None:
    (tmp_path / "certs").mkdir(mode=0o755)
    make_certificates(tmp_path / "certs", nodes=1)
    assert (tmp_path / "certs").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"hosts": ["a b"]}, "host 'a b' is neither a DNS name nor an IP address"),
        ({"hosts": ["fl.example.org:8000"]}, "give it without port and scheme"),
        ({"hosts": ["https://x"]}, "host 'https://x' is neither"),
        ({"hosts": ["*.example.org"]}, "host '*.example.org' is neither"),
        ({"hosts": ["300.1.1.1"]}, "host '300.1.1.1' is neither"),
        ({"hosts": ["-a.org"]}, "host '-a.org' is neither"),
        ({"hosts": ["a..b"]}, "host 'a..b' is neither"),
        ({"hosts": [""]}, "host '' is neither"),
        ({"hosts": ["größe.org"]}, "host 'größe.org' is neither"),
        ({"hosts": [".".join(["a" * 63] * 4)]}, "is neither a DNS name"),
        ({"hosts": [7]}, "host 7 is neither"),
        ({"hosts": []}, "hosts must be a list of at least one name or address"),
        ({"hosts": "localhost"}, "hosts must be a list"),
        ({"nodes": 0}, "nodes must be a whole number in [1, 1000], got 0"),
        ({"nodes": 1001}, "nodes must be a whole number in [1, 1000], got 1001"),
        ({"nodes": True}, "nodes must be a whole number"),
        ({"days": 0}, "days must be a whole number in [1, 3650], got 0"),
        ({"days": 1.5}, "days must be a whole number in [1, 3650], got 1.5"),
    ],
)
def test_values_out_of_range_are_refused(given: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        make_certificates(tmp_path / "new" / "certs", **given)
    assert sentence in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_keys_are_never_written_over(tmp_path: Path) -> None:
    (tmp_path / "ca.key").write_text("precious")
    with pytest.raises(ConfigError, match="which is not empty"):
        make_certificates(tmp_path)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["precious"]


def test_a_missing_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'fedloom\[flower\]'"):
        make_certificates(tmp_path / "certs")


class Server:
    """Shakes hands on loopback until it is closed."""

    def __init__(self, made: Certificates):
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.load_cert_chain(made.certificate, made.key)
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        self.thread = threading.Thread(target=self.serve)
        self.thread.start()

    def serve(self) -> None:
        while True:
            connection, _ = self.socket.accept()
            with connection:
                if connection.recv(1, socket.MSG_PEEK) == b"":
                    return
                try:
                    with self.context.wrap_socket(connection, server_side=True) as secured:
                        secured.sendall(b"hello")
                except OSError:
                    continue

    def close(self) -> None:
        socket.create_connection(("127.0.0.1", self.port)).close()
        self.thread.join()
        self.socket.close()


def hello(port: int, ca: Path, host: str) -> bytes:
    """Connect as a strict client that knows the authority alone."""
    context = ssl.create_default_context(cafile=ca)
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    plain = socket.create_connection(("127.0.0.1", port), timeout=30)
    with plain, context.wrap_socket(plain, server_hostname=host) as secured:
        return secured.recv(5)


@pytest.fixture
def served() -> Iterator[Any]:
    servers: list[Server] = []

    def serve(made: Certificates) -> int:
        servers.append(Server(made))
        return servers[-1].port

    yield serve
    for server in servers:
        server.close()


def test_a_strict_client_shakes_hands_with_every_name(made: Certificates, served: Any) -> None:
    port = served(made)
    for host in ("localhost", "127.0.0.1", "fl.example.org", "192.0.2.7", "2001:db8::1"):
        assert hello(port, made.ca, host) == b"hello"
    with pytest.raises(ssl.SSLCertVerificationError, match=r"other\.example\.org"):
        hello(port, made.ca, "other.example.org")


def test_nobody_trusts_another_authority(made: Certificates, served: Any, tmp_path: Path) -> None:
    other = make_certificates(tmp_path / "other", nodes=1)
    with pytest.raises(ssl.SSLCertVerificationError):
        hello(served(made), other.ca, "localhost")


@pytest.mark.parametrize(("begin", "reason"), [(-3 * DAY, "expired"), (DAY, "not yet valid")])
def test_a_certificate_out_of_its_time_is_refused(begin: timedelta, reason: str, served: Any, tmp_path: Path) -> None:
    made = make_certificates(tmp_path / "certs", nodes=1, days=2, start=datetime.now(UTC) + begin)
    with pytest.raises(ssl.SSLCertVerificationError, match=reason):
        hello(served(made), made.ca, "localhost")
