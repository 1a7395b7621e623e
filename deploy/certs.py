"""`skerry certs`: a world's own authority, and a certificate for each of its processes.

The authority's key stays in the folder where it was made; other machines need `ca.crt` and the two
files of each process that runs there.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from core.address import split_address
from core.config import EdgeTls, Topology, World
from core.errors import ConfigError
from core.private_files import warn_if_shared
from core.tls import EVERY_S
from deploy.inside import OPERATOR

CA = "ca"
CA_DAYS = 3650
SKEW = datetime.timedelta(minutes=5)
"""Clocks of machines differ."""
READ_S = 2.0
"""For a look at the files that comes late."""


@dataclass(frozen=True, slots=True)
class Row:
    """A certificate in a list."""

    name: str
    days_left: int
    hosts: tuple[str, ...]


def folder_of(world: World) -> Path:
    return world.state / world.topology.tls.folder


def init(world: World, days: int, say: Callable[[str], None]) -> None:
    """Make what is not there; what is there stays. Raises ConfigError."""
    folder = folder_of(world)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not (folder / f"{CA}.key").exists():
        if (folder / f"{CA}.crt").exists():
            raise ConfigError(
                f"{folder} has ca.crt and not its key: certificates are made where the key is"
            )
        _make_authority(folder, world.topology.name)
        say(f"{folder / 'ca.crt'}: the world's authority, for {CA_DAYS // 365} years")
    for name, hosts in processes(world.topology):
        if not (folder / f"{name}.crt").exists():
            _make(folder, name, hosts, days)
            say(f"{folder / name}.crt: for {days} days")
    if not world.topology.tls.inside:
        say("not used yet: the topology has to say [tls] inside = true")


def rotate(
    world: World,
    days: int,
    say: Callable[[str], None],
    *,
    authority: bool,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """New certificates for all; running processes take them up within seconds and no connection
    breaks. `authority`: only a new authority, believed beside the old one from now on; certificates
    are of the new one from the next rotation, which waits until the processes of this machine have
    had the time to read it. Raises ConfigError."""
    folder = folder_of(world)
    if not (folder / f"{CA}.key").exists():
        raise ConfigError(f"{folder} has no authority's key; `skerry certs init` makes one")
    warn_if_shared(folder / f"{CA}.key")
    if authority:
        old = (folder / f"{CA}.crt").read_bytes().split(_END)[0] + _END + b"\n"
        _make_authority(folder, world.topology.name, also=old)
        say(
            f"{folder / 'ca.crt'}: a new authority beside the old one. Once every machine has the "
            "file, `skerry certs rotate` makes certificates of the new one"
        )
        return
    left_s = _unread_s(folder / f"{CA}.crt")
    if left_s > 0:
        say(f"waiting {left_s:.0f} s, until every process has read the new authority")
        sleep(left_s)
    for name, hosts in processes(world.topology):
        _make(folder, name, hosts, days)
        say(f"{name}: new, for {days} days")


def _unread_s(authorities: Path) -> float:
    """For how long some process of this machine may still not know the newer of two authorities:
    until then it would refuse who shows a certificate of it."""
    if authorities.read_bytes().count(_END) < 2:
        return 0.0
    return max(0.0, authorities.stat().st_mtime + EVERY_S + READ_S - time.time())


def public(
    world: World, name: str, hosts: Sequence[str], days: int, say: Callable[[str], None]
) -> None:
    """A pair for callers of the edge `name`, signed by itself: to try https with. Nothing that is
    there is written over. Raises ConfigError."""
    edge = world.topology.edge(name)
    tls = edge.tls or EdgeTls(certificate=f"public/{name}.crt", key=f"public/{name}.key")
    certificate, key = world.state / tls.certificate, world.state / tls.key
    for path in (certificate, key):
        if path.exists():
            raise ConfigError(f"{path} is there already; move it away first, or use it")
    for path in (certificate, key):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    given = tuple(dict.fromkeys((*hosts, "localhost", "127.0.0.1", "::1")))
    pem, secret = self_signed(given, days)
    _write(key, secret, 0o600)
    _write(certificate, pem, 0o644)
    say(f"{certificate}: for {', '.join(given)}, for {days} days")
    if edge.tls is None:
        say(
            f"not used yet: the topology has to say, in the table of edge {name!r},\n"
            f'tls = {{ certificate = "{tls.certificate}", key = "{tls.key}" }}'
        )
    url = f"https://{hosts[0]}:{split_address(edge.listen)[1] or 'PORT'}"
    say(f"callers have to be told to believe it: curl --cacert {certificate} {url}/v1/models")


def self_signed(hosts: Sequence[str], days: int) -> tuple[bytes, bytes]:
    """A server's certificate and its key, in PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0][:64])])
    names = [_general(host) for host in hosts]
    server = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
    certificate = (
        _builder(name, name, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(server, critical=False)
        # Whoever believes it and the one after it tells the two apart by these: names are the same.
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False
        )
        .sign(key, hashes.SHA256())
    )
    return _pem(certificate), _pem_of(key)


