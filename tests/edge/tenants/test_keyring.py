"""The key file may shrink, break or go: what was known stays known, and no door opens."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from core.errors import Unauthorized
from core.keys import (
    KeyRecord,
    Revoked,
    append_new,
    mark_of,
    marked_by,
    new_key,
    parse_lines,
    read_book,
)
from edge.tenants.door import Door
from edge.tenants.keyring import Keyring
from tests.edge.tenants.test_door import NOW, bearer, world

Damage = Callable[[Path], object]


def _cut(path: Path) -> None:
    path.write_bytes(b"")


def _garbage(path: Path) -> None:
    path.write_bytes(b"\x00garbage\n")


def _half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:20])


DAMAGES = pytest.mark.parametrize("damage", [_cut, _garbage, _half, Path.unlink])


def door_of(keyring: Keyring) -> Door:
    return Door(world("until-keys"), keyring.book, look=keyring.look, clock=lambda: NOW)


def test_a_key_is_good_the_moment_it_is_made(tmp_path: Path) -> None:
    path = tmp_path / "keys.jsonl"
    keyring = Keyring(path)
    door = door_of(keyring)
    for _ in range(2):
        key, record = new_key("acme", now=NOW)
        with pytest.raises(Unauthorized):
            door.authenticate(bearer(key))
        append_new(path, [record])
        assert door.authenticate(bearer(key)).name == "acme"


@DAMAGES
def test_damage_while_running_opens_nothing_and_shuts_nobody_out(
    tmp_path: Path, damage: Damage, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys.jsonl"
    (key, record), (gone, second) = new_key("acme", now=NOW), new_key("acme", now=NOW)
    records: list[KeyRecord] = [record, second, Revoked(id=second.id, at=NOW)]
    append_new(path, records)
    keyring = Keyring(path)
    door = door_of(keyring)
    damage(path)
    for _ in range(3):
        keyring.look()
    assert door.authenticate(bearer(key)).name == "acme"
    for headers in ({}, bearer("none"), bearer(gone)):  # a lost revocation revives nothing
        with pytest.raises(Unauthorized):
            door.authenticate(headers)
    sent, torn = parse_lines(keyring.text)
    assert (len(sent), torn) == (3, 0)  # what followers get
    assert [one.levelno for one in caplog.records] == [logging.ERROR]
    third, fresh = new_key("acme", now=NOW)
    append_new(path, [fresh])
    keyring.look()
    for good in (key, third):
        assert door.authenticate(bearer(good)).name == "acme"


@DAMAGES
def test_damage_while_nothing_ran_opens_nothing(tmp_path: Path, damage: Damage) -> None:
    path = tmp_path / "keys.jsonl"
    append_new(path, [new_key("acme", now=NOW)[1]])
    damage(path)
    door = door_of(Keyring(path))
    with pytest.raises(Unauthorized):
        door.authenticate({})


@DAMAGES
def test_a_lost_revocation_revives_no_key_after_a_restart(tmp_path: Path, damage: Damage) -> None:
    """The file comes back from an old copy, or is cut, while no edge runs."""
    path = tmp_path / "keys.jsonl"
    (key, record), (gone, second) = new_key("acme", now=NOW), new_key("acme", now=NOW)
    append_new(path, [record, second])
    old = path.read_bytes()
    append_new(path, [Revoked(id=second.id, at=NOW)])
    path.write_bytes(old)
    book, _ = read_book(path)
    assert book.revoked(second.id) is not None
    door = door_of(Keyring(path))
    assert door.authenticate(bearer(key)).name == "acme"
    with pytest.raises(Unauthorized):
        door.authenticate(bearer(gone))
    damage(path)
    append_new(path, [record, second])  # and what is written anew revives nothing either
    with pytest.raises(Unauthorized):
        door_of(Keyring(path)).authenticate(bearer(gone))


def test_revocations_of_a_file_that_was_copied_here_are_marked(tmp_path: Path) -> None:
    elsewhere, path = tmp_path / "elsewhere" / "keys.jsonl", tmp_path / "keys.jsonl"
    _, record = new_key("acme", now=NOW)
    append_new(elsewhere, [record, Revoked(id=record.id, at=NOW)])
    path.write_bytes(elsewhere.read_bytes())
    Keyring(path)
    assert marked_by(path) == [Revoked(id=record.id, at=NOW)]
    before = mark_of(path).stat()
    Keyring(path).look()
    assert mark_of(path).stat().st_mtime_ns == before.st_mtime_ns


def test_a_file_that_was_copied_here_is_marked_when_it_is_read(tmp_path: Path) -> None:
    elsewhere, path = tmp_path / "elsewhere" / "keys.jsonl", tmp_path / "keys.jsonl"
    append_new(elsewhere, [new_key("acme", now=NOW)[1]])
    path.write_bytes(elsewhere.read_bytes())
    assert marked_by(path) is None
    Keyring(path)
    assert marked_by(path) == []
    path.unlink()
    with pytest.raises(Unauthorized):
        door_of(Keyring(path)).authenticate({})


def test_garbage_without_a_mark_is_said_once_and_closes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys.jsonl"
    _garbage(path)
    keyring = Keyring(path)
    keyring.look()
    assert len(caplog.records) == 1
    with pytest.raises(Unauthorized):
        door_of(keyring).authenticate({})


def test_a_lost_revocation_is_an_error_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys.jsonl"
    key, record = new_key("acme", now=NOW)
    append_new(path, [record])
    whole = path.read_bytes()
    append_new(path, [Revoked(id=record.id, at=NOW)])
    keyring = Keyring(path)
    path.write_bytes(whole)
    keyring.look()
    assert [one.levelname for one in caplog.records] == ["ERROR"]
    with pytest.raises(Unauthorized):
        door_of(keyring).authenticate(bearer(key))


def test_what_cannot_be_read_closes_until_it_can(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys.jsonl"
    path.mkdir()  # as unreadable as a file without permission, also for root
    keyring = Keyring(path)
    keyring.look()
    with pytest.raises(Unauthorized):
        door_of(keyring).authenticate({})
    assert len(caplog.records) == 1
    path.rmdir()
    keyring.look()
    assert door_of(keyring).authenticate({}).name == "anonymous"


def test_no_keys_yet(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "keys.jsonl"
    for _ in range(2):  # without the file, and with the empty one of a follower
        assert door_of(Keyring(path)).authenticate({}).name == "anonymous"
        append_new(path, [])
    assert not caplog.records
