"""The edge's own queue: who is next, what bounds it, and how it looks from outside."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from pathlib import Path

import httpx
import pytest
from msgspec.structs import replace

from core.errors import NoCapacity
from core.types import RegionName
from edge.hold import AT_ONCE, Group, Held, Hold, Line, Place
from tests.edge.fakes import (
    END,
    MODEL,
    FakeRegion,
    RunningEdge,
    chat,
    delta,
    fault,
    running_edge,
    status_of,
    world_of,
)
from tests.edge.fakes import Hold as Gate

GROUP = Group(MODEL, None)
FULL = NoCapacity("full", retry_after_s=60.0)
BUSY = [fault("no_capacity", "the queue is full", retry_after_s=60.0)]


def test_namespaces_take_turns_and_each_keeps_its_order() -> None:
    line = Line()
    greedy = [line.join("greedy") for _ in range(4)]
    modest = [line.join("modest") for _ in range(2)]
    order = line.waiting()
    assert order == [greedy[0], modest[0], greedy[1], modest[1], greedy[2], greedy[3]]
    assert [line.place(one).position for one in order] == [1, 2, 3, 4, 5, 6]


def test_who_was_served_does_not_come_first_again_and_who_gives_up_costs_nobody() -> None:
    line = Line()
    first, second = line.join("a"), line.join("b")
    line.leave(first, served=True)
    line.leave(first, served=True)
    late = line.join("a")
    assert line.waiting() == [second, late]
    line.leave(second, served=False)
    assert line.place(late) == Held(1, 1)


def test_one_that_tries_keeps_its_place_and_is_not_counted() -> None:
    line = Line()
    first, second = line.join(""), line.join("")
    first.trying = True
    assert line.place(second) == Held(1, 1)
    first.trying = False
    assert line.place(second) == Held(2, 2)
    assert line.waiting() == [first, second]


def _hold(limit: int = 8, wait_s: float = 10.0) -> Hold:
    return Hold(limit=limit, wait_s=wait_s, region_queue=4)


async def _turn(place: Place, refusal: NoCapacity = FULL) -> list[Held]:
    async with aclosing(place.turn(refusal)) as words:
        return [word async for word in words]


async def test_a_status_lets_as_many_try_as_there_is_room_for() -> None:
    hold = _hold()
    places = [hold.join(GROUP, "", most_s=9.0) for _ in range(6)]
    turns = [asyncio.create_task(_turn(place)) for place in places if place is not None]
    await asyncio.sleep(0)
    hold.heard(replace(status_of("eu"), queued=4))
    hold.heard(replace(status_of("eu"), queued=0, draining=True))
    hold.heard(replace(status_of("eu"), queued=0, models=()))
    await asyncio.sleep(0)
    assert not any(one.done() for one in turns)
    hold.heard(replace(status_of("eu"), queued=2))
    await asyncio.wait(turns[:2], timeout=5)
    assert [one.done() for one in turns] == [True, True, False, False, False, False]
    for one in turns:
        one.cancel()
    await asyncio.wait(turns)
    for place in places:
        assert place is not None
        place.leave(served=False)
    assert hold.held == 0


async def test_a_line_waits_for_its_own_regions_only() -> None:
    hold = _hold()
    pinned = hold.join(Group(MODEL, frozenset({RegionName("us")})), "", most_s=9.0)
    assert pinned is not None
    turn = asyncio.create_task(_turn(pinned))
    await asyncio.sleep(0)
    hold.heard(status_of("eu"))
    await asyncio.sleep(0)
    assert not turn.done()
    hold.heard(status_of("us"))
    async with asyncio.timeout(30):
        assert await turn == []


async def test_it_is_bounded_in_number_and_in_time() -> None:
    hold = _hold(limit=1, wait_s=0.1)
    place = hold.join(GROUP, "", most_s=9.0)
    assert place is not None
    assert hold.join(GROUP, "", most_s=9.0) is None
    with pytest.raises(NoCapacity) as caught:
        await _turn(place)
    assert caught.value is FULL
    place.leave(served=False)
    assert hold.held == 0


async def test_the_first_of_a_line_tries_now_and_then_without_news(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("edge.hold.TELL_S", 0.05)
    hold = _hold()
    first, second = (hold.join(GROUP, "", most_s=9.0) for _ in range(2))
    assert first is not None
    assert second is not None
    waiting = asyncio.create_task(_turn(second, NoCapacity("full", retry_after_s=0.1)))
    told = await _turn(first, NoCapacity("full", retry_after_s=0.1))
    assert told == [Held(1, 2)]
    assert not waiting.done()  # it is not the first
    first.leave(served=True)
    async with asyncio.timeout(30):
        assert (await waiting)[-1] == Held(1, 1)


def _full_until_told(region: FakeRegion) -> None:
    """It refuses until its status shows room."""
    region.accepts = False
    region.script = lambda _: (
        BUSY if region.status is None or region.status.queued else [delta("Hello"), *END]
    )
    region.tell(replace(status_of(region.name), queued=256))


async def _line_of(edge: RunningEdge, count: int) -> None:
    async with asyncio.timeout(30):
        while (await edge.http.get("/status")).json()["held"] != count:
            await asyncio.sleep(0.01)


async def _sent(edge: RunningEdge, content: str = "Hi", **more: object) -> httpx.Response:
    return await edge.http.post("/v1/chat/completions", json=chat(content, **more))


async def test_held_while_all_are_busy_and_told_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge.hold.TELL_S", 0.1)
    eu, us = FakeRegion("eu"), FakeRegion("us")
    _full_until_told(eu)
    _full_until_told(us)
    async with eu.serving(), us.serving(), running_edge(world_of(tmp_path, eu, us)) as edge:
        first = asyncio.create_task(_sent(edge))
        await _line_of(edge, 1)
        text = ""
        async with edge.http.stream(
            "POST", "/v1/chat/completions", json=chat(stream=True)
        ) as answer:
            async for piece in answer.aiter_text():
                text += piece
                if ": held, place 2 of 2\n\n" in text and eu.status is not None:
                    eu.tell(status_of("eu", sequence=eu.status.sequence + 1))
        assert (await first).json()["choices"][0]["message"]["content"] == "Hello"
        story = (await edge.http.get("/explain/" + answer.headers["x-request-id"])).json()
        metrics = (await edge.http.get("/metrics")).text
    assert text.startswith(": held, place 2 of 2\n\n")
    assert text.endswith("data: [DONE]\n\n")
    [wait] = story["stories"][0]["waits"]
    assert wait["position"] == 2
    assert wait["ended_s"] > wait["began_s"]
    assert [one["outcome"] for one in story["stories"][0]["tries"]][-1] == "ok"
    assert "skerry_edge_held 0.0" in metrics
    assert "skerry_edge_hold_seconds_count 2.0" in metrics


async def test_who_comes_while_others_wait_stands_behind_them(tmp_path: Path) -> None:
    eu = FakeRegion("eu")
    _full_until_told(eu)
    async with eu.serving(), running_edge(world_of(tmp_path, eu)) as edge:
        first = asyncio.create_task(_sent(edge, content="first"))
        await _line_of(edge, 1)
        asked = len(eu.requests)
        others = [asyncio.create_task(_sent(edge, content=f"later {i}")) for i in range(3)]
        await _line_of(edge, 4)
        assert len(eu.requests) == asked  # they did not ask a region that is known to be full
        eu.tell(status_of("eu", sequence=2))
        for answer in [await first, *[await one for one in others]]:
            assert answer.status_code == 200
    contents = [one.messages[0].content for one in eu.requests[asked:]]
    assert contents[0] == "first"
    assert len(contents) == 4 <= AT_ONCE


@pytest.mark.parametrize("value", ["1", "true"])
async def test_reject_if_busy_is_refused_at_once(tmp_path: Path, value: str) -> None:
    eu, us = FakeRegion("eu"), FakeRegion("us")
    _full_until_told(eu)
    _full_until_told(us)
    headers = {"x-skerry-reject-if-busy": value}
    async with eu.serving(), us.serving(), running_edge(world_of(tmp_path, eu, us)) as edge:
        for busy in (False, True):  # no one waits; one waits already
            waiting = asyncio.create_task(_sent(edge)) if busy else None
            await _line_of(edge, int(busy))
            asked = len(eu.requests)
            answer = await edge.http.post(
                "/v1/chat/completions", json=chat(stream=True), headers=headers
            )
            assert answer.status_code == 429
            assert answer.json()["error"]["code"] == "no_capacity"
            assert int(answer.headers["retry-after"]) >= 1
            if waiting is not None:
                assert len(eu.requests) == asked
                waiting.cancel()
        assert all(one.reject_if_busy for one in eu.requests[:1])


async def test_a_caller_who_leaves_is_out_of_the_line(tmp_path: Path) -> None:
    eu = FakeRegion("eu")
    _full_until_told(eu)
    async with eu.serving(), running_edge(world_of(tmp_path, eu)) as edge:
        host, port = edge.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        body = json.dumps(chat(stream=True)).encode()
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%s" % (len(body), body)
        )
        await _line_of(edge, 1)
        stays = asyncio.create_task(_sent(edge))
        await _line_of(edge, 2)
        writer.close()
        await _line_of(edge, 1)
        eu.tell(status_of("eu", sequence=2))
        assert (await stays).status_code == 200
        await writer.wait_closed()


async def test_waited_in_vain_is_a_refusal_with_the_regions_own_words(tmp_path: Path) -> None:
    eu = FakeRegion("eu")
    _full_until_told(eu)
    async with eu.serving():
        world = world_of(tmp_path, eu, limits="hold_s = 0.3")
        async with running_edge(world) as edge:
            answer = await _sent(edge, stream=True)
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "60"
    assert answer.json()["error"]["message"] == "the queue is full"


async def test_a_full_region_and_one_that_answers_hold_nobody(tmp_path: Path) -> None:
    gate = asyncio.Event()
    eu = FakeRegion("eu", accepts=False, script=lambda _: BUSY)
    us = FakeRegion("us", script=lambda _: [Gate(gate), delta("x"), *END])
    gate.set()
    async with eu.serving(), us.serving(), running_edge(world_of(tmp_path, eu, us)) as edge:
        answer = await _sent(edge)
    assert answer.headers["x-skerry-region"] == "us"


@pytest.mark.parametrize("gone", [False, True])
async def test_who_comes_while_the_only_region_is_replaced_waits_for_it(
    tmp_path: Path, gone: bool
) -> None:
    """It drains, and may be away for a moment after that."""
    eu = FakeRegion("eu")
    eu.tell(replace(status_of("eu"), draining=True))
    async with eu.serving(), running_edge(world_of(tmp_path, eu)) as edge:
        if gone:
            eu.refuses_with = 503
        refused = await edge.http.post(
            "/v1/chat/completions", json=chat(), headers={"x-skerry-reject-if-busy": "1"}
        )
        assert refused.status_code == 503
        held = asyncio.create_task(_sent(edge, stream=True))
        await _line_of(edge, 1)
        eu.refuses_with = 0
        eu.tell(status_of("eu", sequence=1, epoch="e2"))
        answer = await held
    assert answer.status_code == 200
    assert answer.text.endswith("data: [DONE]\n\n")


async def test_a_region_that_is_lost_without_a_word_is_not_waited_for(tmp_path: Path) -> None:
    eu = FakeRegion("eu", refuses_with=503)
    async with eu.serving(), running_edge(world_of(tmp_path, eu)) as edge:
        answer = await _sent(edge)
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "region_unavailable"
