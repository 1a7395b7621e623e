"""What callers say is nowhere but in answers: not in a log, label, status, ledger or dump.

The world plays prompts back, so the canary is in every answer too. It is sent in every place a
caller can write in, on the ways that end well and on those that do not, while processes crash.
"""

from __future__ import annotations

import json
import resource
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import msgspec
import psutil
import pytest

from core.config_tenants import ANONYMOUS, Tenant
from core.usage import UsageReader
from deploy.launcher import LocalWorld, run_world
from deploy.process import Pauses
from deploy.toml_write import dump
from tests.tiny_text import write_tiny_folder
from tests.world.faults import alive, until
from tests.world.scripted import CONTEXT, MODEL, completion, lines_of, streaming, topology

pytestmark = pytest.mark.world

CANARY = "quetzal-7351-marzipan"
RUN = "/client/v4/accounts/local/ai/run/"
BACK_S = 60.0
"""For what was killed, on a machine that has other things to do."""
SAID = [{"role": "user", "content": f"My secret is {CANARY}."}]


def write_world(folder: Path) -> Path:
    source = write_tiny_folder(folder / "tiny", context=CONTEXT)
    described = topology(source, step_ms=1.0, prefill_tokens_per_s=4000.0)
    limits = {ANONYMOUS: Tenant(tokens_per_minute=1_000_000_000)}  # so that a ledger is kept
    file = folder / "world.toml"
    file.write_text(dump(msgspec.structs.replace(described, tenants=limits)), encoding="utf-8")
    return file


def bodies() -> Iterator[tuple[str, object]]:
    """(path, body): good ones, and the canary wherever a refusal might quote it."""
    chat, text = "/v1/chat/completions", "/v1/completions"
    good = {"model": MODEL, "messages": SAID, "max_tokens": 400}
    yield chat, good
    yield chat, good | {"stream": True, "stream_options": {"include_usage": True}}
    yield chat, good | {"user": CANARY, "metadata": {CANARY: CANARY}, "stop": [CANARY]}
    yield chat, good | {"prompt_cache_key": CANARY, "logprobs": True, "top_logprobs": 3, "n": 2}
    tool = {"name": "t", "description": CANARY, "parameters": {"type": "object"}}
    yield chat, good | {"tools": [{"type": "function", "function": tool}]}
    schema = {"type": "object", "properties": {CANARY: {"const": CANARY}}}
    wanted = {"name": "s", "schema": schema, "strict": True}
    yield chat, good | {"response_format": {"type": "json_schema", "json_schema": wanted}}
    yield text, {"model": MODEL, "prompt": f"{CANARY} " * 40, "stream": True}
    yield RUN + MODEL, {"messages": SAID}
    yield RUN + MODEL, {"prompt": CANARY, "stream": True}
    # refusals
    yield chat, good | {CANARY: 1}
    yield chat, good | {"model": CANARY}
    yield chat, good | {"temperature": CANARY}
    yield chat, good | {"messages": [{"role": CANARY, "content": CANARY}]}
    yield chat, good | {"messages": [{"role": "user", "content": [{"type": CANARY}]}]}
    yield chat, good | {"logit_bias": {CANARY: 1}}
    yield chat, good | {"max_tokens": 10 * CONTEXT}
    yield text, {"model": MODEL, "prompt": f"{CANARY} " * CONTEXT}
    yield text, f'{{"model": "{MODEL}", "prompt": "{CANARY}'.encode()
    yield text, CANARY.encode() * 500_000
    yield RUN + CANARY, {"prompt": CANARY}
    yield RUN + MODEL, {"prompt": CANARY, CANARY: CANARY}
    yield f"/v1/{CANARY}", good
    yield f"/v1/models/{CANARY}?{CANARY}={CANARY}", good


def send_all(edge: str) -> set[int]:
    """Every body, with the canary in headers too; the statuses that came."""
    headers = {
        "x-session-affinity": CANARY,
        "x-request-id": CANARY,
        "user-agent": CANARY,
        "traceparent": CANARY,
        "content-type": "application/json",
    }
    statuses = set()
    with httpx.Client(base_url=edge, timeout=30, trust_env=False, headers=headers) as client:
        for path, body in bodies():
            raw = body if isinstance(body, bytes) else json.dumps(body).encode()
            statuses.add(client.post(path, content=raw).status_code)
        for key in (CANARY, f"sk-skerry-{CANARY}"):
            said = {"authorization": f"Bearer {key}"}
            statuses.add(client.get("/v1/models", headers=said).status_code)
    return statuses


def crash_while_answering(world: LocalWorld, edge: str) -> None:
    """A rank aborts and a router is killed, each in the middle of an answer; a caller leaves."""
    body = completion(f"{CANARY} crashing " * 110)  # three seconds of answering
    struck: set[str] = set()
    for number, rank in ((signal.SIGABRT, True), (signal.SIGKILL, False)):
        with streaming(edge, body) as response:
            lines = lines_of(response)
            next(lines)
            region = response.headers["x-skerry-region"]
            process = psutil.Process(world.pid(f"{region}-decode" if rank else region))
            for victim in process.children() if rank else [process]:
                assert victim.rlimit(psutil.RLIMIT_CORE)[0] == 0
                victim.send_signal(number)
            for _ in lines:
                pass
        struck.add(region)
    assert all(until(partial(alive, world, region), BACK_S) for region in struck)
    with streaming(edge, body) as response:
        next(lines_of(response))


def pages_of(world: LocalWorld) -> Iterator[tuple[str, bytes]]:
    for name, url in {**world.edges, **world.routers}.items():
        for path in ("/status", "/metrics", "/readyz", "/explain"):
            answer = httpx.get(url + path, timeout=10, trust_env=False)
            yield f"{name}{path}", answer.content


def test_the_canary_is_in_answers_alone(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))  # a shell that allows core files
    told: list[str] = []
    pages: dict[str, bytes] = {}
    state = tmp_path / "state"
    try:
        with run_world(
            write_world(tmp_path), say=told.append, state=state, pauses=Pauses(0.1, 0.5, 5.0)
        ) as world:
            for edge in world.edges.values():
                assert send_all(edge) >= {200, 400, 404, 413}
            crash_while_answering(world, world.edges["ams"])
            pages |= pages_of(world)
            folders = {Path(psutil.Process(world.pid(one)).cwd()) for one in ("ams", "eu-decode")}
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))
    assert [name for name, text in pages.items() if CANARY.encode() in text] == []
    assert [line for line in told if CANARY in line] == []
    files = [path for path in state.rglob("*") if path.is_file()]
    assert [str(path) for path in files if CANARY.encode() in path.read_bytes()] == []
    cores = [path for folder in folders for path in folder.glob("core*")]
    assert [str(path) for path in cores if path.is_file()] == []
    # That the search could have found something: what should be there is there.
    assert b"answered id=" in (state / "logs" / "ams.log").read_bytes()
    assert any(path.name.endswith(".sqlite") for path in files)
    assert b"skerry_edge_requests_total" in pages["ams/metrics"]
    records = UsageReader().read(state / "usage")
    outcomes = {one.outcome for one in records}
    assert outcomes >= {"ok", "cancelled"}
    assert outcomes & {"node_lost", "incomplete_stream", "region_unavailable"}, outcomes