def rows(world: World) -> list[Row]:
    """Raises ConfigError."""
    folder = folder_of(world)
    found = []
    for name in (CA, *(name for name, _ in processes(world.topology))):
        try:
            certificate = x509.load_pem_x509_certificate((folder / f"{name}.crt").read_bytes())
        except (OSError, ValueError) as error:
            raise ConfigError(f"{folder / name}.crt: {error}") from error
        left = certificate.not_valid_after_utc - _now()
        found.append(Row(name, left.days, _names_in(certificate)))
    return found


def processes(topology: Topology) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Name and hosts of everything that listens or dials inside the world."""
    yield OPERATOR, ()
    for edge in topology.edges:
        yield edge.name, ()
    for region in topology.regions:
        for name, router in region.doors:
            yield name, tuple({_host(router.http): None, _host(router.grpc): None})
        for node in region.nodes:
            yield node.name, (node.host,)


_END = b"-----END CERTIFICATE-----"


def _make_authority(folder: Path, world: str, also: bytes = b"") -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"Skerry world {world}")])
    usage = x509.KeyUsage(
        digital_signature=True, key_cert_sign=True, crl_sign=True, content_commitment=False,
        key_encipherment=False, data_encipherment=False, key_agreement=False,
        encipher_only=False, decipher_only=False,
    )  # fmt: skip
    certificate = (
        _builder(name, name, key.public_key(), CA_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    _write(folder / f"{CA}.key", _pem_of(key), 0o600)
    _write(folder / f"{CA}.crt", _pem(certificate) + also, 0o644)


def _make(folder: Path, name: str, hosts: tuple[str, ...], days: int) -> None:
    authority = x509.load_pem_x509_certificate((folder / f"{CA}.crt").read_bytes())
    loaded = serialization.load_pem_private_key((folder / f"{CA}.key").read_bytes(), None)
    if not isinstance(loaded, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{folder / 'ca.key'} is no key that `skerry certs` made")
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    names: list[x509.GeneralName] = [x509.DNSName(name), *map(_general, hosts)]
    both = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    certificate = (
        _builder(subject, authority.subject, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(both, critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(loaded.public_key()), critical=False
        )
        .sign(loaded, hashes.SHA256())
    )
    _write(folder / f"{name}.key", _pem_of(key), 0o600)
    _write(folder / f"{name}.crt", _pem(certificate), 0o644)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = _now()
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - SKEW)
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _general(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _names_in(certificate: x509.Certificate) -> tuple[str, ...]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()
    return tuple(str(one.value) for one in names)


def _write(path: Path, data: bytes, mode: int) -> None:
    """Whole or not at all, and never readable by others meanwhile."""
    fresh = path.with_name(f".{path.name}.new")
    handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
    os.replace(fresh, path)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _pem_of(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _host(address: str) -> str:
    return split_address(address)[0]


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
