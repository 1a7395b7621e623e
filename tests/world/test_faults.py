"""What a client sees when a part of the world dies, and that nothing is left held."""

import http.client
import json
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing

import pytest

from deploy.launcher import LocalWorld
from tests.world.faults import alive, blocks_used, forgotten, until
from tests.world.scripted import (
    Answer,
    ask,
    completion,
    lines_of,
    region_status,
    streaming,
    take,
)

pytestmark = pytest.mark.world

WHOLE = 3500
"""Tokens of an answer that nobody cuts short."""


def home_of(world: LocalWorld, name: str) -> tuple[str, str]:
    """A long prompt that begins with `name`, and the region that its beginning belongs to."""
    for number in range(20):  # one that met a queue at home was read elsewhere
        beginning = f"{name} {number}: " + "sea, sky and stones. " * 55
        answer = ask(world.edges["ams"], completion(beginning, max_tokens=9))
        assert beginning.startswith(answer.text)
        if answer.headers["x-skerry-route"] == "prefix_home":
            return beginning, answer.headers["x-skerry-region"]
    raise AssertionError("no prompt was read at home")


def test_decode_node_killed_in_mid_stream_ends_in_an_error_event(world: LocalWorld) -> None:
    beginning, _ = home_of(world, "decode killed")
    killed = False
    prompt = beginning + "more of it. " * 200  # three seconds of answering
    with streaming(world.edges["ams"], completion(prompt)) as response:
        answer = Answer(response.status_code, response.headers)
        region = response.headers["x-skerry-region"]
        for line in lines_of(response):
            take(answer, line)
            if not killed and answer.text:
                world.kill(f"{region}-decode")
                killed = True
    assert killed
    assert (answer.status, answer.done, answer.finish) == (200, False, None)
    assert answer.error is not None
    assert answer.error["code"] == "node_lost"
    assert prompt.startswith(answer.text)

    assert until(lambda: alive(world, region))

    def comes_home() -> bool:  # where the region is not busier than the other
        again = ask(world.edges["ams"], completion(beginning))
        assert (again.text, again.done) == (beginning, True), again.error
        return again.headers["x-skerry-region"] == region

    assert until(comes_home)


def test_prefill_node_killed_while_it_reads_costs_the_client_only_time(world: LocalWorld) -> None:
    beginning, region = home_of(world, "prefill killed")
    node = f"{region}-prefill"

    def reads() -> bool:
        nodes = region_status(world, region)["nodes"]
        return any(n["name"] == node and n.get("prefill_backlog_tokens", 0) > 0 for n in nodes)

    prompt = beginning + "and then some. " * 500  # about two seconds of reading
    # The edge that has just asked there: another may hear a tenth of a second later of it.
    with ThreadPoolExecutor(1) as pool:
        caller = pool.submit(ask, world.edges["ams"], completion(prompt, max_tokens=40))
        while not _seen(reads, caller):
            prompt = prompt.replace("then", "then again", 1)  # that one was read before we looked
            caller = pool.submit(ask, world.edges["ams"], completion(prompt, max_tokens=40))
        world.kill(node)
        answer = caller.result(60)
    assert (answer.status, answer.error, answer.done) == (200, None, True)
    assert answer.text == prompt[: len(answer.text)] != ""
    assert until(lambda: alive(world, region))


def _seen(what: Callable[[], bool], caller: Future[Answer]) -> bool:
    """Whether `what` is seen before the caller has its answer."""
    assert until(lambda: what() or caller.done()), "neither seen nor answered"
    return not caller.done()


def written(world: LocalWorld) -> int:
    """Tokens of answers, since the nodes' starts."""
    nodes = (node for name in world.routers for node in region_status(world, name)["nodes"])
    return sum(node.get("generated_tokens", 0) for node in nodes)


def test_client_that_leaves_an_answer_frees_every_block(world: LocalWorld) -> None:
    beginning, _ = home_of(world, "client gone while answering")
    before = written(world)
    body = completion(beginning + "more of it. " * 200)
    with streaming(world.edges["ams"], body) as response:
        lines = lines_of(response)  # held: to drop them is to leave
        next(lines)
        region = response.headers["x-skerry-region"]  # home may have been busy
        assert until(lambda: blocks_used(world, region) > 0)
    assert until(lambda: forgotten(world, region)), region_status(world, region)
    assert written(world) - before < WHOLE, "it was answered to the end"


def test_client_that_leaves_while_its_prompt_is_read_frees_every_block(world: LocalWorld) -> None:
    beginning, _ = home_of(world, "client gone while reading")
    before = written(world)
    # Three seconds of reading, and then as many of answering
    body = completion(beginning + "more of it. " * 950, stream=False, stream_options=None)
    address = world.edges["ams"].removeprefix("http://")
    with closing(http.client.HTTPConnection(address, timeout=60)) as caller:
        caller.request("POST", "/v1/completions", json.dumps(body))
        assert until(lambda: any(blocks_used(world, region) for region in world.routers))
    assert until(lambda: all(forgotten(world, region) for region in world.routers))
    assert written(world) - before < WHOLE, "it was answered to the end"


def test_router_killed_is_answered_by_the_other_region(world: LocalWorld) -> None:
    beginning, region = home_of(world, "router killed")
    other = {"eu": "us", "us": "eu"}[region]

    def elsewhere() -> bool:  # unless it is up again before we have asked
        world.kill(region)
        answer = ask(world.edges["nyc"], completion(beginning))
        assert (answer.status, answer.text, answer.done) == (200, beginning, True)
        return answer.headers["x-skerry-region"] == other

    assert until(elsewhere)

    def at_home(answer: Answer) -> bool:
        return answer.headers["x-skerry-region"] == region

    assert until(lambda: alive(world, region))
    assert until(lambda: at_home(ask(world.edges["nyc"], completion(beginning, max_tokens=9)))), (
        "the prefix did not come home"
    )
