"""Two processes of one edge on one listening socket: who comes is served by either, and nobody
notices that the first one ends."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from core.orders import RETIRE
from tests.edge.fakes import END, SECRET, FakeRegion, Hold, chat, delta

WORLD = """
version = 1
[access]
anonymous = "until-keys"
[models.tiny]
source = "tiny.gguf"
[[edges]]
name = "here"
listen = "127.0.0.1:0"
[[regions]]
name = "eu"
http = "{region}"
[[regions.nodes]]
name = "eu-1"
role = "combined"
model = "tiny"
"""


@contextmanager
def _edge(folder: Path, region: str, listener: socket.socket) -> Iterator[subprocess.Popen[bytes]]:
    topology = folder / "world.toml"
    topology.write_text(WORLD.format(region=region), encoding="utf-8")
    number = listener.fileno()
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "edge", "--topology", str(topology), "--state", str(folder)),
            *("--name", "here", "--listen-fd", str(number)),
        ],
        pass_fds=(number,),
        stderr=subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def _serving(base: str, pids: set[int]) -> None:
    """Until these processes, and no others, have answered in ten turns."""
    seen: list[int] = []
    async with asyncio.timeout(60):
        while set(seen[-10:]) != pids or len(seen) < 10:
            async with httpx.AsyncClient(
                base_url=base, trust_env=False, timeout=30, verify=False
            ) as http:
                page = (await http.get("/status")).json()
            if page["regions"][0]["state"] == "fresh":
                seen.append(page["workers"][0]["pid"])


async def test_the_first_process_ends_with_its_last_answer(tmp_path: Path) -> None:
    gate = asyncio.Event()
    eu = FakeRegion("eu", script=lambda _: [delta("a"), Hold(gate), delta("z"), *END])
    (tmp_path / "region.secret").write_text(SECRET)
    async with eu.serving():
        with socket.create_server(("127.0.0.1", 0)) as listener:
            base = f"http://127.0.0.1:{listener.getsockname()[1]}"
            with _edge(tmp_path, eu.address, listener) as first:
                await _serving(base, {first.pid})  # who came before it listened was kept waiting
                async with (
                    httpx.AsyncClient(base_url=base, trust_env=False, timeout=30) as kept,
                    httpx.AsyncClient(base_url=base, trust_env=False, timeout=30) as http,
                    http.stream("POST", "/v1/chat/completions", json=chat(stream=True)) as answer,
                ):
                    assert (await kept.get("/healthz")).status_code == 200
                    pieces = answer.aiter_text()
                    text = await anext(pieces)
                    with _edge(tmp_path, eu.address, listener) as second:
                        first.send_signal(RETIRE)
                        async with asyncio.timeout(60):
                            while "connection" not in (told := await kept.get("/healthz")).headers:
                                assert told.status_code == 200
                        assert told.headers["connection"] == "close"
                        await _serving(base, {second.pid})
                        assert (await kept.get("/healthz")).status_code == 200
                        assert first.poll() is None
                        gate.set()
                        text += "".join([piece async for piece in pieces])
                        assert '"content":"z"' in text
                        assert text.endswith("data: [DONE]\n\n")
                        assert await asyncio.to_thread(first.wait, 60) == 0
