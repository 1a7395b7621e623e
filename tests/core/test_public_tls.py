"""The certificate that an edge shows: taken up, kept, spoken of, and known by our own commands."""

from __future__ import annotations

import datetime
import logging
import ssl
from contextlib import suppress
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from core.config import World, parse
from core.errors import ConfigError
from core.pins import Pins, believing, certificates_in, files_of, pins_of
from core.public_tls import KEPT, PublicCertificate, public_of
from deploy.certs import public, self_signed

DAY = 86400.0
TEXT = """
version = 1
[models.m]
source = "m.gguf"
[[edges]]
name = "ams"
tls = { certificate = "public/ams.crt", key = "public/ams.key" }
[[regions]]
name = "eu"
[[regions.nodes]]
name = "eu-1"
role = "combined"
model = "m"
"""


@pytest.fixture
def world(tmp_path: Path) -> World:
    made = World(parse(TEXT), tmp_path / "world.toml", tmp_path)
    public(made, "ams", ["api.example.org"], 90, lambda _: None)
    return made


def renew(world: World, pair: tuple[bytes, bytes]) -> str:
    certificate, key = pair
    (world.state / "public/ams.crt").write_bytes(certificate)
    (world.state / "public/ams.key").write_bytes(key)
    return certificates_in(certificate)[0]


def opened(world: World) -> PublicCertificate:
    found = public_of(world, "ams")
    assert found is not None
    return found


def pins(world: World) -> Pins:
    found = pins_of(world, world.topology.edge("ams"))
    assert found is not None
    return found


def shake(server: ssl.SSLContext, client: ssl.SSLContext, name: str | None = None) -> ssl.SSLObject:
    """The client's side of a handshake. Raises ssl.SSLError."""
    here, there = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = (
        client.wrap_bio(there, here, server_hostname=name),
        server.wrap_bio(here, there, server_side=True),
    )
    for side in sides * 3:
        with suppress(ssl.SSLWantReadError):
            side.do_handshake()
    return sides[0]


