"""Lost regions, cut and slow ways, restarted edges and idle callers: nothing is lost in silence."""

from __future__ import annotations

import asyncio
import resource
import socket
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import aiohttp
import httpx
import psutil
import pytest

from deploy.launcher import LocalWorld
from edge.region_stream import LEAVE_S
from tests.world.beside import edge_beside
from tests.world.faults import alive, forgotten, until
from tests.world.scripted import Answer, ask, completion, lines_of, streaming, take

pytestmark = pytest.mark.world

STREAMS = 50
BACK_S = 20.0
"""B23: within ten seconds a region takes traffic again, on a machine that does nothing else."""
NO_TEXT_SAYS = {"no_capacity", "region_unavailable", "draining", "node_lost"}


def key_of(edge: str, region: str) -> str:
    """An affinity id at home in `region`."""
    for number in range(40):
        key = f"caller {number}"
        answer = ask(edge, completion("where?", max_tokens=2, prompt_cache_key=key))
        if answer.headers["x-skerry-region"] == region:
            return key
    raise AssertionError(f"no id of forty is at home in {region}")


async def _one(
    session: aiohttp.ClientSession, edge: str, number: int, seen: Counter[str]
) -> Answer:
    prompt = f"stream {number}: " + "sea, sky and stones. " * 12
    answer = Answer(0, httpx.Headers())
    body = completion(prompt, max_tokens=200)
    headers = {"x-session-affinity": "all of them in one region"}
    async with session.post(f"{edge}/v1/completions", json=body, headers=headers) as response:
        answer.status, answer.headers = response.status, httpx.Headers(dict(response.headers))
        if response.status != 200:
            answer.error = (await response.json())["error"]
            return answer
        async for line in response.content:
            if take(answer, line.decode().rstrip("\n")):
                seen[answer.headers["x-skerry-region"]] += 1
    assert prompt.startswith(answer.text)
    return answer


async def _under_streams(world: LocalWorld) -> tuple[str, list[Answer]]:
    """Kill the region that most of the streams are in, all of it at once."""
    seen: Counter[str] = Counter()
    edges = list(world.edges.values())
    timeout = aiohttp.ClientTimeout(total=100)
    async with aiohttp.ClientSession(timeout=timeout) as session, asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(_one(session, edges[number % 2], number, seen))
            for number in range(STREAMS)
        ]
        async with asyncio.timeout(60):
            while sum(seen.values()) < 10:  # most still wait to be read
                await asyncio.sleep(0.005)
        region = seen.most_common(1)[0][0]
        for name in (region, f"{region}-prefill", f"{region}-decode"):
            world.kill(name)
    return region, [task.result() for task in tasks]


def test_a_region_killed_under_50_streams_loses_none_in_silence(world: LocalWorld) -> None:
    """B23: sent = answered + refused. Who had text gets an error event, who had none an answer."""
    region, answers = asyncio.run(_under_streams(world))
    assert len(answers) == STREAMS
    whole = [one for one in answers if one.status == 200 and one.done and one.error is None]
    broken = [one for one in answers if one.status == 200 and one.error is not None]
    refused = [one for one in answers if one.status != 200]
    assert len(whole) + len(broken) + len(refused) == STREAMS
    assert len(broken) >= 1
    assert not any(one.done or one.finish for one in broken)
    assert {one.headers["x-skerry-region"] for one in broken} == {region}
    moved = [one for one in whole if one.headers["x-skerry-region"] != region]
    assert len(moved) >= 1  # those that waited there for a place
    assert {one.headers["x-skerry-route"] for one in moved} >= {"failover"}
    for one in refused:
        assert one.error is not None
        assert one.error["code"] in NO_TEXT_SAYS
    assert until(lambda: alive(world, region))
    assert until(lambda: all(forgotten(world, name) for name in world.routers))

    def nothing_held(edge: str) -> bool:
        page = httpx.get(f"{edge}/status", timeout=5, trust_env=False).json()
        return (page["in_flight"], page["held"]) == (0, 0)

    assert until(lambda: all(map(nothing_held, world.edges.values())))


def test_a_cut_status_stream_makes_a_region_the_last_choice_and_breaks_no_answer(
    world: LocalWorld, tmp_path: Path
) -> None:
    with edge_beside(world, tmp_path) as beside:
        key = key_of(beside.url, "eu")
        body = completion("sea, sky and stones. " * 25, prompt_cache_key=key)
        with streaming(beside.url, body) as response:
            assert response.headers["x-skerry-region"] == "eu"
            answer = Answer(response.status_code, response.headers)
            lines = lines_of(response)
            take(answer, next(lines))
            beside.ways["eu"].cut_status()
            assert until(lambda: beside.state("eu") == "suspect")
            for line in lines:
                take(answer, line)
        assert (answer.done, answer.error) == (True, None)
        far = ask(beside.url, completion("far", prompt_cache_key=key))
        assert (far.headers["x-skerry-region"], far.done) == ("us", True)
        beside.ways["eu"].status_cut = False
        assert until(lambda: beside.state("eu") == "fresh", BACK_S)

        def back() -> bool:
            answer = ask(beside.url, completion("back", prompt_cache_key=key))
            return answer.done and answer.headers["x-skerry-region"] == "eu"

        assert until(back, BACK_S)


