"""Workers AI's face through a whole world of scripted ranks, and its queue when processes die."""

from __future__ import annotations

import functools
import os
import stat
from collections import Counter

import httpx
import pytest

from deploy.launcher import LocalWorld
from tests.edge.mangle import bodies
from tests.edge.test_workers_ai_fuzz import FACES
from tests.world.faults import alive, forgotten, until
from tests.world.scripted import MODEL
from tests.world.workers_client import CloudflareError, WorkersAI

pytestmark = pytest.mark.world

TEXT = "ďábel 👩‍👩‍👧‍👦 天气 🦙 é "


def test_what_comes_back_is_what_was_said(world: LocalWorld) -> None:
    with WorkersAI(world.edges["ams"]) as ai:
        raw = ai.run(MODEL, prompt=TEXT, raw=True, temperature=0)
        assert (raw["response"], raw["finish_reason"]) == (TEXT, "stop")
        events = list(ai.stream(MODEL, prompt=TEXT, raw=True, temperature=0))
        assert "".join(one["response"] for one in events) == TEXT
        assert events[-1]["finish_reason"] == "stop"
        assert events[-1]["usage"]["completion_tokens"] == raw["usage"]["completion_tokens"]
        assert [one for one in events[:-1] if "usage" in one] == []
        long = ai.run(MODEL, prompt="x" * 400, raw=True, temperature=0)
        assert (long["usage"]["completion_tokens"], long["finish_reason"]) == (256, "length")
        chat = ai.run(MODEL, messages=[{"role": "user", "content": "hello"}], temperature=0)
        twin = ai.chat(
            model=MODEL, messages=[{"role": "user", "content": "hello"}], temperature=0
        )  # fmt: skip
        assert chat["response"] == twin["choices"][0]["message"]["content"]
        assert "hello" in chat["response"]
        assert ai.models() == ["@cf/huggingfacetb/smollm2-135m-instruct"]  # an alias in its form


def test_refusals_of_the_region_keep_their_codes(world: LocalWorld) -> None:
    with WorkersAI(world.edges["nyc"]) as ai:
        with pytest.raises(CloudflareError) as long:
            ai.run(MODEL, prompt="x" * 20_000, raw=True)
        assert (long.value.status, long.value.code) == (400, 5021)
        with pytest.raises(CloudflareError) as bias:
            list(ai.stream(MODEL, prompt="x", logit_bias={"999999": 1}))
        assert (bias.value.status, bias.value.code) == (400, 8001)
        assert "999999" in bias.value.message


def test_generated_bodies(world: LocalWorld) -> None:
    """The fuzz of the dialects once more, with a region that reads what it is sent."""
    statuses: Counter[int] = Counter()
    with httpx.Client(base_url=world.edges["ams"], timeout=60, trust_env=False) as client:
        for path, (fields, good) in FACES.items():
            short = [_brief(one) for one in good]
            for body in bodies(7, 25, fields, short):
                answer = client.post(path, content=body)
                assert answer.status_code < 500, (path, body[:300], answer.text[:300])
                statuses[answer.status_code] += 1
    assert statuses[200] > 5
    assert statuses[400] > 25
    for region in ("eu", "us"):
        assert until(functools.partial(forgotten, world, region))


def _brief(body: object) -> object:
    return (
        {**body, "max_tokens": 3} if isinstance(body, dict) and "request_id" not in body else body
    )


def begun(ai: WorkersAI, name: str) -> bool:
    """Whether the batch is under way, and not all of it answered."""
    told: dict[str, object] = {}

    def is_begun() -> bool:
        told.update(ai.poll(MODEL, name))
        return told.get("status") == "running" or "responses" in told

    assert until(is_begun), told
    return "responses" not in told


def test_a_batch_outlives_its_router_and_its_edge(world: LocalWorld) -> None:
    """Killed in the middle of it: every answer comes, once, from whichever edge is asked."""
    prompts = [f"{number} " + "boats come home. " * 14 for number in range(24)]
    with WorkersAI(world.edges["ams"]) as ams, WorkersAI(world.edges["nyc"]) as nyc:
        for _ in range(8):
            name = ams.queue(
                MODEL,
                *({"prompt": one, "raw": True, "temperature": 0, "max_tokens": 300,
                   "external_reference": one[:2]} for one in prompts),
            )  # fmt: skip
            if begun(ams, name):
                break  # else it was over before anybody looked
        else:
            pytest.fail("no batch of eight was caught in the middle")
        region = name.partition(".")[0]
        world.kill(region)
        world.kill("ams")
        result = nyc.wait(MODEL, name)
        assert [one["result"]["response"] for one in result["responses"]] == prompts
        assert [one["external_reference"] for one in result["responses"]] == [
            one[:2] for one in prompts
        ]
        sums = [one["result"]["usage"]["completion_tokens"] for one in result["responses"]]
        assert result["usage"]["completion_tokens"] == sum(sums)
        assert until(lambda: alive(world, region))
        assert ams.wait(MODEL, name) == result
        assert until(lambda: forgotten(world, region))
    file = world.world.state / f"queue-{region}.sqlite"
    assert stat.S_IMODE(os.stat(file).st_mode) == 0o600
    assert b"boats come home" in file.read_bytes()  # the answers, which say the same


@pytest.mark.soak
def test_a_long_queue_under_kills(world: LocalWorld) -> None:
    """Three kills of the router and two of a node, 300 requests: every answer, each whole."""
    prompts = [f"{number} " + "nets are mended. " * 12 for number in range(300)]
    with WorkersAI(world.edges["ams"]) as ai:
        name = ai.queue(MODEL, *({"prompt": one, "raw": True, "temperature": 0, "max_tokens": 300}
                                 for one in prompts))  # fmt: skip
        region = name.partition(".")[0]
        for victim in (region, f"{region}-decode", region, f"{region}-prefill", region):
            assert until(lambda: ai.poll(MODEL, name).get("status") == "running")
            world.kill(victim)
            assert until(lambda: alive(world, region))
        result = ai.wait(MODEL, name, 300.0)
        assert [one["result"]["response"] for one in result["responses"]] == prompts
    assert until(functools.partial(forgotten, world, region))
