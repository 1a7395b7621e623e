"""A node that keeps blocks below its pool: they come back after a restart, and never wrongly."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from core.engine.lending_messages import Hold
from core.events import Accepted
from core.kv.tiers.shelf import Shelf
from core.types import NodeName, PoolId
from regional.kv_index import BELOW
from regional.node.tiers.opening import TierSetup
from tests.regional.node.little import LittleNode, LittleRegion, little_region
from tests.regional.node.little_parts import cached_of, direct, ids_of, split

PROMPT = "".join(chr(97 + n * n % 26) for n in range(150))
BLOCKS = 9
NODES = (("d", "decode"),)
POOL = PoolId(NodeName("d"), 0)
SECRET = b"a secret of tests"


def setup(folder: Path | None = None, *, host: int = 0, secret: bytes = SECRET) -> TierSetup:
    return TierSetup("d", secret, host_bytes=host, disk_bytes=2 << 20, folder=folder)


def shelf_of(node: LittleNode) -> Shelf:
    (shelf,) = node.tiers._pools[0].shelves
    return shelf


async def until(ready: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not ready():
            await asyncio.sleep(0.001)


async def twice(region: LittleRegion, name: str = "d", prompt: str = PROMPT) -> list[int]:
    """Let a second request find what the first has computed, and wait until it is kept."""
    shelf = shelf_of(region.nodes[name])
    before = shelf.counts.written
    first = ids_of(await region.answer(prompt, direct(name)))
    assert cached_of(await region.answer(prompt, direct(name))) == 16 * BLOCKS
    await until(lambda: shelf.counts.written == before + BLOCKS)
    return first


def run(test: Callable[[], Coroutine[object, object, None]]) -> None:
    asyncio.run(test())


@pytest.mark.parametrize(("shards", "window"), [(1, 0), (2, 0), (1, 32)])
def test_blocks_that_two_requests_used_come_back_after_a_restart(
    tmp_path: Path, shards: int, window: int
) -> None:
    async def test() -> None:
        def started() -> AbstractAsyncContextManager[LittleRegion]:
            return little_region(
                *NODES, tiers={"d": setup(tmp_path)}, shards={"d": shards}, window=window
            )

        async with started() as region:
            fresh = await twice(region)
        async with started() as region:
            shelf = shelf_of(region.nodes["d"])
            assert (region.router.index.size(POOL), len(shelf)) == (0, BLOCKS)
            again = await region.answer(PROMPT, direct("d"))
            assert ids_of(again) == fresh
            assert cached_of(again) == 16 * BLOCKS
            assert (shelf.counts.loaded, shelf.counts.damaged) == (BLOCKS, 0)
            assert cached_of(await region.answer(PROMPT, direct("d"))) == 16 * BLOCKS
            assert shelf.counts.loaded == BLOCKS  # they were in the pool then

    run(test)


def test_a_longer_prompt_uses_what_there_is_and_computes_the_rest(tmp_path: Path) -> None:
    async def test() -> None:
        longer = PROMPT + "and something that nobody has asked so far"
        async with little_region(*NODES, tiers={"d": setup(tmp_path)}) as region:
            await twice(region)
            alone = ids_of(await region.answer(longer, direct("d")))
        async with little_region(*NODES, tiers={"d": setup(tmp_path)}) as region:
            again = await region.answer(longer, direct("d"))
            assert (ids_of(again), cached_of(again)) == (alone, 16 * BLOCKS)

    run(test)


def test_one_request_alone_leaves_nothing_on_disk(tmp_path: Path) -> None:
    async def test() -> None:
        async with little_region(*NODES, tiers={"d": setup(tmp_path)}) as region:
            await region.answer(PROMPT, direct("d"))
            await region.answer("z" + PROMPT, direct("d"))
            await region.settled()
            assert len(shelf_of(region.nodes["d"])) == 0

    run(test)


def test_a_prefill_node_loads_what_it_has_read_before(tmp_path: Path) -> None:
    nodes = (("p", "prefill"), ("d", "decode"), ("e", "decode"))

    async def test() -> None:
        async with little_region(*nodes, tiers={"p": setup(tmp_path)}) as region:
            fresh = ids_of(await region.answer(PROMPT, split("p", "d")))
            assert ids_of(await region.answer(PROMPT, split("p", "e"))) == fresh
            await until(lambda: shelf_of(region.nodes["p"]).counts.written == BLOCKS)
        async with little_region(*nodes, tiers={"p": setup(tmp_path)}) as region:
            again = await region.answer(PROMPT, split("p", "d"))
            assert (ids_of(again), cached_of(again)) == (fresh, 16 * BLOCKS)
            assert region.nodes["p"].front.stats.computed_prompt_tokens == 149 - 16 * BLOCKS

    run(test)


def test_a_decode_node_has_sent_only_what_it_cannot_load(tmp_path: Path) -> None:
    nodes = (("p", "prefill"), ("d", "decode"))

    async def test() -> None:
        async with little_region(*nodes, tiers={"d": setup(tmp_path)}) as region:
            fresh = ids_of(await region.answer(PROMPT, split("p", "d")))
            await region.answer(PROMPT, split("p", "d"))
            await until(lambda: shelf_of(region.nodes["d"]).counts.written == BLOCKS)
        async with little_region(*nodes, tiers={"d": setup(tmp_path)}) as region:
            again = await region.answer(PROMPT, split("p", "d"))
            assert ids_of(again) == fresh
            assert shelf_of(region.nodes["d"]).counts.loaded == BLOCKS
            assert region.nodes["d"].front.kv_bytes_received == 1024  # the last block, not full

    run(test)


def test_a_router_knows_what_lies_below_the_pool(tmp_path: Path) -> None:
    async def test() -> None:
        async with little_region(*NODES, tiers={"d": setup(tmp_path)}) as region:
            await twice(region)
            await until(lambda: region.router.index.size(POOL, BELOW) == BLOCKS)
        async with little_region(*NODES, tiers={"d": setup(tmp_path)}) as region:
            await until(lambda: region.router.index.known(POOL, BELOW))
            assert region.router.index.size(POOL, BELOW) == BLOCKS

    run(test)


def test_a_prompt_goes_to_the_node_that_has_it_on_disk(tmp_path: Path) -> None:
    async def test() -> None:
        both = (("c", "decode"), ("d", "decode"))
        async with little_region(*both, tiers={"d": setup(tmp_path)}) as region:
            await twice(region)
        async with little_region(*both, tiers={"d": setup(tmp_path)}) as region:
            await until(lambda: region.router.index.size(POOL, BELOW) == BLOCKS)
            other, ours = await region.answer("z" + PROMPT), await region.answer(PROMPT)
            begun = [answer[0] for answer in (other, ours)]
            assert [one.decode for one in begun if isinstance(one, Accepted)] == ["c", "d"]
            assert [cached_of(other), cached_of(ours)] == [0, 16 * BLOCKS]

    run(test)


def test_the_host_tier_brings_back_what_the_pool_had_no_room_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("regional.node.tiers.pool_tiers.pays", lambda *_: True)

    async def test() -> None:
        tiers = {"d": setup(host=1 << 20)}
        async with little_region(*NODES, tiers=tiers, blocks=14) as region:
            fresh = await twice(region)
            await region.answer("y" + PROMPT, direct("d"))  # takes the room of the first
            assert region.nodes["d"].rank.engine.scheduler.blocks.cache.idle <= 14
            again = await region.answer(PROMPT, direct("d"))
            assert (ids_of(again), cached_of(again)) == (fresh, 16 * BLOCKS)
            assert shelf_of(region.nodes["d"]).counts.loaded > 0

    run(test)


# ---------------------------------------------------------------- what goes wrong


def damage(folder: Path, content: bytes = b"\xff" * 64) -> None:
    """The last thing in the file: the content of one block."""
    (slab,) = folder.glob("*.slab")
    with slab.open("r+b") as file:
        file.seek(-512, 2)
        file.write(content)


def test_a_damaged_block_is_computed_again(tmp_path: Path) -> None:
    async def test() -> None:
        async with little_region(*NODES, tiers={"d": setup(tmp_path)}) as region:
            fresh = await twice(region)
        damage(tmp_path)
        async with little_region(*NODES, tiers={"d": setup(tmp_path)}) as region:
            again = await region.answer(PROMPT, direct("d"))
            assert ids_of(again) == fresh
            assert cached_of(again) == 16 * (BLOCKS - 1)
            shelf = shelf_of(region.nodes["d"])
            assert (shelf.counts.damaged, len(shelf)) == (1, BLOCKS - 1)

    run(test)


def test_with_another_secret_everything_is_foreign(tmp_path: Path) -> None:
    async def test() -> None:
        async with little_region(*NODES, tiers={"d": setup(tmp_path)}) as region:
            fresh = await twice(region)
        other = {"d": setup(tmp_path, secret=b"another secret")}
        async with little_region(*NODES, tiers=other) as region:
            again = await region.answer(PROMPT, direct("d"))
            assert (ids_of(again), cached_of(again)) == (fresh, 0)
            assert shelf_of(region.nodes["d"]).counts.foreign == BLOCKS

    run(test)


def test_a_second_node_on_the_folder_goes_on_without_and_says_whose_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        both = (("d", "decode"), ("e", "decode"))
        same = {"d": setup(tmp_path), "e": setup(tmp_path)}
        async with little_region(*both, tiers=same) as region:
            held = [name for name in ("d", "e") if region.nodes[name].tiers._pools]
            assert len(held) == 1, "whoever came first has it"
            for name in ("d", "e"):
                ids_of(await region.answer(PROMPT, direct(name)))

    with caplog.at_level(logging.ERROR, "skerry.tiers"):
        run(test)
    (line,) = [one.message for one in caplog.records]
    assert "the disk tier is off: " in line
    # The first one may not have written its name yet.
    assert re.search(r"is in use by (node [de] \(pid |another process)", line)


def test_a_folder_that_cannot_be_used_costs_nothing_but_the_tier(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()

    async def test() -> None:
        async with little_region(*NODES, tiers={"d": setup(tmp_path / "file")}) as region:
            ids_of(await region.answer(PROMPT, direct("d")))
            assert region.nodes["d"].tiers.status() == []

    with caplog.at_level(logging.ERROR, "skerry.tiers"):
        run(test)
    assert [one.message for one in caplog.records] == [
        f"the disk tier is off: {tmp_path / 'file'}: File exists"
    ]


def test_a_disk_that_fails_in_the_middle_costs_a_request_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with little_region(*NODES, tiers={"d": setup(tmp_path)}) as region:
            fresh = await twice(region)
        async with little_region(*NODES, tiers={"d": setup(tmp_path)}) as region:
            shelf = shelf_of(region.nodes["d"])
            slots = shelf._slots

            def broken(slot: int, entry: object) -> bytes:
                raise OSError(5, "Input/output error")

            monkeypatch.setattr(slots, "read", broken)
            again = await region.answer(PROMPT, direct("d"))
            assert (ids_of(again), cached_of(again)) == (fresh, 0)
            assert shelf.off == "Input/output error"
            await until(lambda: region.router.index.size(POOL, BELOW) == 0)
            (told,) = region.nodes["d"].tiers.status()
            assert (told.off, told.failed, told.blocks) == ("Input/output error", 1, 0)

    run(test)


def test_a_disk_that_hangs_is_given_up_and_everything_comes_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with little_region(*NODES, tiers={"d": setup(tmp_path)}) as region:
            fresh = await twice(region)
        async with little_region(*NODES, tiers={"d": setup(tmp_path)}, lease_s=0.2) as region:
            loading, free = asyncio.Event(), asyncio.Event()

            async def hang(kept: object) -> list[bytes | None]:
                loading.set()
                await free.wait()
                raise AssertionError("nobody waits for it any more")

            monkeypatch.setattr(shelf_of(region.nodes["d"]), "load", hang)
            again = await region.answer(PROMPT, direct("d"))
            assert (ids_of(again), cached_of(again)) == (fresh, 0)
            assert loading.is_set()

    run(test)


def test_a_client_that_leaves_while_blocks_are_loaded_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with little_region(*NODES, tiers={"d": setup(tmp_path)}) as region:
            await twice(region)
        async with little_region(*NODES, tiers={"d": setup(tmp_path)}) as region:
            node = region.nodes["d"]
            loading = asyncio.Event()

            async def hang(kept: object) -> list[bytes | None]:
                loading.set()
                await asyncio.Event().wait()
                raise AssertionError("it never comes")

            monkeypatch.setattr(shelf_of(node), "load", hang)
            asked = asyncio.create_task(region.answer(PROMPT, direct("d")))
            await loading.wait()
            asked.cancel()
            await asyncio.wait([asked])
            await region.settled()
            assert node.rank.used == 0

    run(test)


def test_a_tier_that_is_slower_than_computing_is_left_alone(tmp_path: Path) -> None:
    async def test() -> None:
        async with little_region(*NODES, tiers={"d": setup(tmp_path)}) as region:
            await twice(region)
        async with little_region(*NODES, tiers={"d": setup(tmp_path)}) as region:
            node = region.nodes["d"]
            ids_of(await region.answer("something else", direct("d")))
            await until(lambda: node.front.stats.prefill_tokens_per_s > 0)
            node.tiers._pools[0].rate.bytes_per_s = 1.0
            assert cached_of(await region.answer(PROMPT, direct("d"))) == 0
            assert shelf_of(node).counts.loaded == 0

    run(test)


def test_blocks_are_copied_in_turns_when_the_disk_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held blocks cannot be evicted: nobody may hold them for as long as a disk likes."""
    monkeypatch.setattr("regional.node.tiers.pool_tiers.HOLD_S", 0.0)

    async def test() -> None:
        async with little_region(*NODES, tiers={"d": setup(tmp_path)}) as region:
            await twice(region)
            commands = region.nodes["d"].rank.commands
            assert sum(isinstance(one, Hold) for one in commands) == BLOCKS

    run(test)
