"""Answers that push each other out of a decode node's memory, in a whole region: to its host's
memory where there is some, else through prefill; always the text that each would have had alone."""

from __future__ import annotations

import asyncio

import pytest

from core.events import Event, Moved
from regional.node.tiers.opening import TierSetup
from regional.node.tiers.pool_tiers import PoolTiers
from regional.pb import node_pb2 as pb
from tests.regional.node.desk import answer_ids, done_of, fault_of
from tests.regional.node.little import LittleRegion, little_region
from tests.regional.node.little_parts import split

NODES = (("p", "prefill"), ("d", "decode"))
PROMPTS = ["".join(chr(97 + (n * n + k) % 26) for n in range(90)) for k in range(4)]
TOKENS = 100
ENOUGH, LITTLE = 80, 22
"""Blocks of a pool. Each answer takes up to twelve."""
HOST = TierSetup("d", b"a secret of tests", host_bytes=1 << 20)


@pytest.fixture(autouse=True)
def _loading_always_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regional.node.tiers.pool_tiers.pays", lambda *_: True)


async def answers(region: LittleRegion) -> list[list[Event]]:
    asked = (region.answer(prompt, max_tokens=TOKENS) for prompt in PROMPTS)
    return list(await asyncio.gather(*asked))


async def alone() -> list[list[Event]]:
    async with little_region(*NODES, blocks=ENOUGH) as region:
        return [await region.answer(prompt, max_tokens=TOKENS) for prompt in PROMPTS]


def check(crowd: list[list[Event]], wanted: list[list[Event]]) -> int:
    """Every text and usage is the one alone; how many answers moved."""
    for events, quiet in zip(crowd, wanted, strict=True):
        assert answer_ids(events) == answer_ids(quiet)
        assert done_of(events).usage == done_of(quiet).usage
    return sum(any(isinstance(one, Moved) for one in events) for events in crowd)


def test_into_the_hosts_memory_and_back() -> None:
    async def test() -> None:
        wanted = await alone()
        assert max(len(answer_ids(one)) for one in wanted) > 60
        async with little_region(*NODES, blocks=LITTLE, tiers={"d": HOST}) as region:
            assert check(await answers(region), wanted) > 0
            node = region.nodes["d"]
            assert node.rank.engine.scheduler.counters.preemptions > 0
            (shelf,) = node.tiers._pools[0].shelves
            assert shelf.counts.written > 0
            assert shelf.counts.loaded > 0, "what was kept came back"

    asyncio.run(test())


def test_without_it_through_prefill() -> None:
    async def test() -> None:
        wanted = await alone()
        async with little_region(*NODES, blocks=LITTLE) as region:
            assert check(await answers(region), wanted) > 0
            assert region.nodes["p"].front.kv_bytes_sent > 0

    asyncio.run(test())


def test_a_fault_of_the_tier_costs_no_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(*_: object) -> bool:
        raise RuntimeError("as the test wants it")

    async def test() -> None:
        wanted = await alone()
        async with little_region(*NODES, blocks=LITTLE, tiers={"d": HOST}) as region:
            monkeypatch.setattr(PoolTiers, "_copy", broken)
            assert check(await answers(region), wanted) > 0

    asyncio.run(test())
    assert "was not kept" in caplog.text


def test_a_caller_that_leaves_while_its_blocks_are_copied_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test() -> None:
        copying, go_on = asyncio.Event(), asyncio.Event()

        async def slow(*_: object) -> bool:
            copying.set()
            await go_on.wait()
            return True

        async with little_region(*NODES, blocks=LITTLE, tiers={"d": HOST}) as region:
            monkeypatch.setattr(PoolTiers, "_copy", slow)
            asked = [
                asyncio.create_task(region.answer(prompt, max_tokens=TOKENS)) for prompt in PROMPTS
            ]
            await asyncio.wait_for(copying.wait(), 10)
            for one in asked:
                one.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
            assert region.nodes["d"].rank.used > 0, "what is being copied stays in place"
            go_on.set()

    asyncio.run(test())


@pytest.mark.parametrize("nodes", [(*NODES, ("e", "decode")), NODES], ids=["two", "one"])
def test_a_node_that_stops_gives_its_answers_to_another(nodes: tuple[tuple[str, str], ...]) -> None:
    """Without a break, where there is another to take them; else with an error that has a name."""

    async def test() -> None:
        (wanted, *_) = await alone()
        async with little_region(*nodes, blocks=ENOUGH) as region:
            asked = asyncio.create_task(
                region.answer(PROMPTS[0], split("p", "d"), max_tokens=TOKENS)
            )
            node = region.nodes["d"]
            while node.front.stats.generated_tokens < 5:
                await asyncio.sleep(0)
            node.front.drain(0.0)
            assert node.session is not None
            beat = pb.NodeMessage(heartbeat=pb.Heartbeat(draining=node.front.draining))
            region.router.received(node.session, beat)
            events = await asked
        assert len(answer_ids(events)) > 0
        if len(nodes) > len(NODES):
            assert check([events], [wanted]) == 1
        else:
            assert answer_ids(events) == answer_ids(wanted)[: len(answer_ids(events))]
            assert fault_of(events).code == "region_unavailable"

    asyncio.run(test())
