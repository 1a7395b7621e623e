"""A tier on an event loop: on disk and in memory, and off when something fails."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from core.kv.tiers import shelf as shelves
from core.kv.tiers.catalogue import Wanted
from core.kv.tiers.entry import Entry
from core.kv.tiers.files import SystemFile
from core.kv.tiers.host import HostSlots
from core.kv.tiers.keyring import Keyring
from core.kv.tiers.layout import Layout
from core.kv.tiers.shelf import Shelf
from core.kv.tiers.slab import Slab, lock_file, open_slab
from core.kv.tiers.slots import Slots
from tests.core.kv.tiers.made import SECRET, SHAPE, FullDisk, chain, digests

BYTES = 600_000
Make = Callable[[], Slots]


def on_disk(path: Path) -> Make:
    return lambda: open_slab(path / "slab", Keyring(SECRET), SHAPE, BYTES, "n")


@pytest.fixture(params=["host", "disk"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    if request.param == "disk":
        return on_disk(tmp_path)
    return lambda: HostSlots(SHAPE, 64 * SHAPE.block_bytes)


@asynccontextmanager
async def shelf_of(slots: Slots, held: set[bytes] | None = None) -> AsyncIterator[Shelf]:
    held = set() if held is None else held
    shelf = Shelf("tried", slots, gained=held.add, lost=held.remove)
    try:
        yield shelf
    finally:
        await shelf.close()


def find(shelf: Shelf, entry: Entry) -> bool:
    return shelf.find(Wanted(entry.digest, entry.parent, entry.token_ids)) is not None


def test_what_is_kept_is_found_and_loaded(make: Make) -> None:
    async def body() -> None:
        held: set[bytes] = set()
        blocks = chain(4)
        async with shelf_of(make(), held) as shelf:
            await asyncio.gather(*(shelf.keep(entry, content) for entry, content in blocks))
            await shelf.keep(*blocks[0])
            assert held == set(digests(blocks))
            kept = [shelf.find(Wanted(e.digest, e.parent, e.token_ids)) for e, _ in blocks]
            there = [one for one in kept if one is not None]
            assert await shelf.load(there) == [content for _, content in blocks]
            await shelf.stamp(digests(blocks))
            assert (shelf.counts.written, shelf.counts.loaded, len(shelf)) == (4, 4, 4)

    asyncio.run(body())


def test_a_full_tier_lets_the_oldest_go(make: Make) -> None:
    async def body() -> None:
        held: set[bytes] = set()
        async with shelf_of(make(), held) as shelf:
            blocks = chain(shelf.slots + 5)
            for entry, content in blocks:
                await shelf.keep(entry, content)
            assert shelf.counts.evicted == 5
            assert held == set(digests(blocks[5:]))
            assert not find(shelf, blocks[0][0])

    asyncio.run(body())


def test_what_is_forgotten_is_not_found(make: Make) -> None:
    async def body() -> None:
        async with shelf_of(make()) as shelf:
            ours, theirs = chain(2, "a"), chain(3, "b")
            for entry, content in (*ours, *theirs):
                await shelf.keep(entry, content)
            kept = shelf.find(
                Wanted(theirs[0][0].digest, theirs[0][0].parent, theirs[0][0].token_ids)
            )
            assert kept is not None
            assert await shelf.forget(theirs[0][0].owner) == 3
            assert await shelf.load([kept]) == [None]
            assert not find(shelf, theirs[0][0])
            assert find(shelf, ours[0][0])
            assert shelf.counts.damaged == 0

    asyncio.run(body())


def test_host_memory_holds_nothing_of_what_was_forgotten() -> None:
    slots = HostSlots(SHAPE, 4 * SHAPE.block_bytes)
    entry, content = chain(1, "a")[0]
    slots.write(0, entry, content)
    assert content[:64] in bytes(slots._memory)
    slots.shred(entry.owner)
    assert not any(slots._memory[:])
    slots.close()


def test_a_damaged_block_is_dropped_and_counted(tmp_path: Path) -> None:
    async def body() -> None:
        held: set[bytes] = set()
        blocks = chain(2)
        async with shelf_of(on_disk(tmp_path)(), held) as shelf:
            for entry, content in blocks:
                await shelf.keep(entry, content)
            layout = Layout.within(BYTES, SHAPE.block_bytes, SHAPE.digest)
            with (tmp_path / "slab").open("r+b") as file:
                file.seek(layout.content_at(0))
                file.write(b"\0" * 64)
            kept = [shelf.find(Wanted(e.digest, e.parent, e.token_ids)) for e, _ in blocks]
            there = [one for one in kept if one is not None]
            assert await shelf.load(there) == [None, blocks[1][1]]
            assert shelf.counts.damaged == 1
            assert held == {blocks[1][0].digest}
            await shelf.keep(*blocks[0])  # its place is free again
            assert find(shelf, blocks[0][0])

    asyncio.run(body())


def test_a_wrong_check_is_damage_too() -> None:
    async def body() -> None:
        async with shelf_of(HostSlots(SHAPE, 64 * SHAPE.block_bytes)) as shelf:
            entry, content = chain(1)[0]
            await shelf.keep(entry, b"!" + content[1:])
            kept = shelf.find(Wanted(entry.digest, entry.parent, entry.token_ids))
            assert kept is not None
            assert await shelf.load([kept]) == [None]
            assert shelf.counts.damaged == 1

    asyncio.run(body())


def test_a_full_disk_ends_the_tier_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        layout = Layout.within(BYTES, SHAPE.block_bytes, SHAPE.digest)
        file = FullDisk(SystemFile(lock_file(tmp_path / "slab")), layout.content_at(3) + 100)
        held: set[bytes] = set()
        async with shelf_of(Slab(file, Keyring(SECRET), SHAPE, BYTES, "n"), held) as shelf:
            blocks = chain(6)
            await asyncio.gather(*(shelf.keep(entry, content) for entry, content in blocks))
            assert shelf.off == "No space left on device"
            assert (shelf.counts.written, shelf.counts.failed) == (3, 3)
            assert held == set()
            assert not find(shelf, blocks[0][0])
            await shelf.keep(*blocks[5])
            assert shelf.counts.failed == 3
        told = [one.message for one in caplog.records]
        assert told == ["the tried tier is off from now on: No space left on device"]

    with caplog.at_level(logging.INFO, "skerry.tiers"):
        asyncio.run(body())


_LIMITED = """
import asyncio, logging, resource, sys
from pathlib import Path
from core.kv.tiers.keyring import Keyring
from core.kv.tiers.shelf import Shelf
from core.kv.tiers.slab import open_slab
from tests.core.kv.tiers.made import SECRET, SHAPE, chain

