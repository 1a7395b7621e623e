"""A pool that is full of reservations: nobody's answer suffers, and nobody is forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tests.regional.node.desk import answer_ids, done_of
from tests.regional.node.little import little_region
from tests.regional.node.little_parts import direct, split

NODES = (("p", "prefill"), ("d", "decode"))
PROMPTS = ["".join(chr(97 + (n * n + k) % 26) for n in range(90)) for k in range(5)]
ROOMY, FULL = 100, 24
"""Blocks of a pool. A prompt takes six."""
LEASE_S = 2.0


async def until(ready: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not ready():
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("woken", ["before the leases end", "after the leases end"])
def test_reservations_that_fill_the_pool(woken: str) -> None:
    """The reader is stopped, so none of them is filled; one more finds no room and waits."""

    async def test() -> None:
        async with little_region(*NODES, blocks=ROOMY) as region:
            wanted = [answer_ids(await region.answer(one, max_tokens=20)) for one in PROMPTS]
        lease_s = 20.0 if woken.startswith("before") else LEASE_S
        async with little_region(*NODES, blocks=FULL, lease_s=lease_s) as region:
            reader, writer = region.nodes["p"], region.nodes["d"]
            first = asyncio.create_task(region.answer(PROMPTS[0], direct("d"), max_tokens=20))
            await until(lambda: writer.front.stats.generated_tokens > 2)
            reader.freeze()
            rest = [
                asyncio.create_task(region.answer(one, split("p", "d"), max_tokens=20))
                for one in PROMPTS[1:]
            ]
            await until(lambda: writer.rank.used >= 18)
            await until(lambda: region.dispatcher.queued > 0)
            assert answer_ids(await first) == wanted[0], "it is answered beside them"
            if woken.startswith("after"):
                await until(lambda: writer.rank.used == 0)  # each lease has run out
            reader.thaw()
            for task, ids in zip(rest, wanted[1:], strict=True):
                events = await task
                assert answer_ids(events) == ids
                assert done_of(events).usage.completion_tokens == len(ids)

    asyncio.run(test())
