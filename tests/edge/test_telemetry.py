"""Spans of a request as a collector gets them, and metrics under OpenTelemetry's names."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from core.config import Observe, World, parse
from core.errors import ConfigError
from tests.edge.fakes import END, FakeRegion, chat, delta, running_edge, world_of

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SECRET_WORDS = "nobody is to read this"


@asynccontextmanager
async def collector() -> AsyncIterator[tuple[str, list[ExportTraceServiceRequest]]]:
    """Its base URL, and what it was sent."""
    got: list[ExportTraceServiceRequest] = []

    async def take(request: web.Request) -> web.Response:
        body = await request.read()  # aiohttp has undone any compression
        body = gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body
        got.append(ExportTraceServiceRequest.FromString(body))
        return web.Response()

    app = web.Application()
    app.router.add_post("/v1/traces", take)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", got
    finally:
        await runner.cleanup()


def observed(world: World, endpoint: str) -> World:
    topology = msgspec.structs.replace(world.topology, observe=Observe(otlp=endpoint))
    return replace(world, topology=topology)


async def test_a_request_is_one_trace_of_its_callers(tmp_path: Path) -> None:
    eu = FakeRegion("eu", script=lambda _: [delta(SECRET_WORDS), *END])
    async with collector() as (endpoint, got), eu.serving():
        async with running_edge(observed(world_of(tmp_path, eu), endpoint)) as edge:
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
            asked = chat(SECRET_WORDS)
            answer = await edge.http.post("/v1/chat/completions", json=asked, headers=headers)
            assert answer.status_code == 200
        # An edge that ends has sent what it had.
        spans = [span for one in got for r in one.resource_spans
                 for scope in r.scope_spans for span in scope.spans]  # fmt: skip
    whole, *steps = sorted(spans, key=lambda span: span.parent_span_id.hex() != PARENT)
    assert whole.name == "chat tiny"
    assert {span.trace_id.hex() for span in spans} == {TRACE}
    assert all(step.parent_span_id == whole.span_id for step in steps)
    told = {one.key: one.value for one in whole.attributes}
    assert told["gen_ai.usage.input_tokens"].int_value == 12
    assert told["gen_ai.usage.cache_read.input_tokens"].int_value == 8
    assert told["skerry.decode"].string_value == "eu-decode-1"
    assert {"admit", "route", "travel", "prefill", "decode"} <= {step.name for step in steps}
    assert all(step.start_time_unix_nano <= step.end_time_unix_nano for step in steps)
    assert SECRET_WORDS not in str(got)


async def test_a_collector_that_is_away_costs_nobody_an_answer(tmp_path: Path) -> None:
    async with FakeRegion("eu").serving() as eu:
        world = observed(world_of(tmp_path, eu), "http://127.0.0.1:9")
        async with asyncio.timeout(20), running_edge(world) as edge:
            headers = {"traceparent": "nonsense"}
            answer = await edge.http.post("/v1/chat/completions", json=chat("x"), headers=headers)
            assert answer.status_code == 200


async def test_metrics_have_both_names(tmp_path: Path) -> None:
    async with FakeRegion("eu").serving() as eu, running_edge(world_of(tmp_path, eu)) as edge:
        await edge.http.post("/v1/chat/completions", json=chat("x"))
        text = (await edge.http.get("/metrics")).text
    labels = 'gen_ai_operation_name="chat",gen_ai_request_model="tiny"'
    assert f"gen_ai_server_time_to_first_token_seconds_count{{{labels}}} 1.0" in text
    assert f"gen_ai_server_time_per_output_token_seconds_count{{{labels}}} 1.0" in text
    assert f'gen_ai_server_request_duration_seconds_count{{error_type="",{labels}}} 1.0' in text


@pytest.mark.parametrize("url", ["collector:4318", "grpc://collector", "http://"])
def test_an_endpoint_is_a_url(url: str) -> None:
    with pytest.raises(ConfigError, match=r"observe\.otlp"):
        parse(f'version = 1\nmodels = {{}}\nedges = []\nregions = []\n[observe]\notlp = "{url}"\n')
