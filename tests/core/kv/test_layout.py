"""From one plan's blocks to another's: bytes are those of an unsplit pool, whatever the two are."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from itertools import pairwise

import msgspec
import pytest

from core.errors import TransferFailed
from core.kv.geometry import KVGeometry, KVGroup
from core.kv.layout import Rectangle, gather, rectangle
from core.kv.shards import PoolMemory, endpoints
from core.kv.ticket import Endpoint
from core.kv.transports.base import BlockMemory
from core.parallel import ModelNumbers, Plan, kv_slice

BLOCKS = 3


def whole_group(chance: random.Random) -> KVGroup:
    latent = chance.random() < 0.2
    return KVGroup(
        name="g", kind="latent" if latent else "full", layers=chance.randint(1, 7),
        kv_heads=1 if latent else chance.choice((1, 2, 3, 4, 6)), head_dim=chance.choice((2, 5)),
        dtype=chance.choice(("float32", "bfloat16", "uint8")),
    )  # fmt: skip


def random_split(group: KVGroup, chance: random.Random) -> dict[int, KVGroup]:
    """The shards of a random plan, with stages of uneven sizes: some may be empty."""
    heads = group.kv_heads
    tp = chance.choice([n for n in range(1, 13) if heads % n == 0 or n % heads == 0])
    stages = chance.randint(1, 4)
    cuts = sorted(chance.randint(0, group.layers) for _ in range(stages - 1))
    edges = [0, *cuts, group.layers]
    numbers = ModelNumbers(group.layers, heads * 12, heads, 99, 99, latent=group.kind == "latent")
    shards: dict[int, KVGroup] = {}
    for stage, (first, last) in enumerate(pairwise(edges)):
        for tp_rank in range(tp):
            head, count = kv_slice(numbers, Plan(tp=tp), tp_rank)
            shards[stage * tp + tp_rank] = msgspec.structs.replace(
                group, first_layer=first, layers=last - first, first_head=head, kv_heads=count
            )
    return shards


def cut(group: KVGroup, block: bytes, part: KVGroup) -> bytes:
    """What `part` holds of an unsplit block, slab by slab."""
    size = group.slab_bytes

    def slab(layer: int, plane: int, head: int) -> bytes:
        at = ((layer * group.parts + plane) * group.kv_heads + head) * size
        return block[at : at + size]

    return b"".join(
        slab(layer, plane, head)
        for layer in range(part.first_layer, part.first_layer + part.layers)
        for plane in range(group.parts)
        for head in range(part.first_head, part.first_head + part.kv_heads)
    )


def pool(shards: dict[int, KVGroup]) -> PoolMemory:
    geometries = {
        rank: KVGeometry(groups=(group,), blocks=(BLOCKS,)) for rank, group in shards.items()
    }
    return PoolMemory(
        {rank: BlockMemory(one, bytearray(one.pool_bytes)) for rank, one in geometries.items()}
    )


def hand_over(source: PoolMemory, target: PoolMemory, pairs: Sequence[tuple[int, int]]) -> int:
    """Copy blocks as a sender and a receiver do; the bytes that were sent."""
    sent = 0
    fill = {n: there for n, (_, there) in enumerate(pairs)}
    for endpoint in endpoints(target.geometries, "nowhere", (fill,)):
        runs = source.runs_for(endpoint)
        for here, there in pairs:
            data = b"".join(source.parts(0, here, runs))
            assert len(data) == endpoint.block_bytes
            target.block(endpoint.rank, 0, there)[:] = data
            sent += len(data)
    return sent


@pytest.mark.parametrize("seed", range(60))
def test_any_plan_to_any_plan_gives_the_slices_of_an_unsplit_pool(seed: int) -> None:
    chance = random.Random(seed)
    group = whole_group(chance)
    source, target = random_split(group, chance), random_split(group, chance)
    here, there = pool(source), pool(target)
    blocks = [os.urandom(group.block_bytes) for _ in range(2)]
    pairs = [(0, 2), (2, 1)]
    for block, (at, _) in zip(blocks, pairs, strict=True):
        for rank, part in source.items():
            if part.layers:
                here.block(rank, 0, at)[:] = cut(group, block, part)
    sent = hand_over(here, there, pairs)
    for block, (_, at) in zip(blocks, pairs, strict=True):
        for rank, part in target.items():
            if part.layers:
                assert bytes(there.block(rank, 0, at)) == cut(group, block, part)
    assert sent == len(blocks) * sum(part.block_bytes for part in target.values())


def test_equal_plans_send_each_block_in_one_run() -> None:
    group = KVGroup(name="g", layers=4, kv_heads=3, head_dim=8, dtype="float32")
    assert len(gather(rectangle(group), {0: group})) == 1
    halves = {n: msgspec.structs.replace(group, first_layer=2 * n, layers=2) for n in (0, 1)}
    assert [run.rank for run in gather(rectangle(group), halves)] == [0, 1]


def test_what_nobody_holds_cannot_be_sent() -> None:
    group = KVGroup(name="g", layers=2, kv_heads=2, head_dim=8, dtype="float32")
    with pytest.raises(TransferFailed, match="no rank here holds KV head 2 of layer 0"):
        gather(Rectangle(0, 2, 1, 2), {0: group})
    with pytest.raises(TransferFailed, match="layer 2"):
        gather(Rectangle(1, 2, 0, 1), {0: group})


@pytest.mark.parametrize("wrong", ["dtype", "block_bytes", "group"])
def test_another_shape_is_refused(wrong: str) -> None:
    group = KVGroup(name="g", layers=2, kv_heads=2, head_dim=8, dtype="float32")
    (endpoint,) = endpoints(pool({0: group}).geometries, "a", ({0: 0},))
    changed = {"dtype": "bfloat16", "block_bytes": 1, "group": 1}[wrong]
    fields = {name: getattr(endpoint, name) for name in Endpoint.__slots__} | {wrong: changed}
    with pytest.raises(TransferFailed, match="another shape"):
        pool({0: group}).runs_for(Endpoint(**fields))
