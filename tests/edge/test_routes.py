"""The reason of a route is told three times, in the same word: header, metric, log."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from edge.routing.placement import Reason
from tests.edge.fakes import FakeRegion, chat, fault, running_edge, saying, world_of

LONG = "a prompt that is well above the bound of short ones. " * 40


async def test_reasons_are_seen(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    eu, us = FakeRegion("eu"), FakeRegion("us")
    async with eu.serving(), us.serving(), running_edge(world_of(tmp_path, eu, us)) as edge:

        async def ask(content: str, **headers: str) -> tuple[str, str]:
            answer = await edge.http.post(
                "/v1/chat/completions", json=chat(content), headers=headers
            )
            assert answer.status_code == 200
            return answer.headers["x-skerry-region"], answer.headers["x-skerry-route"]

        seen = [await ask("Hi"), await ask(LONG), await ask("Hi", **{"x-session-affinity": "me"})]
        eu.script = us.script = lambda _: [fault("node_lost")]
        us.script = saying("well")
        while (last := await ask(f"{len(seen)} Hi"))[1] != Reason.FAILOVER:
            seen.append(last)  # the far one was drawn first
            assert len(seen) < 20
        seen.append(last)
        page = (await edge.http.get("/metrics")).text
    reasons = [reason for _, reason in seen]
    assert reasons[0] == Reason.NEAREST_SHORT
    assert reasons[1] in {Reason.PREFIX_HOME, Reason.FASTEST}
    assert reasons[2] == Reason.AFFINITY
    for region, reason in seen:
        assert f'skerry_edge_routes_total{{reason="{reason}",region="{region}"}}' in page
    lines = [record.getMessage() for record in caplog.records]
    answered = [line for line in lines if line.startswith("answered ")]
    for (region, reason), line in zip(seen, answered, strict=True):
        assert f" region={region} route={reason} " in line
    assert not any("above the bound" in line for line in lines)  # no prompt text


async def test_prompt_cache_key_is_an_affinity_and_the_header_outranks_it(tmp_path: Path) -> None:
    eu, us = FakeRegion("eu"), FakeRegion("us")
    async with eu.serving(), us.serving(), running_edge(world_of(tmp_path, eu, us)) as edge:

        async def region(key: str | None, header: str | None) -> str:
            more = {} if key is None else {"prompt_cache_key": key}
            headers = {} if header is None else {"x-session-affinity": header}
            answer = await edge.http.post(
                "/v1/chat/completions", json=chat("Hi", **more), headers=headers
            )
            assert answer.headers["x-skerry-route"] == Reason.AFFINITY
            return str(answer.headers["x-skerry-region"])

        ids = [f"user {number}" for number in range(8)]
        by_key = [await region(one, None) for one in ids]
        by_header = [await region(None, one) for one in ids]
        both = [await region("somebody else", one) for one in ids]
    assert by_key == by_header == both
    assert set(by_key) == {"eu", "us"}
