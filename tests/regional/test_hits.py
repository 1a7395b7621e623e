"""The three hit rates: what goes wrong with a cache shows in the right one of them."""

from __future__ import annotations

from pathlib import Path

from core.events import Done, Finish
from core.prefix import block_hashes, block_root
from core.status import PromptTokens
from core.types import FinishReason, Usage
from tests.regional.fake_node import FakeNode
from tests.regional.fakes import Here, ask, delta, region, run

PROMPT = b"y" * 200
BLOCKS = b"".join(block_hashes(block_root(b"same", ""), list(PROMPT))[:12])
HELD = 12 * 16


def done(cached: int) -> tuple[Finish, Done]:
    usage = Usage(prompt_tokens=200, completion_tokens=1, cached_tokens=cached)
    return Finish(reason=FinishReason.STOP), Done(usage=usage)


async def asked(here: Here, node: FakeNode, *, cached: int, request_id: str = "r") -> None:
    """One request that `node` answers; it says how much it had cached."""
    answer = here.asking(ask(PROMPT.decode(), request_id=request_id))
    start = (await node.got("start")).start
    node.output(start.attempt_id, delta("a"), *done(cached))
    await answer


def told(here: Here) -> PromptTokens:
    rates = here.app.publisher.snapshot().more.prompts
    page = here.app._rendered().decode()
    for kind in ("all", "reusable", "routed", "delivered"):
        line = f'skerry_router_prompt_tokens_total{{kind="{kind}"}} {float(getattr(rates, kind))}'
        assert line in page
    return rates


async def holding(here: Here, node: FakeNode) -> None:
    node.cache(1, snapshot=True, stored=BLOCKS)
    node.beat()  # upon which the router says that something changed
    await here.until(lambda: here.app.router.index.blocks == 12)


def test_all_is_well(tmp_path: Path) -> None:
    async def test() -> None:
        async with region(tmp_path, ("d1", "decode")) as here:
            node = await here.joined("d1", "decode")
            await holding(here, node)
            await asked(here, node, cached=HELD)
            assert told(here) == PromptTokens(all=200, reusable=HELD, routed=HELD, delivered=HELD)

    run(test())


def test_an_eviction_shows_in_what_is_delivered(tmp_path: Path) -> None:
    async def test() -> None:
        async with region(tmp_path, ("d1", "decode")) as here:
            node = await here.joined("d1", "decode")
            await holding(here, node)
            await asked(here, node, cached=32)  # the rest had to go before it came to be read
            assert told(here) == PromptTokens(all=200, reusable=HELD, routed=HELD, delivered=32)

    run(test())


def test_a_misroute_shows_in_what_is_routed(tmp_path: Path) -> None:
    async def test() -> None:
        async with region(tmp_path, ("d1", "decode"), ("d2", "decode")) as here:
            holder = await here.joined("d1", "decode")
            await holding(here, holder)
            for number in range(4):  # it has no slot left
                here.background.append(here.asking(ask("x", request_id=f"other{number}")))
                await holder.got("start")
            elsewhere = await here.joined("d2", "decode")
            await asked(here, elsewhere, cached=0)
            # it was to be fetched, and the node says that nothing came
            assert told(here) == PromptTokens(all=200, reusable=HELD, pulled=HELD)

    run(test())


def test_a_dead_event_stream_shows_in_more_delivered_than_was_known(tmp_path: Path) -> None:
    async def test() -> None:
        async with region(tmp_path, ("d1", "decode")) as here:
            node = await here.joined("d1", "decode")
            await asked(here, node, cached=HELD)
            assert told(here) == PromptTokens(all=200, delivered=HELD)

    run(test())


def test_a_request_that_is_placed_again_counts_once(tmp_path: Path) -> None:
    async def test() -> None:
        async with region(tmp_path, ("d1", "decode"), ("d2", "decode")) as here:
            first = await here.joined("d1", "decode")
            await holding(here, first)
            answer = here.asking(ask(PROMPT.decode()))
            await first.got("start")
            second = await here.joined("d2", "decode")
            await first.die()
            start = (await second.got("start")).start
            second.output(start.attempt_id, delta("a"), *done(0))
            await answer
            assert told(here) == PromptTokens(all=200)

    run(test())


def test_a_gap_is_asked_about_and_filled(tmp_path: Path) -> None:
    async def test() -> None:
        async with region(tmp_path, ("d1", "decode")) as here:
            node = await here.joined("d1", "decode")
            await holding(here, node)
            node.cache(3, evicted=BLOCKS[:16])
            await node.got("recount")
            assert here.app.router.index.blocks == 0
            node.cache(3, snapshot=True, stored=BLOCKS)
            node.beat()
            await here.until(lambda: here.app.router.index.blocks == 12)
            node.cache(7)
            await node.got("recount")
            node.cache(9)  # one question is enough
            node.cache(9, snapshot=True, stored=BLOCKS)
            node.beat()
            await here.until(lambda: here.app.router.index.blocks == 12)
            assert node.unread() == []

    run(test())
