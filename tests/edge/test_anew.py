"""An answer that is not streamed breaks off: nobody saw it, so it is made again, counted once."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest

from core.events import Event
from core.usage import UsageReader
from tests.edge.fakes import (
    Cut,
    FakeRegion,
    Script,
    chat,
    delta,
    fault,
    running_edge,
    saying,
    world_of,
)

BREAKS: dict[str, list[Event | Cut]] = {
    "fault": [delta("Hel"), delta("lo"), fault("node_lost")],
    "cut": [delta("Hel"), delta("lo"), Cut()],
    "ends-early": [delta("Hel"), delta("lo"), delta(" th")],
}
LIMITED = "[tenants.anonymous]\ntokens_per_day = 5000\nrequests_per_minute = 100"


def _breaking(region: FakeRegion, breaks: list[Event | Cut], times: int) -> Script:
    whole = saying("Hello", " there", "!")
    return lambda asked: breaks if len(region.requests) <= times else whole(asked)


@pytest.mark.parametrize("breaks", BREAKS)
@pytest.mark.parametrize("alone", [True, False])
async def test_the_answer_is_whole_and_counted_once(
    tmp_path: Path, breaks: str, alone: bool
) -> None:
    eu, us = FakeRegion("eu"), FakeRegion("us")
    eu.script = _breaking(eu, BREAKS[breaks], 2 if alone else 100)
    regions = [eu] if alone else [eu, us]
    async with eu.serving(), us.serving():
        world = world_of(tmp_path, *regions, more=LIMITED)
        async with running_edge(world) as edge:
            answer = await edge.http.post("/v1/chat/completions", json=chat())
            assert answer.status_code == 200
            body = answer.json()
            assert body["choices"][0]["message"]["content"] == "Hello there!"
            assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (12, 3)
            page = (await edge.http.get("/metrics")).text
    asked = [request for region in regions for request in region.requests]
    assert len(asked) == (3 if alone else 2)
    assert len({request.seed for request in asked}) == 1
    (record,) = UsageReader().read(tmp_path / "usage")
    assert (record.complete, record.prompt, record.completion) == (True, 12, 3)
    assert record.region == ("eu" if alone else "us")
    assert 'skerry_edge_failovers_total{code="' in page


async def test_it_ends_somewhere_and_costs_nothing(tmp_path: Path) -> None:
    eu = FakeRegion("eu")
    eu.script = _breaking(eu, BREAKS["fault"], 100)
    async with eu.serving(), running_edge(world_of(tmp_path, eu, more=LIMITED)) as edge:
        answer = await edge.http.post("/v1/chat/completions", json=chat(max_tokens=5))
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "node_lost")
        assert len(eu.requests) == 3
        eu.script = saying("Hello")
        good = await edge.http.post("/v1/chat/completions", json=chat(max_tokens=5))
        assert good.headers["x-ratelimit-remaining-requests"] == "99"  # this one alone
    broken = UsageReader().read(tmp_path / "usage")[0]
    assert (broken.outcome, broken.complete) == ("node_lost", False)
    assert (broken.prompt, broken.completion) == (0, 0)


async def test_what_was_refused_for_good_is_not_tried_again(tmp_path: Path) -> None:
    eu = FakeRegion("eu", script=lambda _: [delta("Hel"), fault("internal_error")])
    async with eu.serving(), running_edge(world_of(tmp_path, eu)) as edge:
        answer = await edge.http.post("/v1/chat/completions", json=chat())
        assert answer.status_code == 500
        assert len(eu.requests) == 1


async def test_a_stream_is_still_shown_one_round_of_text(tmp_path: Path) -> None:
    eu = FakeRegion("eu")
    eu.script = _breaking(eu, [delta("Hel"), fault("node_lost")], 1)
    async with eu.serving(), running_edge(world_of(tmp_path, eu)) as edge:
        client = openai.AsyncOpenAI(base_url=f"{edge.url}/v1", api_key="none", max_retries=0)
        async with client:
            stream = await client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "Hi"}], stream=True
            )
            with pytest.raises(openai.APIError):
                _ = [chunk async for chunk in stream]
        assert len(eu.requests) == 1


async def test_every_dialect(tmp_path: Path) -> None:
    """Nothing of the first try is in the answer of the second, whoever renders it."""
    eu = FakeRegion("eu")
    eu.script = _breaking(eu, BREAKS["fault"], 1)
    async with eu.serving(), running_edge(world_of(tmp_path, eu)) as edge:
        run = "/client/v4/accounts/a/ai/run/@cf/acme/tiny"
        for path, body in (
            ("/v1/completions", {"model": "tiny", "prompt": "Hi"}),
            (run, {"prompt": "Hi"}),
        ):
            eu.requests.clear()
            answer = await edge.http.post(path, json=body)
            assert answer.status_code == 200
            assert answer.text.count("Hello there!") == 1
            assert "HelloHel" not in answer.text
            assert len(eu.requests) == 2
