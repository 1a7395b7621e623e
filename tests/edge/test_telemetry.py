"""What an edge tells of a request: spans as a collector gets them, metrics under OpenTelemetry's
names."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from core.config import Observe, World, parse
from core.errors import ConfigError
from core.telemetry import MOST_ATTEMPTS, enter, read_context
from core.types import RegionName
from edge.telemetry import Traced
from tests.edge.fakes import END, FakeRegion, chat, delta, fault, running_edge, world_of
from tests.otlp import collecting

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SECRET_WORDS = "nobody is to read this"
CHAT = "/v1/chat/completions"


def observed(world: World, endpoint: str) -> World:
    topology = msgspec.structs.replace(world.topology, observe=Observe(otlp=endpoint))
    return replace(world, topology=topology)


async def test_a_request_is_told_in_its_callers_trace(tmp_path: Path) -> None:
    eu = FakeRegion("eu", script=lambda _: [delta(SECRET_WORDS), *END])
    with collecting() as got:
        async with eu.serving(), running_edge(observed(world_of(tmp_path, eu), got.url)) as edge:
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
            answer = await edge.http.post(CHAT, json=chat(SECRET_WORDS), headers=headers)
            assert answer.status_code == 200
        # An edge that ends has sent what it had.
        spans = got.spans
        assert SECRET_WORDS not in str(got.requests)
    whole, *steps = sorted(spans, key=lambda span: span.parent != PARENT)
    assert {span.trace for span in spans} == {TRACE}
    assert (whole.name, whole.kind, whole.failed) == ("chat tiny", "SERVER", "")
    assert whole.attributes["gen_ai.usage.input_tokens"] == 12
    assert whole.attributes["gen_ai.usage.cache_read.input_tokens"] == 8
    assert whole.attributes["skerry.decode"] == "eu-decode-1"
    assert whole.attributes["skerry.request.id"] == answer.headers["x-request-id"]
    assert {step.name: step.kind for step in steps} == {
        "admit": "INTERNAL", "route": "INTERNAL", "attempt": "CLIENT",
    }  # fmt: skip
    for step in steps:
        assert step.parent == whole.id
        assert whole.began_ns <= step.began_ns <= step.ended_ns <= whole.ended_ns + 10**6
    [attempt] = [step for step in steps if step.name == "attempt"]
    [asked] = eu.requests
    assert asked.trace == f"00-{TRACE}-{attempt.id}-01"


async def test_each_attempt_has_the_id_that_its_region_was_told(tmp_path: Path) -> None:
    eu = FakeRegion("eu", script=lambda _: [fault("node_lost")])
    us = FakeRegion("us")
    with collecting() as got:
        async with (
            eu.serving(),
            us.serving(),
            running_edge(observed(world_of(tmp_path, eu, us), got.url)) as edge,
        ):
            while not (eu.requests and us.requests):
                number = len(eu.requests) + len(us.requests)
                answer = await edge.http.post(CHAT, json=chat(f"{number} " + "word " * 300))
                assert answer.status_code == 200
        last = us.requests[-1]
        context = read_context(last.trace)
        assert context is not None
        spans = got.trace(f"{context.trace:032x}")
    [whole] = [span for span in spans if span.kind == "SERVER"]
    assert whole.parent == ""  # a trace of the edge's own
    lost, won = sorted(
        (span for span in spans if span.kind == "CLIENT"), key=lambda span: span.began_ns
    )
    assert (lost.attributes["skerry.region"], lost.failed) == ("eu", "node_lost")
    assert lost.attributes["error.type"] == "node_lost"
    assert (won.attributes["skerry.region"], won.failed) == ("us", "")
    [first] = [one for one in eu.requests if one.id == last.id]
    assert [first.trace, last.trace] == [
        f"00-{whole.trace}-{lost.id}-01", f"00-{whole.trace}-{won.id}-01",
    ]  # fmt: skip


async def test_a_caller_that_does_not_sample_is_obeyed_on_all_hops(tmp_path: Path) -> None:
    with collecting() as got:
        async with (
            FakeRegion("eu").serving() as eu,
            running_edge(observed(world_of(tmp_path, eu), got.url)) as edge,
        ):
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
            answer = await edge.http.post(CHAT, json=chat("x"), headers=headers)
            assert answer.status_code == 200
        assert got.requests == []
    [asked] = eu.requests
    context = read_context(asked.trace)
    assert context is not None
    assert (f"{context.trace:032x}", context.sampled) == (TRACE, False)


async def test_a_refusal_is_a_trace_too(tmp_path: Path) -> None:
    with collecting() as got:
        async with (
            FakeRegion("eu").serving() as eu,
            running_edge(observed(world_of(tmp_path, eu), got.url)) as edge,
        ):
            assert (await edge.http.post(CHAT, json=chat("x", model="no"))).status_code == 404
        whole, admit = sorted(got.spans, key=lambda span: span.kind != "SERVER")
    assert (whole.name, whole.failed) == ("chat unknown", "model_not_found")
    assert (admit.name, admit.parent) == ("admit", whole.id)


async def test_where_nobody_collects_nothing_is_carried(tmp_path: Path) -> None:
    async with FakeRegion("eu").serving() as eu, running_edge(world_of(tmp_path, eu)) as edge:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        await edge.http.post(CHAT, json=chat("x"), headers=headers)
    [asked] = eu.requests
    assert asked.trace == ""
    assert b"trace" not in msgspec.msgpack.encode(asked)


async def test_a_collector_that_is_away_costs_nobody_an_answer(tmp_path: Path) -> None:
    async with FakeRegion("eu").serving() as eu:
        world = observed(world_of(tmp_path, eu), "http://127.0.0.1:9")
        async with asyncio.timeout(30), running_edge(world) as edge:
            headers = {"traceparent": "nonsense"}
            answer = await edge.http.post(CHAT, json=chat("x"), headers=headers)
            assert answer.status_code == 200


def test_a_request_that_is_refused_again_and_again_does_not_fill_the_collector() -> None:
    traced = Traced(enter(""))
    for number in range(3 * MOST_ATTEMPTS):
        traced.tried(RegionName("eu"), "prefix_home", float(number))
        context = read_context(traced.header)
        assert context is not None
        # What the region is told to keep is what the edge tells of: no span without its parent.
        assert context.sampled == (number < MOST_ATTEMPTS)
        assert (context.span == traced.sent[-1].context.span) == context.sampled
        traced.ended("no_capacity", number + 0.5)
    assert len(traced.sent) == MOST_ATTEMPTS
    assert [one.ended_s for one in traced.sent[-2:]] == [MOST_ATTEMPTS - 1.5, MOST_ATTEMPTS - 0.5]


async def test_metrics_have_both_names(tmp_path: Path) -> None:
    async with FakeRegion("eu").serving() as eu, running_edge(world_of(tmp_path, eu)) as edge:
        await edge.http.post(CHAT, json=chat("x"))
        text = (await edge.http.get("/metrics")).text
    labels = (
        'gen_ai_operation_name="chat",gen_ai_provider_name="skerry",gen_ai_request_model="tiny"'
    )
    assert f"gen_ai_server_time_to_first_token_seconds_count{{{labels}}} 1.0" in text
    assert f"gen_ai_server_time_per_output_token_seconds_count{{{labels}}} 1.0" in text
    assert f'gen_ai_server_request_duration_seconds_count{{error_type="",{labels}}} 1.0' in text
    usage = "gen_ai_client_token_usage"
    # What the region told: 12 in, 3 out; the buckets are those of the conventions.
    assert f'{usage}_sum{{{labels},gen_ai_token_type="input"}} 12.0' in text
    assert f'{usage}_sum{{{labels},gen_ai_token_type="output"}} 3.0' in text
    assert f'{usage}_bucket{{{labels},gen_ai_token_type="input",le="16.0"}} 1.0' in text
    assert f'{usage}_bucket{{{labels},gen_ai_token_type="input",le="4.0"}} 0.0' in text


@pytest.mark.parametrize("url", ["collector:4318", "grpc://collector", "http://"])
def test_an_endpoint_is_a_url(url: str) -> None:
    with pytest.raises(ConfigError, match=r"observe\.otlp"):
        parse(f'version = 1\nmodels = {{}}\nedges = []\nregions = []\n[observe]\notlp = "{url}"\n')
