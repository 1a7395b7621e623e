"""More answers than the decode nodes have memory for: each is whole, wherever it was pushed."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from deploy.launcher import LocalWorld
from tests.world.faults import forgotten, until
from tests.world.scripted import Answer, ask, completion, region_status
from tests.world.storm import told, unlike
from tests.world.tight import tight_world

pytestmark = pytest.mark.world

CALLERS = 8


@pytest.fixture(scope="module")
def tight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalWorld]:
    with tight_world(tmp_path_factory.mktemp("tight"), kv_tokens=1280) as running:
        yield running


def moved(world: LocalWorld) -> float:
    """Answers that the router has placed again because a node had pushed them out."""
    page = httpx.get(f"{world.routers['home']}/metrics", trust_env=False).text
    return sum(
        float(line.split()[-1])
        for line in page.splitlines()
        if line.startswith("skerry_router_replacements_total") and '"preempted"' in line
    )


def test_answers_that_are_pushed_out_go_on_through_prefill(tight: LocalWorld) -> None:
    """B16 over a whole region: the text is that of a quiet one, sent once, counted once."""
    for turn in range(9):  # callers that come one after the other push nobody out
        answered(tight, turn)
        if moved(tight) > 0:
            break
    assert moved(tight) > 0

    def pushed() -> int:
        nodes = region_status(tight, "home")["nodes"]
        return sum(one.get("preemptions", 0) for one in nodes if one["name"] in ("one", "two"))

    assert until(lambda: pushed() >= moved(tight))
    assert until(lambda: forgotten(tight, "home"))


def answered(tight: LocalWorld, turn: int) -> None:
    """One by itself, then all at once."""
    words = "é天🦙 sea and sky. " * 16
    prompts = [f"{turn}, caller {number}: {words}" for number in range(CALLERS)]

    def one(prompt: str) -> Answer:
        return ask(tight.edges["edge"], completion(prompt, max_tokens=600))

    alone = one(prompts[0])
    assert (alone.text, alone.done) == (prompts[0], True)
    with ThreadPoolExecutor(CALLERS) as callers:
        answers = list(callers.map(one, prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert (answer.text, answer.done, answer.finish) == (prompt, True, "stop"), answer.error
        assert answer.usage is not None
        assert alone.usage is not None
        assert answer.usage["prompt_tokens"] == alone.usage["prompt_tokens"]
        assert answer.usage["completion_tokens"] == alone.usage["completion_tokens"]
    cached = [one.usage["prompt_tokens_details"]["cached_tokens"] for one in answers if one.usage]
    assert max(cached[1:]) <= 16, "what is read again is no hit"
    assert unlike(tight, told(answers)) == []
