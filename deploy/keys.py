"""The key file of a world, as its operator works on it."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

from core.config import World
from core.config_tenants import ANONYMOUS
from core.errors import ConfigError
from core.keys import KeyBook, Revoked, append_new, as_lines, new_key, parse_lines, read_book
from core.nearest import did_you_mean
from deploy.where import is_only_the_default

DAY_S = 86_400


def create(world: World, tenant: str, label: str, days: int | None) -> None:
    """Print a new key. Raises ConfigError."""
    _known_tenant(world, tenant)
    now = int(time.time())
    expires = None if days is None else now + days * DAY_S
    key, record = new_key(tenant, now=now, label=label, expires=expires)
    first = not book_of(world).made
    append_new(key_file(world), [record])
    print(key)
    _say(
        f"key {record.id} of tenant {tenant}, for the world {world.topology.name!r} in "
        f"{world.state}; it is not shown again"
    )
    if is_only_the_default(world):
        _say(
            "no world runs here; the key is kept for the next `skerry up` in this folder "
            f"({Path.cwd()})"
        )
    if first:
        _tell_closed(world, tenant)


def revoke(world: World, key: str) -> None:
    """`key`: its ID, or all of it. Raises ConfigError."""
    book = book_of(world)
    name = key.removeprefix("sk-skerry-")[:12]
    known = [one.id for one in book.created()]
    if name not in known:
        hint = did_you_mean(name, known, "`skerry keys list` shows them")
        raise ConfigError(f"no key has the ID {name!r}; {hint}")
    if append_new(key_file(world), [Revoked(id=name, at=int(time.time()))]):
        _say(f"key {name} is revoked")
    else:
        _say(f"key {name} was revoked before")


def export(world: World) -> None:
    """Print all records."""
    sys.stdout.write(as_lines(book_of(world).records()).decode())


def bring_in(world: World, file: Path) -> None:
    """Add the records of `file`. Raises ConfigError, and adds none, where a line is no record."""
    records, torn = parse_lines(_read(file))
    if torn:
        raise ConfigError(f"{file}: {torn} lines are no key records; nothing was imported")
    first = not book_of(world).made
    fresh = append_new(key_file(world), records)
    revoked = sum(isinstance(record, Revoked) for record in fresh)
    _say(f"{len(fresh) - revoked} keys and {revoked} revocations are new")
    if first and book_of(world).made:
        _tell_closed(world, "NAME")


def listing(book: KeyBook, now: float) -> Iterator[str]:
    yield f"{'ID':<14}{'TENANT':<20}{'STATE':<10}{'MADE':<12}LABEL"
    for one in book.created():
        if book.revoked(one.id) is not None:
            state = "revoked"
        else:
            state = "expired" if one.expires is not None and now >= one.expires else "good"
        made = time.strftime("%Y-%m-%d", time.gmtime(one.at))
        yield f"{one.id:<14}{one.tenant:<20}{state:<10}{made:<12}{one.label}".rstrip()


def key_file(world: World) -> Path:
    return world.state / world.topology.access.keys


def book_of(world: World) -> KeyBook:
    """Raises ConfigError."""
    book, torn = read_book(key_file(world))
    if torn:
        _say(f"{key_file(world)}: {torn} torn lines are skipped")
    if book.made and not len(book):
        _say(f"{key_file(world)}: keys were made, and none is left in it; callers need one still")
    return book


def _tell_closed(world: World, tenant: str) -> None:
    """What the first key changes."""
    if world.topology.access.anonymous != "until-keys":
        return
    from deploy.worker.shelves import shelved  # only here: it brings an HTTP client

    if not is_only_the_default(world):
        _say("from now on callers of this world need a key")
    workers = shelved(world.state, world.topology.edges)
    nobodys = [name for name, card in sorted(workers.items()) if card.tenant == ANONYMOUS]
    if nobodys:
        _say(
            f"Workers that act for nobody now: {', '.join(nobodys)}; `skerry worker deploy "
            f"--tenant {tenant}` again gives one to a tenant"
        )


def _known_tenant(world: World, name: str) -> None:
    known = sorted(set(world.topology.tenants) - {ANONYMOUS})
    if name not in known:
        hint = did_you_mean(name, known, f"known: {', '.join(known) or 'none'}")
        raise ConfigError(f"{world.path}: no tenant is named {name!r}; {hint}")


def _read(file: Path) -> bytes:
    try:
        return sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error


def _say(line: str) -> None:
    print(line, file=sys.stderr)
