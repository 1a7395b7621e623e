"""The queue behind the region's real port, in front of the real router and a fake node."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path

import msgspec
import pytest

from core.batches import (
    QUEUE_PRIORITY,
    BatchState,
    ItemAnswer,
    OwedPage,
    QueuedItem,
    QueueLeft,
    QueueReply,
    Submission,
    Written,
)
from core.errors import RegionUnavailable
from core.events import Delta, Done, Fault, event_decoder
from core.orders import OrderAsk
from core.types import GenerateRequest, ModelName
from tests.regional.fake_node import MODEL, attempt_of
from tests.regional.fakes import Here, ask, delta, ending, region, run

NODE = ("d1", "combined")


def _batch(*requests: GenerateRequest, name: str = "b1") -> Submission:
    items = tuple(
        QueuedItem(request=msgspec.structs.replace(one, priority=QUEUE_PRIORITY), note=b"n")
        for one in requests
    )
    return Submission(id=name, namespace="", model=ModelName(MODEL), items=items)


async def _ask(
    here: Here, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
) -> tuple[int, bytes]:
    url = f"{here.base}/internal/v1/{path}"
    sent = here.headers if headers is None else headers
    async with here.client.request(method, url, data=io.BytesIO(body), headers=sent) as answer:
        return answer.status, await answer.read()


async def _reply(
    here: Here, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
) -> QueueReply:
    status, data = await _ask(here, method, path, body, headers)
    assert status == 200
    return msgspec.msgpack.decode(data, type=QueueReply)


async def _done(here: Here, name: str = "b1") -> tuple[ItemAnswer, ...]:
    async with asyncio.timeout(30):
        while True:
            reply = await _reply(here, "GET", f"queue/{name}")
            assert isinstance(reply, BatchState)
            if reply.status == "done":
                return reply.answers
            await asyncio.sleep(0.02)


def test_a_batch_runs_after_everybody_else_and_is_told(tmp_path: Path) -> None:
    async def test() -> None:
        async with region(tmp_path, NODE) as here:
            node = await here.joined(*NODE)
            body = msgspec.msgpack.encode(_batch(ask("one"), ask("x" * 5000, request_id="r2")))
            queued = await _reply(here, "POST", "queue", body)
            assert isinstance(queued, BatchState)
            start = await node.got("start")
            assert here.app.router.dispatcher.queued == 0
            node.output(attempt_of(start), delta("yes"), *ending())
            answers = [list(event_decoder().feed(one.events)) for one in await _done(here)]
            [said, *_, end] = answers[0]
            assert isinstance(said, Delta)
            assert (said.text, type(end)) == ("yes", Done)
            [fault] = answers[1]
            assert isinstance(fault, Fault)
            assert fault.code == "context_length_exceeded"
            owed = await _reply(here, "GET", "owed?collector=a")
            assert isinstance(owed, OwedPage)
            assert [(one.request_id, one.outcome) for one in owed.items] == [
                ("r1", "ok"), ("r2", "context_length_exceeded"),
            ]  # fmt: skip
            names = Written(request_ids=("r1", "r2", "r3"))
            for fresh in (("r1", "r2"), ()):
                wrote = msgspec.msgpack.encode(names)
                reply = await _reply(here, "POST", "owed?collector=a", wrote)
                assert reply == Written(request_ids=fresh)
            for method, path in (("GET", "owed"), ("POST", "owed?collector=a")):
                refusal = await _reply(here, method, path, b"\xc1")
                assert isinstance(refusal, Fault)
            told = await _reply(here, "GET", "queue/b1")
            assert isinstance(told, BatchState)
            assert told.told
            async with here.client.get(f"{here.base}/metrics") as page:
                assert "skerry_router_kept_requests" in await page.text()

    run(test())


def test_what_is_queued_in_a_region_that_leaves_is_run_and_counted(tmp_path: Path) -> None:
    async def left(here: Here) -> QueueLeft:
        status, data = await _ask(here, "GET", "queue")
        assert status == 200
        return msgspec.json.decode(data, type=QueueLeft)

    async def ordered(here: Here, ask: OrderAsk) -> None:
        status, _ = await _ask(here, "POST", "orders", msgspec.json.encode(ask))
        assert status == 200

    async def test() -> None:
        async with region(tmp_path, NODE) as here:
            node = await here.joined(*NODE)
            await ordered(here, OrderAsk(resting=True))
            assert await left(here) == QueueLeft()
            await _reply(here, "POST", "queue", msgspec.msgpack.encode(_batch(ask("one"))))
            assert await left(here) == QueueLeft(waiting=1, kept=1)
            assert here.app._room(0).draining
            await ordered(here, OrderAsk(resting=True, leaving=True))
            node.output(attempt_of(await node.got("start")), delta("yes"), *ending())
            await _done(here)
            late = msgspec.msgpack.encode(_batch(ask("two"), name="b2"))
            refused = await _reply(here, "POST", "queue", late)
            assert isinstance(refused, Fault)
            assert refused.code == RegionUnavailable.code, "the edge asks another region"
            assert await left(here) == QueueLeft(owed=1, kept=1)
            wrote = msgspec.msgpack.encode(Written(request_ids=("r1",)))
            await _reply(here, "GET", "owed?collector=a")
            await _reply(here, "POST", "owed?collector=a", wrote)
            assert await left(here) == QueueLeft(kept=1)
            assert (await _ask(here, "GET", "queue", headers={}))[0] == 403

    run(test())


def test_a_batch_for_a_cold_model_brings_its_node(tmp_path: Path) -> None:
    cold = f"\n[regions.scale.{MODEL}]\nleast = 0\n"

    async def test() -> None:
        async with region(tmp_path, NODE, more=cold) as here:
            body = msgspec.msgpack.encode(_batch(ask("one"), ask("two", request_id="r2")))
            await _reply(here, "POST", "queue", body)
            await here.queued(1)
            await here.until(lambda: [one.nodes for one in here.app.scaling.wanted] == [1])
            node = await here.joined(*NODE)
            for _ in range(2):
                node.output(attempt_of(await node.got("start")), delta("yes"), *ending())
            assert len(await _done(here)) == 2

    run(test())


def test_a_router_that_is_started_again_goes_on(tmp_path: Path) -> None:
    async def test() -> None:
        async with region(tmp_path, NODE) as here:
            node = await here.joined(*NODE)
            await _reply(here, "POST", "queue", msgspec.msgpack.encode(_batch(ask("one"))))
            await node.got("start")  # it runs, and then the router goes
        async with region(tmp_path, NODE) as here:
            node = await here.joined(*NODE)
            start = await node.got("start")
            node.output(attempt_of(start), delta("again"), *ending())
            [answer] = await _done(here)
            [said, *_] = event_decoder().feed(answer.events)
            assert isinstance(said, Delta)
            assert said.text == "again"

    run(test())


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "queue"),
        ("GET", "queue/b1"),
        ("GET", "owed?collector=a"),
        ("POST", "owed?collector=a"),
    ],
)
def test_nothing_without_the_secret(tmp_path: Path, method: str, path: str) -> None:
    async def test() -> None:
        async with region(tmp_path, NODE) as here:
            for secret in ("", "wrong"):
                headers = {"x-skerry-secret": secret, "x-skerry-wire": "1"}
                assert (await _ask(here, method, path, b"", headers))[0] == 403

    run(test())


def test_what_is_no_batch(tmp_path: Path) -> None:
    async def test() -> None:
        async with region(tmp_path, NODE) as here:
            whole = msgspec.msgpack.encode(_batch(ask("one")))
            skewed = here.headers | {"x-skerry-wire": "2"}
            for body, headers, code in (
                (b"\xc1", None, "invalid_request"),
                (msgspec.msgpack.encode({"id": 3}), None, "invalid_request"),
                (whole, skewed, "version_skew"),
                (b"x" * 5_000_000, None, "body_too_large"),
            ):
                reply = await _reply(here, "POST", "queue", body, headers)
                assert isinstance(reply, Fault)
                assert reply.code == code
            for path in ("queue/b1", "queue/b1?namespace=other", "queue/%00"):
                reply = await _reply(here, "GET", path)
                assert isinstance(reply, Fault)
                assert reply.code == "not_found"

    run(test())
