"""A world of two edges and two regions whose ranks play the prompt back out of real KV blocks.

What a scripted rank answers is read from its blocks and checked, so a block that is missing,
stale or somebody else's shows as a failed request.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import msgspec

from core import config
from core.config_tenants import Access
from core.types import Role
from deploy import toml_write
from deploy.launcher import LocalWorld, run_world
from deploy.process import Pauses
from tests.tiny_text import write_tiny_folder

MODEL = "tiny"
CONTEXT = 16384
SILENT_S = 90.0
"""A caller leaves who hears nothing for so long: a node that starts for it may need half a minute
on a machine that has much else to do."""
PLAIN = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Of clients that speak plain http; else each would read all certificates that a machine knows
first, and busy tests would be busiest with that."""


def topology(
    source: Path, *, step_ms: float, prefill_tokens_per_s: float, repeat: bool = False
) -> config.Topology:
    model = config.Model(
        source=str(source),
        aliases=("tiny-alias", "@cf/huggingfacetb/smollm2-135m-instruct"),
        engine="scripted",
        context=CONTEXT,
        scripted=config.Scripted(
            step_ms=step_ms, prefill_tokens_per_s=prefill_tokens_per_s, repeat=repeat
        ),
    )
    here = "127.0.0.1:0"
    return config.Topology(
        version=config.VERSION,
        name="scripted",
        models={MODEL: model},
        edges=(
            config.Edge(name="ams", listen=here, admin=here, round_trip_ms={"eu": 2, "us": 8}),
            config.Edge(name="nyc", listen=here, admin=here, round_trip_ms={"us": 2, "eu": 8}),
        ),
        regions=(_region("eu"), _region("us")),
        access=Access(anonymous="until-keys"),
        routing=config.Routing(expose_nodes=True, simulate_round_trips=True),
    )


def _region(name: str) -> config.Region:
    nodes = tuple(
        config.Node(
            name=f"{name}-{role}", role=role, model=MODEL, kv_tokens=CONTEXT * 2, speculate=False
        )
        for role in (Role.PREFILL, Role.DECODE)
    )
    return config.Region(name=name, nodes=nodes)


@contextmanager
def scripted_world(
    folder: Path,
    *,
    step_ms: float = 1.0,
    prefill_tokens_per_s: float = 4000.0,
    workers: Mapping[str, int] = MappingProxyType({}),
    otlp: str | None = None,
    repeat: bool = False,
) -> Iterator[LocalWorld]:
    """The world, up, its lost processes started again after a tenth of a second. `workers`: of
    edges that have several processes; `repeat`: answers are as long as they are asked to be."""
    source = write_tiny_folder(folder / "tiny", context=CONTEXT)
    file = folder / "scripted.toml"
    described = topology(
        source, step_ms=step_ms, prefill_tokens_per_s=prefill_tokens_per_s, repeat=repeat
    )
    edges = (
        msgspec.structs.replace(edge, workers=workers.get(edge.name, 1)) for edge in described.edges
    )
    described = msgspec.structs.replace(
        described, edges=tuple(edges), observe=config.Observe(otlp=otlp)
    )
    file.write_text(toml_write.dump(described), encoding="utf-8")
    said: list[str] = []
    with run_world(
        file, say=said.append, state=folder / "state", pauses=Pauses(0.1, 0.5, 5.0)
    ) as world:
        yield world


@dataclass(slots=True)
class Answer:
    """What a client saw of one stream."""

    status: int
    headers: httpx.Headers
    text: str = ""
    done: bool = False
    finish: str | None = None
    error: dict[str, Any] | None = None
    usage: dict[str, Any] | None = None
    facts: dict[str, Any] = field(default_factory=dict)


def lines_of(response: httpx.Response) -> Iterator[str]:
    for line in response.iter_lines():
        if line:
            yield line


def take(answer: Answer, line: str) -> str:
    """Add one line of the event stream; the text that it brought."""
    if line.startswith(": skerry "):
        answer.facts = json.loads(line.removeprefix(": skerry "))
    if not line.startswith("data: "):
        return ""
    data = line.removeprefix("data: ")
    if data == "[DONE]":
        answer.done = True
        return ""
    event = json.loads(data)
    answer.error = event.get("error", answer.error)
    answer.usage = event.get("usage") or answer.usage
    piece = ""
    for choice in event.get("choices", ()):
        piece += choice.get("text") or choice.get("delta", {}).get("content") or ""
        answer.finish = choice.get("finish_reason") or answer.finish
    answer.text += piece
    return piece


def completion(prompt: str, **more: object) -> dict[str, object]:
    """The body of a streamed raw completion."""
    return {
        "model": MODEL, "prompt": prompt, "stream": True, "temperature": 0, "max_tokens": 3500,
        "stream_options": {"include_usage": True}, **more,
    }  # fmt: skip


@contextmanager
def streaming(
    edge: str, body: dict[str, object], path: str = "/v1/completions"
) -> Iterator[httpx.Response]:
    """An open stream; leaving the block closes its connection."""
    with (
        httpx.Client(base_url=edge, timeout=SILENT_S, trust_env=False, verify=PLAIN) as client,
        client.stream("POST", path, json=body) as response,
    ):
        yield response


def ask(
    edge: str,
    body: dict[str, object],
    path: str = "/v1/completions",
    client: httpx.Client | None = None,
) -> Answer:
    """One stream, read to its end; over a connection of its own, or those of `client`."""
    opened = (
        streaming(edge, body, path) if client is None else client.stream("POST", path, json=body)
    )
    with opened as response:
        answer = Answer(response.status_code, response.headers)
        if response.status_code != 200:
            answer.error = json.loads(response.read())["error"]
            return answer
        for line in lines_of(response):
            take(answer, line)
    return answer


def region_status(world: LocalWorld, region: str) -> dict[str, Any]:
    return page(f"{world.routers[region]}/status")


def page(url: str) -> dict[str, Any]:
    """What a process tells in JSON."""
    response = httpx.get(url, timeout=5, trust_env=False, verify=PLAIN)
    told: dict[str, Any] = msgspec.json.decode(response.content)
    return told
