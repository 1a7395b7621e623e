"""A world whose nodes are split over several ranks, each node in another way."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from core import config
from core.config_tenants import Access
from core.parallel import Plan
from core.types import Role
from deploy import toml_write
from deploy.launcher import LocalWorld, run_world
from deploy.process import Pauses
from deploy.status import edge_view, status_lines
from tests.tiny_text import write_tiny_folder
from tests.world.faults import forgotten, split, until
from tests.world.scripted import (
    CONTEXT,
    MODEL,
    Answer,
    ask,
    completion,
    lines_of,
    region_status,
    streaming,
    take,
)

pytestmark = pytest.mark.world
PLANS = {
    "reader": (Role.PREFILL, Plan(tp=3)),
    "writer": (Role.DECODE, Plan(pp=2)),
    "pools": (Role.DECODE, Plan(dp_attention=2)),
}


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalWorld]:
    folder = tmp_path_factory.mktemp("sharded")
    described = _topology(write_tiny_folder(folder / "tiny", context=CONTEXT))
    file = folder / "sharded.toml"
    file.write_text(toml_write.dump(described), encoding="utf-8")
    said: list[str] = []
    with run_world(
        file, say=said.append, state=folder / "state", pauses=Pauses(0.1, 0.5, 5.0)
    ) as running:
        yield running


def _topology(source: Path) -> config.Topology:
    here = "127.0.0.1:0"
    script = config.Scripted(
        step_ms=1.0, prefill_tokens_per_s=4000.0, layers=4, kv_heads=3, block_bytes=6144
    )
    nodes = tuple(
        config.Node(
            name=name, role=role, model=MODEL, kv_tokens=CONTEXT, speculate=False, parallel=plan
        )
        for name, (role, plan) in PLANS.items()
    )
    return config.Topology(
        version=config.VERSION,
        name="sharded",
        models={
            MODEL: config.Model(
                source=str(source), engine="scripted", context=CONTEXT, scripted=script
            )
        },
        edges=(config.Edge(name="edge", listen=here),),
        regions=(config.Region(name="home", nodes=nodes),),
        access=Access(anonymous="until-keys"),
        routing=config.Routing(expose_nodes=True),
    )


def said(world: LocalWorld, prompt: str, **more: object) -> Answer:
    """The prompt played back, or its beginning where there is a limit."""
    answer = ask(world.edges["edge"], completion(prompt, **more))
    assert answer.done, answer.error
    assert answer.text == (prompt[: len(answer.text)] if more else prompt) != ""
    return answer


def nodes(world: LocalWorld) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in region_status(world, "home")["nodes"]}


def test_a_split_node_hands_over_to_one_that_is_split_differently(sharded: LocalWorld) -> None:
    long = "sea, sky and stones. " * 25
    answer, _ = split(lambda number: said(sharded, f"first {number}: {long}"))
    assert answer.headers["x-skerry-prefill"] == "reader"
    assert answer.headers["x-skerry-decode"] in ("writer", "pools")
    assert until(lambda: forgotten(sharded, "home"))
    assert answer.usage is not None
    blocks = -(-(answer.usage["prompt_tokens"] - 1) // 16)
    assert until(lambda: nodes(sharded)["reader"]["kv_bytes_sent"] >= blocks * 6144)
    assert nodes(sharded)["reader"]["kv_bytes_sent"] == blocks * 6144, "each byte is sent once"


def test_status_shows_the_plan_and_each_rank(sharded: LocalWorld) -> None:
    def rows() -> list[list[str]]:
        lines = list(status_lines(edge_view(sharded.edges["edge"]).regions))
        return [line.split() for line in lines[1:]]

    def writer() -> list[list[str]]:
        return [row[1:4] for row in rows() if row[1].startswith("writer")]

    assert until(lambda: len(writer()) == 3)
    assert writer() == [
        ["writer", "decode,pp_2", MODEL],
        ["writer/0", "rank", "layers_0-1,KV_heads_0-2"],
        ["writer/1", "rank", "layers_2-3,KV_heads_0-2"],
    ]
    pids = [int(row[4].removeprefix("pid_")) for row in rows() if "/" in row[1]]
    assert len(pids) == 3 + 2 + 2
    for name in PLANS:
        ranks = {child.pid for child in psutil.Process(sharded.pid(name)).children()}
        assert ranks <= set(pids)


def test_a_prompt_returns_to_the_pool_that_holds_it(sharded: LocalWorld) -> None:
    """Three pools on two nodes: what was read before is found again, also in a second pool."""
    prompts = [f"{name}: " + "waves and wind and rocks. " * 30 for name in ("one", "two", "three")]
    for prompt in prompts:
        said(sharded, prompt, max_tokens=3)
    assert until(lambda: forgotten(sharded, "home"))
    for prompt in prompts:
        answer = said(sharded, prompt, max_tokens=3)
        assert answer.usage is not None
        cached = answer.usage["prompt_tokens_details"]["cached_tokens"]
        assert cached == (answer.usage["prompt_tokens"] - 1) // 16 * 16


def test_a_dead_rank_takes_its_node_out_and_the_router_places_elsewhere(
    sharded: LocalWorld,
) -> None:
    assert until(lambda: len(nodes(sharded)) == 3)
    prompt = "a rank dies: " + "a long way home. " * 200  # three seconds of answering
    with streaming(sharded.edges["edge"], completion(prompt)) as response:
        answer = Answer(response.status_code, response.headers)
        lines = lines_of(response)
        while not answer.text:
            take(answer, next(lines))
        victim = response.headers["x-skerry-decode"]
        ranks = nodes(sharded)[victim]["ranks"]
        os.kill(ranks[1]["pid"], signal.SIGKILL)
        for line in lines:
            take(answer, line)
    assert answer.error is not None
    assert answer.error["code"] == "node_lost"
    assert prompt.startswith(answer.text)
    again = said(sharded, prompt)  # at once, while the node is away or comes back
    assert again.headers["x-skerry-decode"] in {"writer", "pools"}
    assert until(lambda: not any(psutil.pid_exists(rank["pid"]) for rank in ranks))
    log = sharded.logs / f"{victim}.log"
    why = f"(pid {ranks[1]['pid']}) was killed by SIGKILL"
    assert until(lambda: why in log.read_text())
    assert sum(why in line for line in log.read_text().splitlines()) == 1
    assert until(lambda: nodes(sharded).get(victim, {}).get("ranks", ranks) != ranks)