def test_connections_to_a_region_outlive_the_requests_that_were_given_up(
    world: LocalWorld, tmp_path: Path
) -> None:
    """B25 without the price: the cancel is a message, and the next request finds a warm way."""
    with edge_beside(world, tmp_path) as beside:
        body = completion("sea, sky and stones. " * 60, prompt_cache_key=key_of(beside.url, "eu"))
        opened: list[int] = []
        slow = 0
        for _ in range(8):
            with streaming(beside.url, body) as response:
                assert response.headers["x-skerry-region"] == "eu"
                next(lines_of(response))
            left = time.monotonic()
            assert until(lambda: forgotten(world, "eu"))
            slow += time.monotonic() - left > LEAVE_S / 2  # its answer may have been cut instead
            opened.append(beside.ways["eu"].opened)
        # seven more requests; a ping that met a cancel may have taken a way of its own
        assert opened[-1] <= opened[0] + 2 + slow


def test_a_slow_region_is_waited_for_and_holds_up_nobody_else(
    world: LocalWorld, tmp_path: Path
) -> None:
    with edge_beside(world, tmp_path) as beside, ThreadPoolExecutor(1) as pool:
        there, elsewhere = key_of(beside.url, "eu"), key_of(beside.url, "us")
        beside.ways["eu"].delay_s = 0.4
        prompt = "slow but whole, " * 25
        body = completion(prompt, prompt_cache_key=there)
        slow = pool.submit(ask, beside.url, body)
        fast = 0
        while not slow.done():
            other = ask(beside.url, completion("a", max_tokens=4, prompt_cache_key=elsewhere))
            assert (other.done, other.headers["x-skerry-region"]) == (True, "us")
            fast += 1
        answer = slow.result()
        assert answer.headers["x-skerry-region"] == "eu"
        assert (answer.text, answer.done, answer.error) == (prompt, True, None)
        assert fast >= 2
        assert until(lambda: beside.state("eu") == "fresh")  # being slow is no illness


def test_an_edge_killed_under_streams_comes_back_and_leaves_nothing_held(
    world: LocalWorld,
) -> None:
    ams, nyc = world.edges["ams"], world.edges["nyc"]
    long, body = (completion("sea, sky and stones. " * count) for count in (160, 60))
    with streaming(ams, long) as response, streaming(nyc, body) as other:
        doomed, rest = lines_of(response), lines_of(other)
        next(doomed)
        answer = Answer(other.status_code, other.headers)
        take(answer, next(rest))
        world.kill("ams")
        with pytest.raises(httpx.RemoteProtocolError):
            list(doomed)
        for line in rest:
            take(answer, line)
        assert (answer.done, answer.error) == (True, None)
    assert until(lambda: all(forgotten(world, name) for name in world.routers))
    assert until(lambda: httpx.get(f"{ams}/readyz", trust_env=False).status_code == 200)
    again = ask(ams, completion("again"))
    assert (again.text, again.done) == ("again", True)


@contextmanager
def _files(count: int) -> Iterator[None]:
    """Room for that many open files in this process; skips where it is not to be had."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and count > hard:
        pytest.skip(f"{count} open files: the limit is {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("count", [500, pytest.param(5000, marks=pytest.mark.soak)])
def test_idle_connections_cost_little_and_keep_nobody_out(
    world: LocalWorld, tmp_path: Path, count: int
) -> None:
    with (
        edge_beside(world, tmp_path, head_s=120.0) as beside,
        _files(count + 500),
        ExitStack() as stack,
    ):
        process = psutil.Process(beside.process.pid)
        before = process.memory_info().rss
        host, port = beside.url.removeprefix("http://").split(":")
        hello = b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"
        for number in range(count):
            idle = stack.enter_context(socket.create_connection((host, int(port)), timeout=20))
            if number % 2:  # half of them have asked something and are kept
                idle.sendall(hello)
                assert idle.recv(4096).startswith(b"HTTP/1.1 200")
        held = len(process.net_connections(kind="tcp"))
        grown = process.memory_info().rss - before
        assert held >= count
        assert grown < count * 40_000 + 8_000_000, f"{grown / count:.0f} bytes a connection"
        answer = ask(beside.url, completion("served"))
        assert (answer.text, answer.done) == ("served", True)
        stack.close()
        assert until(lambda: len(process.net_connections(kind="tcp")) < count / 2)
