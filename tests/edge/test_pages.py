"""Everything an edge answers that is not a generation, and the process itself."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import msgspec
import openai
import pytest

from edge.api.openai_types import ChatAnswer, ErrorAnswer, ModelList
from tests.edge.fakes import (
    END,
    SECRET,
    FakeRegion,
    Hold,
    chat,
    delta,
    running_edge,
    status_of,
    world_of,
)


async def test_the_front_door_says_where_things_are(tmp_path: Path) -> None:
    async with FakeRegion("eu").serving() as eu, running_edge(world_of(tmp_path, eu)) as edge:
        answer = await edge.http.get("/")
        assert answer.status_code == 200
        page = answer.json()
        assert page["api"] == "/v1"
        for where in (page["models"], page["status"], page["openapi"]):
            assert (await edge.http.get(where)).status_code == 200
        assert (await edge.http.head("/")).status_code == 200


async def test_models(tmp_path: Path) -> None:
    async with FakeRegion("eu").serving() as eu, running_edge(world_of(tmp_path, eu)) as edge:
        listed = msgspec.json.decode((await edge.http.get("/v1/models")).content, type=ModelList)
        assert [(m.id, m.context_length, m.ready) for m in listed.data] == [("tiny", 512, True)]
        assert listed.data[0].aliases == ["@cf/acme/tiny", "default"]
        async with openai.AsyncOpenAI(
            base_url=f"{edge.url}/v1",
            api_key="none",
        ) as client:
            for name in ("tiny", "@cf/acme/tiny"):
                model = await client.models.retrieve(name)
                assert (model.id, model.object) == (name, "model")
                assert isinstance(model.created, int)
        for path in ("/v1/models/%40cf%2Facme%2Ftiny", "/v1/models/@cf/acme/tiny"):
            assert (await edge.http.get(path)).json()["id"] == "@cf/acme/tiny"
        unknown = await edge.http.get("/v1/models/tinny")
        assert unknown.status_code == 404
        assert "; did you mean 'tiny'?" in unknown.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("POST", "/v1/nothing", 404, "not_found"),
        ("GET", "/v1/../v1/%00", 404, "not_found"),
    ],
)
async def test_wrong_routes(tmp_path: Path, method: str, path: str, status: int, code: str) -> None:
    async with FakeRegion("eu").serving() as eu, running_edge(world_of(tmp_path, eu)) as edge:
        answer = await edge.http.request(method, path)
    assert answer.status_code == status
    error = msgspec.json.decode(answer.content, type=ErrorAnswer).error
    assert (error.code, error.type) == (code, "invalid_request_error")


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
async def test_monitors_may_ask_for_the_head_alone(tmp_path: Path, path: str) -> None:
    async with FakeRegion("eu").serving() as eu, running_edge(world_of(tmp_path, eu)) as edge:
        whole, head = await edge.http.get(path), await edge.http.head(path)
    assert (whole.status_code, head.status_code, head.content) == (200, 200, b"")
    for answer in (whole, head):
        assert answer.headers["content-type"] == "text/plain; charset=utf-8"
        assert answer.headers["content-length"] == str(len(whole.content))


async def test_health_status_and_metrics(tmp_path: Path) -> None:
    async with FakeRegion("eu").serving() as eu, running_edge(world_of(tmp_path, eu)) as edge:
        assert (await edge.http.get("/healthz")).text == "ok\n"
        assert (await edge.http.get("/readyz")).status_code == 200
        await edge.http.post("/v1/chat/completions", json=chat())
        page = (await edge.http.get("/status")).json()
        text = (await edge.http.get("/metrics")).text
        eu.tell(status_of("eu", sequence=2))
    assert (page["edge"], page["in_flight"], page["draining"]) == ("here", 0, False)
    (region,) = page["regions"]
    assert (region["name"], region["state"], region["round_trip_ms"]) == ("eu", "fresh", 10.0)
    assert region["status"]["nodes"][0]["name"] == "eu-decode-1"
    assert region["weight"] == 100
    assert 0 <= region["age_s"] < 60
    for line in (
        'skerry_running_requests{region="eu"} 2.0',
        'skerry_generated_tokens_total{node="eu-decode-1",region="eu"} 42.0',
        'skerry_kv_blocks_used{node="eu-decode-1",region="eu"} 5.0',
        'skerry_edge_requests_total{dialect="chat",outcome="ok"} 1.0',
        'skerry_edge_routes_total{reason="nearest_short",region="eu"} 1.0',
        'skerry_edge_cached_tokens_total{model="tiny"} 8.0',
        'skerry_edge_region_up{region="eu"} 1.0',
    ):
        assert line in text


async def test_openapi_describes_what_is_answered(tmp_path: Path) -> None:
    async with FakeRegion("eu").serving() as eu, running_edge(world_of(tmp_path, eu)) as edge:
        document = (await edge.http.get("/openapi.json")).json()
        answer = (await edge.http.post("/v1/chat/completions", json=chat())).content
    operation = document["paths"]["/v1/chat/completions"]["post"]
    body = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    schemas = document["components"]["schemas"]
    schema = schemas[body.rsplit("/", 1)[1]]
    assert set(schema["required"]) == {"model", "messages"}
    assert schema["additionalProperties"] is False
    temperature = schema["properties"]["temperature"]["anyOf"][0]
    assert (temperature["minimum"], temperature["maximum"]) == (0, 2)
    # the documented answer and the given one have the same fields
    assert set(json.loads(answer)) == set(schemas["ChatAnswer"]["properties"])
    assert msgspec.json.decode(answer, type=ChatAnswer).choices[0].finish_reason == "stop"
    refs = set(_refs(document))
    assert {one.rsplit("/", 1)[1] for one in refs} <= set(schemas)
    assert len(refs) > 10


def _refs(node: object) -> list[str]:
    if isinstance(node, dict):
        found = [node["$ref"]] if "$ref" in node else []
        return found + [ref for value in node.values() for ref in _refs(value)]
    if isinstance(node, list):
        return [ref for value in node for ref in _refs(value)]
    return []


def _process(tmp_path: Path, listen: str, region: str = "127.0.0.1:1") -> subprocess.Popen[str]:
    topology = tmp_path / "world.toml"
    topology.write_text(
        f"""
