"""Other routers: what is sent is what a backend reads, and every request is counted once."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.routers import bench, peers
from loadtest.routers.bench import Row
from loadtest.routers.doubles import Clock, doubles
from loadtest.routers.peers import KINDS, Routers
from loadtest.routers.replay import Tally, replay
from loadtest.routers.text import BLOCK_CHARS, SHRUNK, Prompt, read
from loadtest.simulator.traces import BLOCK_TOKENS, Request, block_hash, chain_of

SPEED = 200.0


def _request(at_s: float, *names: str) -> Request:
    blocks = tuple(block_hash(name) for name in names)
    tokens = len(blocks) * BLOCK_TOKENS
    return Request(at_s, blocks, tokens, 30, blocks[0], chain_of(blocks, tokens))


@given(st.integers(0, 10**6), st.integers(1, 10**6), st.lists(st.binary(min_size=16, max_size=16)))
def test_a_prompt_is_read_as_it_was_written(number: int, tokens: int, blocks: list[bytes]) -> None:
    prompt = Prompt(number, tokens, 7, blocks)
    assert read(prompt.text()) == prompt
    longer = Prompt(number, tokens, 7, [*blocks, bytes(16)])
    shared = len(blocks) * BLOCK_CHARS
    assert longer.text()[:shared] == prompt.text()[:shared]


@pytest.mark.parametrize("text", ["", "x", "y" * BLOCK_CHARS])
def test_other_prompts_are_refused(text: str) -> None:
    with pytest.raises(ValueError) as caught:
        read(text)
    assert caught.type is ValueError


def test_a_backend_reads_reuses_and_tells() -> None:
    async def scene() -> None:
        clock = Clock(SPEED)
        async with doubles(2, blocks=8, tokens_per_s=5120.0, clock=clock) as backends:
            one, other = backends
            requests = [_request(0.0, "a", "b"), _request(5.0, "a", "b", "c"), _request(10.0, "z")]
            tally = await replay(requests, one.url, [one], clock)
            async with aiohttp.ClientSession() as session:
                async with session.get(f"{other.url}/health") as well:
                    assert well.status == 200
                body = {"model": "model", "prompt": Prompt(9, 512, 3, [block_hash("a")]).text()}
                async with session.post(f"{other.url}/v1/completions", json=body) as answer:
                    usage = json.loads(await answer.text())["usage"]
        assert usage["prompt_tokens"] == 512
        assert (
            usage["prompt_tokens_details"]["cached_tokens"] == 0
        )  # its own cache, not the first's
        assert (tally.sent, tally.answered) == (3, 3)
        assert tally.hit == pytest.approx(2 / 6)
        assert tally.hit_of_infinite == pytest.approx(1.0)
        assert tally.busiest == 1.0
        assert tally.mean_ttft_s >= (0.2 + 0.1 + 0.1) / 3

    asyncio.run(scene())


def test_what_no_backend_saw_is_not_answered() -> None:
    async def scene() -> Tally:
        clock = Clock(SPEED)
        async with doubles(1, blocks=8, tokens_per_s=5120.0, clock=clock) as [one]:
            return await replay([_request(0.0, "b")], "http://127.0.0.1:1", [one], clock)

    tally = asyncio.run(scene())
    assert (tally.sent, tally.answered) == (1, 0)


def test_a_routers_limits_shrink_with_its_text_and_time(tmp_path: Path) -> None:
    kind = KINDS["vllm-router, cache_aware"]
    command = kind.command(tmp_path, 1, 2, ["http://a", "http://b"], 30.0)
    assert command[0] == str(tmp_path / "bin" / "vllm-router")
    assert command[command.index("--max-tree-size") + 1] == str(kind.tree_chars // SHRUNK)
    assert command[command.index("--eviction-interval-secs") + 1] == "4"
    assert command[-3:] == ["--worker-urls", "http://a", "http://b"]


def test_what_is_missing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCH_PEERS", str(tmp_path))
    assert peers.installed(tmp_path).missing() == list(KINDS)
    (tmp_path / "lib/python3.11/site-packages/vllm_router-0.1.17.dist-info").mkdir(parents=True)
    found = peers.installed(tmp_path)
    assert found.there == {"vllm-router, cache_aware": "0.1.17"}
    assert found.missing() == ["sglang-router, cache_aware"]


def test_a_router_that_does_not_start_is_said(tmp_path: Path) -> None:
    program = tmp_path / "bin" / "vllm-router"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho no\nexit 3\n")
    program.chmod(0o755)

    async def scene() -> None:
        started = peers.running("vllm-router, cache_aware", tmp_path, [], 1.0, tmp_path / "log")
        with pytest.raises(peers.RouterFailed, match="status 3"):
            async with started:
                pytest.fail("it cannot be ready")

    asyncio.run(scene())
    assert (tmp_path / "log").read_text() == "no\n"


def _tally(hit: float, ttft_s: float, late_s: float = 0.0, answered: int = 10) -> Tally:
    return Tally(10, answered, hit, hit, 1.1, ttft_s, 5.0, late_s)


def test_figures_compare_with_the_best_that_could_be_measured() -> None:
    vllm, sglang = KINDS
    rows = [
        Row("conversation", "skerry, 16 edges", _tally(0.3, 1.0)),
        Row("conversation", vllm, _tally(0.2, 2.0)),
        Row("conversation", sglang, _tally(0.9, 0.1, late_s=99.0)),  # the machine was too slow
        Row("synthetic", "skerry, 16 edges", _tally(0.3, 1.0)),
        Row("synthetic", vllm, _tally(0.9, 0.1, answered=9)),  # and here it lost one
    ]
    hit, ttft = bench.figures(rows)
    assert hit.value == pytest.approx(1.5)
    assert ttft.value == pytest.approx(0.5)
    assert vllm in hit.about
    assert bench.table(rows).count("\n") == 2 + len(rows)


def test_nothing_is_compared_without_routers(tmp_path: Path) -> None:
    lines: list[str] = []
    assert bench.compare(Routers(tmp_path, {}), 1, tmp_path, lines.append) == []
    assert list(bench.figures([])) == []
