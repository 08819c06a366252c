"""A certificate authority, a server certificate and node keys for a test federation."""

from __future__ import annotations

import importlib.util
import ipaddress
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fedloom.config.words import shorten, shown
from fedloom.core.errors import ConfigError
from fedloom.deploy.fresh import fresh_folder

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.x509 import Certificate, CertificateBuilder, GeneralName, KeyUsage, Name

LOOPBACK = ("localhost", "127.0.0.1")
MOST_NODES, MOST_DAYS = 1000, 3650
SKEW = timedelta(minutes=10)  # by which clocks of nodes may be behind


class Certificates(NamedTuple):
    """Paths. certificate, key: of the server. node_keys: private keys of the nodes; `<key>.pub` is to be registered.

    ca_key: signs further certificates; nodes never need it.
    """

    ca: Path
    certificate: Path
    key: Path
    node_keys: tuple[Path, ...]
    ca_key: Path


def make_certificates(
    out: Path, *, hosts: Sequence[str] = LOOPBACK, nodes: int = 2, days: int = 365, start: datetime | None = None
) -> Certificates:
    """Write an authority, a server certificate that it signed, and one key pair per node to a new private folder.

    hosts: names and addresses under which nodes know the server; those of loopback are always added, because the
    SuperLink's own processes use them. days: how long both certificates are valid, from `start` (with a time zone; by
    default now). Private keys can be read by their owner alone. Nothing is written when anything is refused.
    Raises `ConfigError` for a value out of range, a folder that is not empty, or a missing package.
    """
    if importlib.util.find_spec("cryptography") is None:
        raise ConfigError(
            "certificates need the package cryptography; install the extra: pip install 'fedloom[flower]'"
        )
    names = [*dict.fromkeys(_host(host) for host in (*_listed(hosts), *LOOPBACK))]
    _check_count("nodes", nodes, MOST_NODES)
    _check_count("days", days, MOST_DAYS)
    begin = (start or datetime.now(UTC)).astimezone(UTC)
    with fresh_folder(out, private=True) as folder:
        _write_certificates(folder, names, begin, begin + timedelta(days=days))
        for k in range(nodes):
            _write_node_key(folder / f"node-{k}")
    out = out.absolute()
    keys = tuple(out / f"node-{k}" for k in range(nodes))
    return Certificates(out / "ca.crt", out / "server.pem", out / "server.key", keys, out / "ca.key")


def _listed(hosts: Sequence[str]) -> Sequence[str]:
    if isinstance(hosts, str) or not hosts:
        raise ConfigError(f"hosts must be a list of at least one name or address, got {shown(hosts)}")
    return hosts


def _host(text: str) -> str:
    """A name in lower case or an address in its usual form; `ConfigError` for what is neither."""
    name = text.lower().removesuffix(".") if isinstance(text, str) else ""
    with suppress(ValueError):
        return str(ipaddress.ip_address(name))
    labels = name.split(".")
    fits = all(re.fullmatch(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?", label) for label in labels)
    if not fits or len(name) > 253 or labels[-1].isdigit():
        raise ConfigError(
            f"host {shorten(shown(text))} is neither a DNS name nor an IP address; "
            "give it without port and scheme, such as fl.example.org or 192.0.2.7"
        )
    return name


def _check_count(what: str, value: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ConfigError(f"{what} must be a whole number in [1, {most}], got {shown(value)}")


def _write_certificates(folder: Path, names: Sequence[str], begin: datetime, end: datetime) -> None:
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding

    ca_key, key = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP256R1())
    ca = _authority(ca_key, begin, end)
    server = _server(key, ca, ca_key, names, begin, end)
    _write_key(folder / "ca.key", ca_key)
    _write_key(folder / "server.key", key)
    (folder / "ca.crt").write_bytes(ca.public_bytes(Encoding.PEM))
    (folder / "server.pem").write_bytes(server.public_bytes(Encoding.PEM))


def _authority(key: EllipticCurvePrivateKey, begin: datetime, end: datetime) -> Certificate:
    from cryptography import x509
    from cryptography.hazmat.primitives.hashes import SHA384

    name = _name("FedLoom test authority")
    made = _certificate(name, name, key, begin, end)
    made = made.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    made = made.add_extension(_usage("key_cert_sign", "crl_sign"), critical=True)
    return made.sign(key, SHA384())


def _server(
    key: EllipticCurvePrivateKey,
    ca: Certificate,
    ca_key: EllipticCurvePrivateKey,
    names: Sequence[str],
    begin: datetime,
    end: datetime,
) -> Certificate:
    from cryptography import x509
    from cryptography.hazmat.primitives.hashes import SHA384
    from cryptography.x509.oid import ExtendedKeyUsageOID

    made = _certificate(_name("FedLoom SuperLink"), ca.subject, key, begin, end)
    known = ca.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    issuer = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(known)
    made = made.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    made = made.add_extension(_usage("digital_signature"), critical=True)
    made = made.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    made = made.add_extension(issuer, critical=False)
    made = made.add_extension(x509.SubjectAlternativeName([_alternative(name) for name in names]), critical=False)
    return made.sign(ca_key, SHA384())


def _certificate(
    subject: Name, issuer: Name, key: EllipticCurvePrivateKey, begin: datetime, end: datetime
) -> CertificateBuilder:
    from cryptography import x509

    made = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
    made = made.serial_number(x509.random_serial_number()).not_valid_before(begin - SKEW).not_valid_after(end)
    return made.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)


def _usage(*uses: str) -> KeyUsage:
    from cryptography import x509

    every = (
        *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"),
        *("key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
    )
    return x509.KeyUsage(**{use: use in uses for use in every})


def _name(text: str) -> Name:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _alternative(host: str) -> GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _write_node_key(path: Path) -> None:
    """A key pair on P-384 in OpenSSH's format, as Flower reads it."""
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    key = ec.generate_private_key(ec.SECP384R1())
    _write_key(path, key, ssh=True)
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    path.with_name(f"{path.name}.pub").write_bytes(public + b" " + path.name.encode() + b"\n")


def _write_key(path: Path, key: EllipticCurvePrivateKey, *, ssh: bool = False) -> None:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    form = PrivateFormat.OpenSSH if ssh else PrivateFormat.PKCS8
    data = key.private_bytes(Encoding.PEM, form, NoEncryption())
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
