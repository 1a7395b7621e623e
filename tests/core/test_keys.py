"""Keys: shown once, kept as digests; the file survives torn lines, merges and many writers."""

from __future__ import annotations

import fcntl
import stat
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations
from pathlib import Path

import pytest

from core.keys import (
    Created,
    KeyBook,
    KeyRecord,
    Revoked,
    append_new,
    as_lines,
    key_id,
    new_key,
    parse_lines,
)

NOW = 1_000_000


def test_what_is_kept_does_not_give_the_key_away() -> None:
    key, record = new_key("acme", now=NOW, label="laptop")
    assert key.startswith(f"sk-skerry-{record.id}-")
    assert key_id(key) == record.id
    secret = key.rsplit("-", 1)[1]
    assert len(secret) * 5 >= 256  # bits of base32
    assert secret not in as_lines([record]).decode()
    assert key.isascii()
    assert key.isprintable()


def test_keys_differ() -> None:
    keys = {new_key("a", now=NOW)[0] for _ in range(200)}
    assert len({key_id(key) for key in keys}) == 200


def test_a_good_key_and_what_is_near_it() -> None:
    key, record = new_key("acme", now=NOW)
    other, second = new_key("acme", now=NOW)
    book = KeyBook([record, second])
    assert book.check(key, NOW) == record
    swapped = key[:-52] + other[-52:]  # one's ID with another's secret
    last = "a" if key[-1] != "a" else "b"
    for wrong in (
        swapped,
        key[:-1],
        key[:-1] + last,
        key + "a",
        key.upper(),
        f" {key}",
        "",
        "none",
    ):
        assert book.check(wrong, NOW) is None, wrong


def test_expiry() -> None:
    key, record = new_key("acme", now=NOW, expires=NOW + 10)
    book = KeyBook([record])
    assert book.check(key, NOW + 9.9) == record
    assert book.check(key, NOW + 10) is None


def test_a_revocation_wins_in_any_order_and_twice() -> None:
    key, record = new_key("acme", now=NOW)
    end = Revoked(id=record.id, at=NOW + 5)
    again = Created(id=record.id, tenant="acme", digest=record.digest, at=NOW + 9)
    records: tuple[KeyRecord, ...] = (record, end, again)
    for order in permutations(records):
        book = KeyBook(order)
        assert book.check(key, NOW + 20) is None
        assert len(book) == 1


def test_the_file_is_ours_alone_and_says_nothing_twice(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "keys.jsonl"
    _, record = new_key("acme", now=NOW)
    assert append_new(path, [record]) == [record]
    assert append_new(path, [record, Revoked(id=record.id, at=1)]) == [Revoked(id=record.id, at=1)]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert parse_lines(path.read_bytes()) == ([record, Revoked(id=record.id, at=1)], 0)


@pytest.mark.parametrize("cut", [1, 10, 60])
def test_a_torn_last_line_costs_that_line_alone(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "keys.jsonl"
    records = [new_key("acme", now=NOW + i)[1] for i in range(3)]
    append_new(path, records)
    path.write_bytes(path.read_bytes()[:-cut])
    assert parse_lines(path.read_bytes())[0][:2] == records[:2]
    _, fresh = new_key("acme", now=NOW + 9)
    append_new(path, [fresh])
    found, torn = parse_lines(path.read_bytes())
    assert found == ([*records, fresh] if cut == 1 else [*records[:2], fresh])
    assert torn == (0 if cut == 1 else 1)


def test_writers_do_not_lose_each_others_records(tmp_path: Path) -> None:
    path = tmp_path / "keys.jsonl"
    records = [new_key("acme", now=NOW)[1] for _ in range(40)]
    with ThreadPoolExecutor(8) as pool:
        for _ in pool.map(lambda one: append_new(path, [one]), records):
            pass
    found, torn = parse_lines(path.read_bytes())
    assert torn == 0
    assert {one.id for one in found} == {one.id for one in records}


def test_a_writer_waits_for_another_and_sees_what_it_wrote(tmp_path: Path) -> None:
    path = tmp_path / "keys.jsonl"
    _, record = new_key("acme", now=NOW)
    with path.open("ab") as other, ThreadPoolExecutor(1) as pool:
        fcntl.flock(other, fcntl.LOCK_EX)
        written = pool.submit(append_new, path, [record])
        with pytest.raises(TimeoutError):
            written.result(0.3)
        other.write(as_lines([record]))
        other.flush()
        fcntl.flock(other, fcntl.LOCK_UN)
        assert written.result(30) == []
    assert path.read_bytes() == as_lines([record])
