"""A region whose nodes are off: it is ready, and who asks brings a node."""

from __future__ import annotations

from pathlib import Path

from core.events import Accepted, Done
from tests.regional.fake_node import MODEL, attempt_of
from tests.regional.fakes import Here, ask, delta, ending, region, run

NODE = ("d1", "decode")
COLD = f"\n[regions.scale.{MODEL}]\nleast = 0\n"


def wanted(here: Here) -> list[int]:
    return [one.nodes for one in here.app.publisher.snapshot().more.wanted]


def test_it_is_ready_and_its_model_is_known_as_cold(tmp_path: Path) -> None:
    async def test() -> None:
        async with region(tmp_path, NODE, more=COLD) as here:
            async with here.client.get(f"{here.base}/readyz") as page:
                assert page.status == 200
            (model,) = here.app.publisher.snapshot().models
            assert model.start_s > 0
            assert here.app.publisher.snapshot().queue_s == 0
        async with (
            region(tmp_path / "other", NODE) as here,
            here.client.get(f"{here.base}/readyz") as page,
        ):
            assert page.status == 503

    (tmp_path / "other").mkdir()
    run(test())


def test_a_request_waits_for_its_node(tmp_path: Path) -> None:
    async def test() -> None:
        async with region(tmp_path, NODE, more=COLD) as here:
            answer = here.asking(ask())
            await here.queued(1)
            await here.until(lambda: wanted(here) == [1])
            assert here.app.publisher.snapshot().queue_s < 10, "published: edges believe it"
            node = await here.joined(*NODE)
            node.output(attempt_of(await node.got("start")), delta("yes"), *ending())
            assert isinstance((await answer)[-1], Done)

    run(test())


def test_a_model_whose_nodes_all_leave_is_cold(tmp_path: Path) -> None:
    async def test() -> None:
        async with region(tmp_path, NODE, more=COLD) as here:
            node = await here.joined(*NODE)
            node.beat(draining=True)
            await here.until(lambda: here.app.publisher.snapshot().models[0].start_s > 0)
            answer = here.asking(ask())
            await here.until(lambda: [
                (one.nodes, one.waiting) for one in here.app.publisher.snapshot().more.wanted
            ] == [(1, 1)])  # fmt: skip
            await node.die()
            node = await here.joined(*NODE)
            node.output(attempt_of(await node.got("start")), delta("yes"), *ending())
            assert isinstance((await answer)[-1], Done)

    run(test())


def test_who_comes_to_one_that_leaves_waits_for_the_next(tmp_path: Path) -> None:
    """It says that it takes nothing new first by refusing, then by its heartbeat."""

    async def test() -> None:
        async with region(tmp_path, NODE, more=COLD) as here:
            node = await here.joined(*NODE)
            answer = here.asking(ask())
            node.failed(attempt_of(await node.got("start")), "decode", "draining")
            await here.queued(1)
            await node.die()
            node = await here.joined(*NODE)
            node.output(attempt_of(await node.got("start")), delta("yes"), *ending())
            first, *_, last = await answer
            assert isinstance(first, Accepted)
            assert isinstance(last, Done)

    run(test())
