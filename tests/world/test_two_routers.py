"""A region with two routers and three nodes: either router may go, and any node may come and go."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from core import config
from core.config_tenants import Access
from core.types import Role
from deploy import toml_write
from deploy.launcher import LocalWorld, run_world
from deploy.process import Pauses
from tests.tiny_text import write_tiny_folder
from tests.world.faults import until
from tests.world.scripted import (
    CONTEXT,
    MODEL,
    Answer,
    ask,
    completion,
    lines_of,
    page,
    streaming,
    take,
)

pytestmark = pytest.mark.world
NODES = (("reader", Role.PREFILL), ("first", Role.DECODE), ("second", Role.DECODE))


@pytest.fixture(scope="module")
def paired(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalWorld]:
    folder = tmp_path_factory.mktemp("paired")
    file = folder / "paired.toml"
    described = _topology(write_tiny_folder(folder / "tiny", context=CONTEXT))
    file.write_text(toml_write.dump(described), encoding="utf-8")
    said: list[str] = []
    with run_world(
        file, say=said.append, state=folder / "state", pauses=Pauses(0.1, 0.5, 5.0)
    ) as running:
        yield running


def _topology(source: Path) -> config.Topology:
    script = config.Scripted(step_ms=0.5, prefill_tokens_per_s=2000.0)
    nodes = tuple(
        config.Node(name=name, role=role, model=MODEL, kv_tokens=CONTEXT, speculate=False)
        for name, role in NODES
    )
    return config.Topology(
        version=config.VERSION,
        name="paired",
        models={
            MODEL: config.Model(
                source=str(source), engine="scripted", context=CONTEXT, scripted=script
            )
        },
        edges=(config.Edge(name="edge", listen="127.0.0.1:0"),),
        regions=(config.Region(name="home", nodes=nodes, routers=(config.Router(),)),),
        access=Access(anonymous="until-keys"),
        routing=config.Routing(expose_nodes=True),
    )


def statuses(world: LocalWorld) -> list[dict[str, Any]]:
    doors = world.world.topology.region("home").doors
    urls = (f"http://{router.http}/status" for _, router in doors)
    return [page(url) for url in urls]


def alive(world: LocalWorld) -> bool:
    """Whether both routers have all nodes."""
    return all(sum(one["alive"] for one in status["nodes"]) == 3 for status in statuses(world))


def takes(status: dict[str, Any], node: str) -> bool:
    """Whether a router would give it something new."""
    (one,) = [one for one in status["nodes"] if one["name"] == node]
    return bool(one["alive"]) and not one["draining"]


def silences(world: LocalWorld) -> int:
    """How often the edge heard none of the region's routers."""
    return (world.logs / "edge.log").read_text(encoding="utf-8").count("region silent")


def asked(world: LocalWorld, prompts: list[str], **more: object) -> list[Answer]:
    """All at once."""
    with ThreadPoolExecutor(len(prompts)) as threads:
        bodies = [completion(prompt, **more) for prompt in prompts]
        return list(threads.map(lambda body: ask(world.edges["edge"], body), bodies))


def test_both_routers_answer_and_each_knows_what_the_nodes_hold(paired: LocalWorld) -> None:
    assert until(lambda: alive(paired))
    prompts = [f"{n}: " + "gulls over the harbour. " * 30 for n in range(4)]
    before = [status["more"]["prompts"]["all"] for status in statuses(paired)]
    for answer, prompt in zip(asked(paired, prompts), prompts, strict=True):
        assert answer.text == prompt
    again = [ask(paired.edges["edge"], completion(prompt, max_tokens=3)) for prompt in prompts]
    for answer in again:  # whichever router read it before, either finds it
        assert answer.usage is not None
        tokens = answer.usage["prompt_tokens"]
        cached = answer.usage["prompt_tokens_details"]["cached_tokens"]
        assert cached == (tokens - 1) // 16 * 16
    after = [status["more"]["prompts"]["all"] for status in statuses(paired)]
    assert all(late > early for early, late in zip(before, after, strict=True))


def test_a_router_may_die_before_the_first_delta(paired: LocalWorld) -> None:
    assert until(lambda: alive(paired))
    lost = silences(paired)
    # Each is read for seconds, so that none is answered while we look who has it.
    prompts = [f"{n} rocks: " + "the tide comes in again. " * 200 for n in range(2)]
    with ThreadPoolExecutor(1) as thread:
        answers = thread.submit(asked, paired, prompts, max_tokens=200)
        assert until(lambda: statuses(paired)[0]["active"] > 0)
        paired.kill("home")
        for answer, prompt in zip(answers.result(), prompts, strict=True):
            assert answer.error is None
            assert answer.text
            assert answer.finish == "length"
            assert prompt.startswith(answer.text)
    assert silences(paired) == lost, "the region was never lost"
    assert until(lambda: alive(paired))
    assert until(lambda: all(not status["active"] for status in statuses(paired)))


def test_a_node_drains_and_comes_back_and_nobody_notices(paired: LocalWorld) -> None:
    assert until(lambda: alive(paired))
    body = completion("a long story: " + "and then the wind turned. " * 130)
    with streaming(paired.edges["edge"], body) as response:
        answer = Answer(response.status_code, response.headers)
        lines = lines_of(response)
        while not answer.text:
            take(answer, next(lines))
        leaving = response.headers["x-skerry-decode"]
        pid = paired.pid(leaving)
        paired.kill(leaving, signal.SIGTERM)
        assert until(lambda: not any(takes(status, leaving) for status in statuses(paired)))
        other = ask(paired.edges["edge"], completion("meanwhile, " + "elsewhere. " * 40))
        for line in lines:
            take(answer, line)
    assert answer.done
    assert answer.text == body["prompt"]
    assert other.done
    assert other.headers["x-skerry-decode"] != leaving
    assert until(lambda: paired.pid(leaving) != pid and alive(paired))


def test_a_dead_prefill_node_leaves_decode_healthy(paired: LocalWorld) -> None:
    assert until(lambda: alive(paired))
    prompts = [f"{n} boats: " + "rope, sail and oar. " * 40 for n in range(3)]
    with ThreadPoolExecutor(1) as thread:
        answers = thread.submit(asked, paired, prompts)
        assert until(lambda: any(status["active"] for status in statuses(paired)))
        paired.kill("reader")
        for answer, prompt in zip(answers.result(), prompts, strict=True):
            assert answer.text == prompt
    for url in (f"http://{r.http}" for _, r in paired.world.topology.region("home").doors):
        assert httpx.get(f"{url}/readyz", timeout=5, trust_env=False).status_code == 200
