"""A whole node, front and rank as processes, with a disk tier: killed, started again, purged."""

from __future__ import annotations

from pathlib import Path

import pytest

from core.kv.tiers.layout import Layout
from regional.pb import node_pb2 as pb
from tests.regional.node.desk import answer_ids, done_of, start, work
from tests.regional.node.processes import PROMPT, SPOKEN, World, in_world
from tests.regional.node.routers import Joined

pytestmark = pytest.mark.world
BLOCKS = 9
DISK = 'disk_tier = { path = "kept", bytes = 4_194_304 }'


def tier(node: Joined) -> pb.Tier:
    beats = [one for one in node.desk.of("heartbeat") if one.heartbeat.tiers]
    return beats[-1].heartbeat.tiers[0] if beats else pb.Tier()


async def asked(node: Joined, name: str) -> int:
    """Ask; how much of the prompt nobody computed."""
    node.say(start(name, work(PROMPT)))
    events = await node.desk.ended(name)
    assert answer_ids(events)[:-1] == SPOKEN
    return done_of(events).usage.cached_tokens


def test_what_was_kept_comes_back_after_a_kill_and_is_gone_after_a_purge(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        async with world.node("writer") as (writer, _):
            assert await asked(writer, "a.1") == 0
            assert await asked(writer, "a.2") == 16 * BLOCKS
            await writer.desk.until(lambda: tier(writer).written == BLOCKS)
        async with world.node("writer") as (writer, _):
            join = world.router.joins[-1]
            assert join.models[0].tier_blocks == Layout.within(4 << 20, 4096, b"").slots
            assert await asked(writer, "b.1") == 16 * BLOCKS
            await writer.desk.until(lambda: tier(writer).loaded == BLOCKS)
            below = [one.cache_events for one in writer.desk.of("cache_events")]
            assert any(one.tier == 1 and len(one.stored) == 16 * BLOCKS for one in below)
            writer.say(pb.RouterMessage(purge=pb.Purge(id="p", namespace="")))
            await writer.desk.until(lambda: bool(writer.desk.of("purged")))
            told = writer.desk.of("purged")[0].purged
            assert (told.id, told.error, told.disk_blocks) == ("p", "", BLOCKS)
            assert told.cached_blocks >= BLOCKS
            assert await asked(writer, "c.1") == 0

    in_world(test, tmp_path, writer=DISK)