async def main():
    slots = open_slab(Path(sys.argv[1]), Keyring(SECRET), SHAPE, int(sys.argv[2]), "n")
    shelf = Shelf("disk", slots, gained=lambda _: None, lost=lambda _: None)
    resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000))
    for entry, content in chain(64):
        await shelf.keep(entry, content)
    print(shelf.off, 0 < shelf.counts.written < 64, shelf.counts.failed)
    await shelf.close()

asyncio.run(main())
"""


def test_a_limit_on_the_size_of_files_ends_the_tier_and_not_the_process(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _LIMITED, str(tmp_path / "slab"), str(BYTES)],
        cwd=Path(__file__).parents[4], capture_output=True, check=True, text=True,
    )  # fmt: skip
    assert done.stdout == "File too large True 1\n"


def test_a_disk_that_does_not_read_ends_the_tier(tmp_path: Path) -> None:
    async def body() -> None:
        descriptor = lock_file(tmp_path / "slab")
        slots = Slab(SystemFile(descriptor), Keyring(SECRET), SHAPE, BYTES, "n")
        shelf = Shelf("disk", slots, gained=lambda _: None, lost=lambda _: None)
        entry, content = chain(1)[0]
        await shelf.keep(entry, content)
        kept = shelf.find(Wanted(entry.digest, entry.parent, entry.token_ids))
        assert kept is not None
        null = os.open("/", os.O_RDONLY)  # a folder: reading it is refused
        os.dup2(null, descriptor)
        assert await shelf.load([kept]) == [None]
        assert shelf.off == "Is a directory"
        await shelf.close()
        os.close(null)

    asyncio.run(body())


def test_a_disk_that_lags_behind_gets_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> None:
        monkeypatch.setattr(shelves, "MOST_WAITING_BYTES", 3 * SHAPE.block_bytes)
        async with shelf_of(on_disk(tmp_path)()) as shelf:
            blocks = chain(5)
            await asyncio.gather(*(shelf.keep(entry, content) for entry, content in blocks))
            assert (shelf.counts.written, shelf.counts.refused) == (3, 2)
            await shelf.keep(*blocks[4])
            assert shelf.counts.written == 4

    asyncio.run(body())
