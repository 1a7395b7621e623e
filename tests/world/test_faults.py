"""What a client sees when a part of the world dies, and that nothing is left held."""

from concurrent.futures import ThreadPoolExecutor

import httpx
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
    beginning, region = home_of(world, "decode killed")
    killed = False
    with streaming(world.edges["ams"], completion(beginning)) as response:
        answer = Answer(response.status_code, response.headers)
        for line in lines_of(response):
            take(answer, line)
            if not killed and answer.text:
                world.kill(f"{region}-decode")
                killed = True
    assert killed
    assert (answer.status, answer.done, answer.finish) == (200, False, None)
    assert answer.error is not None
    assert answer.error["code"] == "node_lost"
    assert beginning.startswith(answer.text)

    assert until(lambda: alive(world, region))
    again = ask(world.edges["ams"], completion(beginning))
    assert (again.text, again.done) == (beginning, True), again.error
    assert again.headers["x-skerry-region"] == region


def test_prefill_node_killed_while_it_reads_costs_the_client_only_time(world: LocalWorld) -> None:
    beginning, region = home_of(world, "prefill killed")
    prompt = beginning + "and then some. " * 500  # about two seconds of reading
    node = f"{region}-prefill"

    def reads() -> bool:
        nodes = region_status(world, region)["nodes"]
        return any(n["name"] == node and n.get("prefill_backlog_tokens", 0) > 0 for n in nodes)

    with ThreadPoolExecutor(1) as pool:
        # The edge that has just asked there: another may hear a tenth of a second later of it.
        caller = pool.submit(ask, world.edges["ams"], completion(prompt, max_tokens=40))
        assert until(reads)
        world.kill(node)
        answer = caller.result(60)
    assert (answer.status, answer.error, answer.done) == (200, None, True)
    assert answer.text == prompt[: len(answer.text)] != ""
    assert until(lambda: alive(world, region))


def test_client_that_leaves_an_answer_frees_every_block(world: LocalWorld) -> None:
    beginning, _ = home_of(world, "client gone while answering")
    with streaming(world.edges["ams"], completion(beginning + "more of it. " * 100)) as response:
        next(lines_of(response))
        region = response.headers["x-skerry-region"]  # home may have been busy
        assert until(lambda: blocks_used(world, region) > 0, 2.0)
    assert until(lambda: forgotten(world, region), 2.0), region_status(world, region)


def test_client_that_leaves_while_its_prompt_is_read_frees_every_block(world: LocalWorld) -> None:
    beginning, region = home_of(world, "client gone while reading")
    body = completion(beginning + "more of it. " * 800, stream=False, stream_options=None)
    url = world.edges["ams"] + "/v1/completions"
    with ThreadPoolExecutor(1) as pool:  # three seconds of reading; the caller waits half of that
        caller = pool.submit(httpx.post, url, json=body, timeout=1.5, trust_env=False)
        assert until(lambda: blocks_used(world, region) > 0, 1.5)
        with pytest.raises(httpx.ReadTimeout):
            caller.result(10)
    assert until(lambda: forgotten(world, region), 2.0), region_status(world, region)


def test_router_killed_is_answered_by_the_other_region(world: LocalWorld) -> None:
    beginning, region = home_of(world, "router killed")
    other = {"eu": "us", "us": "eu"}[region]
    world.kill(region)
    answer = ask(world.edges["nyc"], completion(beginning))
    assert (answer.status, answer.text, answer.done) == (200, beginning, True)
    assert answer.headers["x-skerry-region"] == other

    def at_home(answer: Answer) -> bool:
        return answer.headers["x-skerry-region"] == region

    assert until(lambda: alive(world, region))
    assert until(lambda: at_home(ask(world.edges["nyc"], completion(beginning, max_tokens=9)))), (
        "the prefix did not come home"
    )