def without_ids(name: str, days: float = 30, *, begun: float = 1) -> tuple[bytes, bytes]:
    """As an old program makes it: nothing but names tells two of them apart. `days`, `begun`: when
    it ends, and when it began, in days from now and before now."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=begun))
        .not_valid_after(now + datetime.timedelta(days=days))
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    return made.public_bytes(pem), key.private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def test_callers_are_shown_the_newest_pair_that_serves(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    ours = opened(world)
    first = ours.current()
    assert not ours.refresh(), "nothing has changed"
    whole = (world.state / "public/ams.crt").read_bytes()
    (world.state / "public/ams.crt").write_bytes(whole[: len(whole) // 2])
    assert not ours.refresh()
    assert not ours.refresh()
    other = self_signed(["api.example.org"], 30)
    (world.state / "public/ams.crt").write_bytes(other[0])
    for _ in range(3):
        assert not ours.refresh()
    assert ours.current() is first
    (world.state / "public/ams.crt").unlink()
    assert not ours.refresh()
    kept = [one.message for one in caplog.records if "not taken up" in one.message]
    assert len(kept) == 3, kept
    assert "has no certificate in PEM" in kept[0]
    assert "do not belong together" in kept[1]
    assert "cannot be read" in kept[2]
    (world.state / "public/ams.crt").write_bytes(whole)
    assert not ours.refresh()
    assert "serve again" in caplog.records[-1].message
    leaf = renew(world, other)
    assert ours.refresh()
    assert ours.left_s == pytest.approx(30 * DAY, abs=600)
    shown = shake(ours.current(), ssl.create_default_context(cadata=leaf), "api.example.org")
    assert shown.version() == "TLSv1.3"


def test_tls_begins_with_1_2_and_speaks_http_1_1(world: World) -> None:
    ours = opened(world).current()
    caller = ssl.create_default_context(cafile=str(world.state / "public/ams.crt"))
    caller.maximum_version = ssl.TLSVersion.TLSv1_2
    caller.set_alpn_protocols(["h2", "http/1.1"])
    spoken = shake(ours, caller, "api.example.org")
    assert (spoken.version(), spoken.selected_alpn_protocol()) == ("TLSv1.2", "http/1.1")
    assert ours.minimum_version is ssl.TLSVersion.TLSv1_2
    assert ours.options & ssl.OP_NO_RENEGOTIATION


@pytest.mark.parametrize("make", [lambda: self_signed(["a.example"], 30),
                                  lambda: without_ids("a.example")])  # fmt: skip
def test_our_own_know_an_edge_by_what_it_shows_now_or_soon(world: World, make: object) -> None:
    assert callable(make)
    renew(world, make())
    ours = opened(world)
    standing = pins(world)
    for _ in range(KEPT + 1):
        before = ours.current()
        renew(world, make())
        for dialled in (pins(world), standing):
            dialled.look()
            shake(before, dialled.context)  # not taken up yet
        assert ours.refresh()
        for dialled in (pins(world), standing):
            dialled.look()
            shake(ours.current(), dialled.context)
            shake(before, dialled.context)  # another process of the edge shows it still
    files = files_of(world, world.topology.edge("ams"))
    assert files is not None
    assert len(certificates_in(files.shown.read_bytes())) == KEPT


def test_our_own_believe_nobody_else(world: World, tmp_path: Path) -> None:
    opened(world)
    certificate, key = self_signed(["api.example.org"], 30)
    stranger = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    (tmp_path / "both.pem").write_bytes(certificate + key)
    stranger.load_cert_chain(tmp_path / "both.pem")
    with pytest.raises(ssl.SSLCertVerificationError):
        shake(stranger, pins(world).context)
    shake(stranger, believing(certificates_in(certificate)[0]))


def test_an_authority_of_the_chain_is_not_believed(world: World) -> None:
    """Else whoever has any certificate of a public authority would pass for the edge."""
    own, authority = self_signed(["a"], 30), self_signed(["b"], 30)
    renew(world, (own[0] + authority[0], own[1]))
    opened(world)
    other = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    (world.state / "other.pem").write_bytes(b"".join(authority))
    other.load_cert_chain(world.state / "other.pem")
    with pytest.raises(ssl.SSLCertVerificationError):
        shake(other, pins(world).context)


def test_an_edge_elsewhere_is_believed_as_callers_do(world: World) -> None:
    (world.state / "public/ams.crt").unlink()
    context = pins(world).context
    assert context.check_hostname
    assert context.verify_mode is ssl.CERT_REQUIRED


@pytest.mark.parametrize(
    ("days", "level", "word"), [(9.0, "WARNING", "ends soon"), (-2.0, "ERROR", "ended")]
)
def test_an_end_that_is_near_is_said_at_the_start(
    world: World, caplog: pytest.LogCaptureFixture, days: float, level: str, word: str
) -> None:
    renew(world, without_ids("api.example.org", days, begun=30))
    ours = opened(world)
    (said,) = [one for one in caplog.records if one.levelname in ("WARNING", "ERROR")]
    assert said.levelname == level
    assert f"https certificate {word}" in said.message
    assert ours.left_s == pytest.approx(days * DAY, abs=600)
    shake(ours.current(), pins(world).context)  # commands find in, to say so


def test_an_end_that_comes_near_is_said_once(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    files = files_of(world, world.topology.edge("ams"))
    assert files is not None
    now = [datetime.datetime.now(datetime.UTC).timestamp()]
    ours = PublicCertificate(files, clock=lambda: now[0])
    for _ in range(90 + 5):
        now[0] += DAY
        ours.refresh()
    said = [one.message for one in caplog.records if one.levelno >= logging.WARNING]
    assert [one.split(" file=")[0] for one in said] == [
        "https certificate ends soon",
        "https certificate ended",
    ]
    renew(world, self_signed(["api.example.org"], 365))
    assert ours.refresh()
    assert ours.left_s > 200 * DAY


def test_what_does_not_serve_says_which_file_and_why(world: World) -> None:
    certificate, key = world.state / "public/ams.crt", world.state / "public/ams.key"
    good = key.read_bytes()
    secret = serialization.load_pem_private_key(good, None)
    locked = secret.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"hush"),
    )
    key.write_bytes(locked)
    with pytest.raises(ConfigError, match=r"ams\.key .* wants a passphrase"):
        opened(world)
    key.write_bytes(self_signed(["x"], 3)[1])
    with pytest.raises(ConfigError, match=r"ams\.crt and ams\.key do not belong together"):
        opened(world)
    key.write_bytes(b"no key at all")
    with pytest.raises(ConfigError, match=r"ams\.crt and ams\.key do not serve"):
        opened(world)
    key.unlink()
    with pytest.raises(ConfigError, match=r"ams\.key \(edges\.tls\.key\) cannot be read: No such"):
        opened(world)
    key.write_bytes(good)
    opened(world)
    with pytest.raises(ConfigError, match="is there already"):
        public(world, "ams", ["x"], 3, lambda _: None)
    assert certificate.exists()


@pytest.mark.parametrize(("tls", "good"), [(True, True), (False, False)])
def test_off_loopback_an_edge_needs_a_certificate(tls: bool, good: bool) -> None:
    text = TEXT if tls else "\n".join(one for one in TEXT.splitlines() if "tls" not in one)
    text = text.replace('name = "ams"', 'name = "ams"\nlisten = "0.0.0.0:8443"')
    if good:
        assert parse(text).edges[0].url == "https://0.0.0.0:8443"
        with pytest.raises(ConfigError, match="the admin of edge"):
            parse(text.replace("tls =", 'admin = "0.0.0.0:8790"\ntls ='))
    else:
        with pytest.raises(ConfigError, match=r"certificate for its callers \(tls = "):
            parse(text)
