"""A namespace leaves a node: nothing of it is left in caches, memory, tiers, or on disk."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from core.events import Fault
from core.kv.tiers.keyring import Keyring
from core.kv.tiers.shred import shred_file
from core.purge import NodePurged
from regional.kv_index import BELOW
from tests.regional.node.little import LittleNode, little_region
from tests.regional.node.little_parts import cached_of, direct, ids_of
from tests.regional.node.test_tiers import (
    BLOCKS,
    NODES,
    POOL,
    PROMPT,
    SECRET,
    run,
    setup,
    shelf_of,
    twice,
    until,
)


def memory_of(node: LittleNode) -> bytes:
    return b"".join(bytes(memory) for memory in node.rank._memory)


@pytest.mark.parametrize("shards", [1, 2])
def test_nothing_of_a_namespace_is_left(tmp_path: Path, shards: int) -> None:
    async def test() -> None:
        async with little_region(
            *NODES, tiers={"d": setup(tmp_path, host=1 << 20)}, shards={"d": shards}
        ) as region:
            node = region.nodes["d"]
            fresh = ids_of(await region.answer(PROMPT, direct("d")))
            assert cached_of(await region.answer(PROMPT, direct("d"))) == 16 * BLOCKS
            host, disk = node.tiers._pools[0].shelves
            await until(lambda: host.counts.written == disk.counts.written == BLOCKS)
            assert any(memory_of(node))
            (slab,) = tmp_path.glob("*.slab")
            owner = Keyring(SECRET).tag("")
            assert owner in slab.read_bytes()

            (told,) = await region.router.purges.everywhere("")
            assert told == NodePurged(
                node="d", cached_blocks=BLOCKS, scrubbed_blocks=BLOCKS + 1, host_blocks=BLOCKS,
                disk_blocks=BLOCKS,
            )  # fmt: skip
            assert not any(memory_of(node))
            assert not any(host._slots._memory[:])  # type: ignore[attr-defined] # of this kind of slots
            assert owner not in slab.read_bytes()
            await until(
                lambda: region.router.index.size(POOL) == region.router.index.size(POOL, BELOW) == 0
            )
            again = await region.answer(PROMPT, direct("d"))
            assert (ids_of(again), cached_of(again)) == (fresh, 0)

    run(test)


def test_another_namespace_keeps_everything(tmp_path: Path) -> None:
    async def test() -> None:
        async with little_region(*NODES, tiers={"d": setup(tmp_path)}) as region:
            await twice(region)
            (told,) = await region.router.purges.everywhere("another")
            assert told == NodePurged(node="d")
            assert cached_of(await region.answer(PROMPT, direct("d"))) == 16 * BLOCKS
            assert len(shelf_of(region.nodes["d"])) == BLOCKS

    run(test)


def test_what_runs_is_ended_first_and_its_blocks_are_overwritten_too() -> None:
    async def test() -> None:
        async with little_region(*NODES) as region:
            node = region.nodes["d"]
            asked = asyncio.create_task(region.answer(PROMPT, direct("d"), max_tokens=500))
            await until(lambda: node.front.stats.generated_tokens > 3)
            (told,) = await region.router.purges.everywhere("")
            assert (told.requests, told.error) == (1, "")
            assert not any(memory_of(node))
            last = (await asked)[-1]
            assert isinstance(last, Fault)
            assert last.code == "cancelled"

    run(test)


def test_two_purges_at_once_both_end() -> None:
    async def test() -> None:
        async with little_region(*NODES) as region:
            ids_of(await region.answer(PROMPT, direct("d")))
            both = await asyncio.gather(*(region.router.purges.everywhere("") for _ in range(2)))
            assert sorted(one.cached_blocks for (one,) in both) == [0, BLOCKS]

    run(test)


def test_a_node_that_is_lost_is_named() -> None:
    async def test() -> None:
        async with little_region(*NODES) as region:
            node = region.nodes["d"]
            node.freeze()
            asked = asyncio.create_task(region.router.purges.everywhere(""))
            await asyncio.sleep(0)
            node.lose()
            (told,) = await asked
            assert told == NodePurged(node="d", error="it was lost")
            node.thaw()

    run(test)


def test_a_slab_without_its_node_is_shredded(tmp_path: Path) -> None:
    async def test() -> None:
        async with little_region(*NODES, tiers={"d": setup(tmp_path)}) as region:
            fresh = await twice(region)
        (slab,) = tmp_path.glob("*.slab")
        assert shred_file(slab, Keyring(SECRET), "another") == 0
        assert shred_file(slab, Keyring(SECRET), "") == BLOCKS
        assert Keyring(SECRET).tag("") not in slab.read_bytes()
        async with little_region(*NODES, tiers={"d": setup(tmp_path)}) as region:
            again = await region.answer(PROMPT, direct("d"))
            assert (ids_of(again), cached_of(again)) == (fresh, 0)
            counts = shelf_of(region.nodes["d"]).counts
            assert (counts.damaged, counts.foreign) == (0, 0)

    run(test)
