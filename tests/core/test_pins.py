"""What our own processes believe of an edge, and when they forget it."""

from __future__ import annotations

import ssl

import pytest

from core.config import World
from core.pins import OVERLAP_S, Pins, certificates_in, files_of
from core.public_tls import PublicCertificate
from deploy.certs import self_signed
from tests.core.test_public_tls import opened, pins, renew, shake, world

__all__ = ["world"]


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def both(world: World, clock: Clock) -> tuple[PublicCertificate, Pins]:
    """An edge, and who dials it, by one clock."""
    files = files_of(world, world.topology.edge("ams"))
    assert files is not None
    return PublicCertificate(files, clock=clock), Pins(files, clock=clock)


def believed(dialled: Pins, shown: ssl.SSLContext) -> bool:
    try:
        shake(shown, dialled.context)
    except ssl.SSLCertVerificationError:
        return False
    return True


def test_what_was_replaced_is_forgotten_once_no_process_shows_it(
    world: World, clock: Clock
) -> None:
    ours, dialled = both(world, clock)
    standing, before = dialled.context, ours.current()
    renew(world, self_signed(["api.example.org"], 30))
    assert ours.refresh()
    dialled.look()
    assert believed(dialled, before), "another process of the edge shows it still"
    clock.now += OVERLAP_S - 1
    ours.refresh()
    dialled.look()
    assert believed(dialled, before)
    clock.now += 2
    ours.refresh()  # the edge shows it no more, and says so
    assert not believed(pins(world), before), "who begins now never knew it"
    dialled.look()
    assert believed(dialled, before), "who knew it has just heard"
    clock.now += OVERLAP_S + 1
    dialled.look()
    assert not believed(dialled, before)
    assert believed(dialled, ours.current())
    assert dialled.context is standing


def test_what_is_gone_is_forgotten(world: World, clock: Clock) -> None:
    ours, dialled = both(world, clock)
    standing = dialled.context
    files = files_of(world, world.topology.edge("ams"))
    assert files is not None
    for path in (files.certificate, files.shown):
        path.unlink()
    for _ in range(3):
        dialled.look()
        assert believed(dialled, ours.current()), "it may be being replaced"
        clock.now += OVERLAP_S / 3
    clock.now += 1
    dialled.look()
    assert not believed(dialled, ours.current())
    assert dialled.context is standing, "and no authority is believed in its place"


def test_a_file_that_is_being_written_takes_nothing_away(world: World, clock: Clock) -> None:
    ours, dialled = both(world, clock)
    files = files_of(world, world.topology.edge("ams"))
    assert files is not None
    files.shown.unlink()
    whole = files.certificate.read_bytes()
    files.certificate.write_bytes(whole[: len(whole) // 2])
    dialled.look()
    clock.now += OVERLAP_S / 2
    files.certificate.write_bytes(whole)
    dialled.look()
    clock.now += OVERLAP_S
    dialled.look()
    assert believed(dialled, ours.current())
    files.certificate.write_bytes(b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    dialled.look()
    assert believed(dialled, ours.current())


def test_what_follows_a_damaged_certificate_is_not_its_edges(world: World, clock: Clock) -> None:
    """It leads to an authority, and whoever has a certificate of that would pass for the edge."""
    _, dialled = both(world, clock)
    files = files_of(world, world.topology.edge("ams"))
    assert files is not None
    authority = self_signed(["authority"], 30)
    damaged = b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"
    files.certificate.write_bytes(damaged + authority[0])
    both_files = world.state / "authority.pem"
    both_files.write_bytes(b"".join(authority))
    stranger = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    stranger.load_cert_chain(both_files)
    dialled.look()
    assert not believed(dialled, stranger)


def test_an_edge_that_begins_with_another_certificate_forgets_too(
    world: World, clock: Clock
) -> None:
    """The file of what it shows is there from its last run."""
    before = opened(world).current()
    renew(world, self_signed(["api.example.org"], 30))
    ours, dialled = both(world, clock)
    files = files_of(world, world.topology.edge("ams"))
    assert files is not None
    assert believed(dialled, before)
    assert len(certificates_in(files.shown.read_bytes())) == 2
    clock.now += OVERLAP_S + 1
    assert not ours.refresh()
    assert len(certificates_in(files.shown.read_bytes())) == 1
    assert not believed(pins(world), before)
    assert believed(pins(world), ours.current())


def test_what_another_process_has_taken_up_is_left_to_it(world: World, clock: Clock) -> None:
    slow, _ = both(world, clock)
    renew(world, self_signed(["api.example.org"], 30))
    quick, _ = both(world, clock)
    clock.now += OVERLAP_S + 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("core.public_tls._stamp", lambda _: slow._stamp)  # it has not looked yet
        assert not slow.refresh()
    files = files_of(world, world.topology.edge("ams"))
    assert files is not None
    assert len(certificates_in(files.shown.read_bytes())) == 2
    assert believed(pins(world), quick.current())
    assert believed(pins(world), slow.current())
