"""`POST /internal/v1/purge`: what a region is asked and tells, in front of the real router."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import msgspec

from core.batches import QUEUE_PRIORITY, QueuedItem, Submission
from core.config import DiskTier, World, parse
from core.kv.tiers.keyring import Keyring
from core.kv.tiers.slab import open_slab, slab_name
from core.purge import PURGE_PATH, NodePurged, PurgeAsk, RegionPurged
from core.types import ModelName
from regional.pb import node_pb2 as pb
from regional.purge_files import purge_files
from regional.queue.store import Store
from tests.core.kv.tiers.made import SHAPE, chain
from tests.core.kv.tiers.test_slab import BYTES
from tests.regional.fake_node import MODEL, FakeNode
from tests.regional.fakes import Here, ask, region, run, topology

NODE = ("d1", "decode")
CANARY = "a text that is nowhere else"


def answers(node: FakeNode, message: pb.RouterMessage) -> None:
    """As a node that had three blocks on disk."""
    if message.HasField("purge"):
        told = pb.Purged(id=message.purge.id, cached_blocks=2, disk_blocks=3)
        node.say(pb.NodeMessage(purged=told))


def batch(namespace: str) -> Submission:
    request = msgspec.structs.replace(
        ask(CANARY), namespace=namespace, priority=QUEUE_PRIORITY, id=f"r-{namespace}"
    )
    items = (QueuedItem(request=request, note=b"n"),)
    return Submission(id=f"b-{namespace}", namespace=namespace, model=ModelName(MODEL), items=items)


async def purge(here: Here, namespace: str) -> RegionPurged:
    body = msgspec.json.encode(PurgeAsk(namespace))
    async with here.client.post(here.base + PURGE_PATH, data=body, headers=here.headers) as told:
        assert told.status == 200
        return msgspec.json.decode(await told.read(), type=RegionPurged)


def test_the_queue_lets_go_of_one_namespace(tmp_path: Path) -> None:
    async def test() -> None:
        async with region(tmp_path, NODE) as here:
            kept = here.app._kept
            for name in ("", "harbour"):
                await kept.add(batch(name))
            assert await purge(here, "") == RegionPurged(batches=1, requests=0)
            assert await kept.state("b-", "") is None
            assert await kept.state("b-harbour", "harbour") is not None
            assert (await purge(here, "nobody")).batches == 0

    run(test())


def test_what_runs_is_ended_before_nodes_are_asked(tmp_path: Path) -> None:
    async def test() -> None:
        async with region(tmp_path, NODE) as here:
            node = await here.joined(*NODE, answers)
            running = here.asking(ask(request_id="mine"))
            await node.got("start")
            told = await purge(here, "")
            done = NodePurged(node="d1", cached_blocks=2, disk_blocks=3)
            assert told == RegionPurged(batches=0, requests=1, nodes=(done,))
            assert getattr((await running)[-1], "code", "") == "cancelled"
            heard = [one.WhichOneof("body") for one in node.heard]
            assert sorted(heard[-2:]) == ["abort", "purge"]
            assert node.heard[heard.index("purge")].purge.namespace == ""

    run(test())


def test_a_node_that_goes_meanwhile_is_named(tmp_path: Path) -> None:
    async def test() -> None:
        async with region(tmp_path, NODE) as here:
            node = await here.joined(*NODE)
            asked = asyncio.create_task(purge(here, ""))
            await node.got("purge")
            await node.die()
            assert (await asked).nodes == (NodePurged(node="d1", error="it was lost"),)

    run(test())


def test_nobody_purges_without_the_secret_or_a_namespace(tmp_path: Path) -> None:
    async def test() -> None:
        async with region(tmp_path, NODE) as here:
            url = here.base + PURGE_PATH
            async with here.client.post(url, data=b'{"namespace":""}') as told:
                assert told.status == 403
            for body in (b"", b"[]", b'{"namespace":3}'):
                async with here.client.post(url, data=body, headers=here.headers) as told:
                    assert told.status == 400
                    assert (await told.json())["error"]["code"] == "invalid_request"

    run(test())


def world(folder: Path) -> World:
    described = parse(topology([NODE]))
    (here,) = described.regions
    node = msgspec.structs.replace(here.nodes[0], disk_tier=DiskTier(path="kept"))
    here = msgspec.structs.replace(here, nodes=(node,))
    described = msgspec.structs.replace(described, regions=(here,))
    return World(described, folder / "w.toml", folder)


def test_a_state_folder_without_its_processes_is_purged(tmp_path: Path) -> None:
    described = world(tmp_path)
    secret = described.secret("tiers")
    path = tmp_path / "kept" / slab_name("d1", 0, SHAPE)
    slab = open_slab(path, Keyring(secret), SHAPE, BYTES, "node d1")
    for slot, name in enumerate(("", "harbour")):
        slab.write(slot, *chain(1, name, secret)[0])
    store = Store(tmp_path / "queue-here.sqlite")
    for name in ("", "harbour"):
        store.add(batch(name), 1.0)
    store.close()

    told = purge_files(described, "", queues=True)
    assert (told.in_use, told.batches, told.slabs) == (1, 1, ())
    slab.close()
    told = purge_files(described, "", queues=False)
    assert (told.in_use, told.batches) == (0, 0)
    assert [(one.path, one.blocks) for one in told.slabs] == [(str(path), 1)]
    assert Keyring(secret).tag("") not in path.read_bytes()
    assert Keyring(secret).tag("harbour") in path.read_bytes()
    with sqlite3.connect(tmp_path / "queue-here.sqlite") as db:
        assert db.execute("SELECT namespace FROM batches").fetchall() == [("harbour",)]
    purge_files(described, "harbour", queues=True)
    assert CANARY.encode() not in (tmp_path / "queue-here.sqlite").read_bytes()