version = 1
[access]
anonymous = "until-keys"
[models.tiny]
source = "tiny.gguf"
[[edges]]
name = "here"
listen = "{listen}"
[[regions]]
name = "eu"
http = "{region}"
[[regions.nodes]]
name = "eu-1"
role = "combined"
model = "tiny"
"""
    )
    command = [sys.executable, "-m", "edge", "--topology", str(topology), "--state", str(tmp_path)]
    return subprocess.Popen([*command, "--name", "here"], stderr=subprocess.PIPE, text=True)


def _wait_ready(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    for line in process.stderr:
        if "edge ready" in line:
            return line.rsplit("address=", 1)[1].strip()
    raise AssertionError(f"the edge ended with {process.wait()}")


def test_the_process_is_light_and_ends_in_order(tmp_path: Path) -> None:
    with _process(tmp_path, "127.0.0.1:0") as process:
        try:
            address = _wait_ready(process)
            assert (
                httpx.get(f"http://{address}/healthz", trust_env=False, timeout=30).text == "ok\n"
            )
            loaded = Path(f"/proc/{process.pid}/maps")
            if loaded.exists():
                text = loaded.read_text()
                assert "torch" not in text
                assert "grpc" not in text
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
            assert process.stderr is not None
            assert "edge stopped" in process.stderr.read()
        finally:
            process.kill()


async def test_sigterm_lets_streams_finish(tmp_path: Path) -> None:
    gate = asyncio.Event()
    eu = FakeRegion("eu", script=lambda _: [delta("a"), Hold(gate), delta("z"), *END])
    async with eu.serving():
        (tmp_path / "region.secret").write_text(SECRET)
        with _process(tmp_path, "127.0.0.1:0", eu.address) as process:
            try:
                address = await asyncio.to_thread(_wait_ready, process)
                text = ""
                async with (
                    httpx.AsyncClient(
                        base_url=f"http://{address}", trust_env=False, timeout=30
                    ) as http,
                    http.stream("POST", "/v1/chat/completions", json=chat(stream=True)) as answer,
                ):
                    async for piece in answer.aiter_text():
                        text += piece
                        if not gate.is_set():
                            process.send_signal(signal.SIGTERM)
                            await _refused(address)
                            gate.set()
                assert text.endswith("data: [DONE]\n\n")
                assert '"content":"z"' in text
                assert await asyncio.to_thread(process.wait, 10) == 0
            finally:
                process.kill()


async def _refused(address: str) -> None:
    """Until nobody new is let in."""
    host, port = address.split(":")
    async with asyncio.timeout(30):
        while True:
            try:
                _, writer = await asyncio.open_connection(host, int(port))
            except ConnectionRefusedError:
                return
            writer.close()
            await writer.wait_closed()
            await asyncio.sleep(0.01)


def test_a_bad_world_exits_2_with_one_line(tmp_path: Path) -> None:
    with _process(tmp_path, "0.0.0.0:0") as process:
        _, complaint = process.communicate(timeout=60)
    assert process.returncode == 2
    assert complaint.count("\n") == 1
    assert "network_trusted" in complaint
    assert not os.path.exists(tmp_path / "region.secret")


def test_a_file_that_is_no_ledger_exits_2_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "budgets.counts").write_bytes(b"no ledger at all" * 400)
    with _process(tmp_path, "127.0.0.1:0") as process:
        _, complaint = process.communicate(timeout=60)
    assert process.returncode == 2
    said = f"edge here: {tmp_path}/budgets.counts is no ledger: move it away; counts begin anew\n"
    assert complaint == said
