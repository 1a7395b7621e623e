"""What became of one request, as an edge tells its operator (`skerry explain`).

All moments and durations are seconds since the request's head arrived. Names, places, counts and
times only: never a piece of a prompt or of an answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

import msgspec

from core.events import Placing
from core.types import ModelName, NodeName, RegionName, RequestId, Timings


class Weighed(msgspec.Struct, frozen=True, kw_only=True):
    """A region as it was weighed; `standing` says what came of it."""

    region: RegionName
    standing: str
    round_trip_s: float
    wait_s: float
    """Behind prompts that were there before."""
    read_s: float
    """For what the region does not hold of the prompt."""
    held_tokens: float
    work_s: float
    total_s: float
    """The predicted time to the first token."""
    cost_s: float
    """What was compared."""


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One decision on the regions; a request that was held gets another when its turn comes."""

    at_s: float
    reason: str
    order: tuple[RegionName, ...]
    """The fail-over order."""
    weighed: tuple[Weighed, ...]
    bound_s: float
    """Seconds of work above which a region counted as full."""
    key_depth: int
    """Text blocks in the route key, of `key_blocks` that the prompt has."""
    key_blocks: int
    text_bytes: int
    hot_version: str
    by_affinity: bool


class Try(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt at a region. `outcome`: ok or an error code; empty while it runs."""

    region: RegionName
    reason: str
    began_s: float
    accepted_s: float | None = None
    first_s: float | None = None
    ended_s: float | None = None
    outcome: str = ""
    prefill: NodeName | None = None
    decode: NodeName | None = None
    node_reason: str = ""
    placing: Placing | None = None
    """What the region's router weighed, as far as it tells."""


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """A time in the edge's own queue, while every region was busy."""

    began_s: float
    position: int
    """At its beginning; 1 is next."""
    refused: int = 0
    """Turns that brought only refusals."""
    ended_s: float | None = None


class Story(msgspec.Struct, frozen=True, kw_only=True):
    """`at` is Unix seconds. `worker` is the number of the edge's process. `outcome` is empty while
    the request runs."""

    id: RequestId
    edge: str
    worker: int
    dialect: str
    at: float
    age_s: float
    tenant: str = ""
    key: str = ""
    """ID of the API key, "-" without one; both are empty for a caller who was not known."""
    by: str = ""
    """The Worker that asked."""
    model: ModelName | None = None
    stream: bool = False
    outcome: str = ""
    admitted_s: float | None = None
    """Its body was read, parsed and let in."""
    choices: tuple[Choice, ...] = ()
    waits: tuple[Wait, ...] = ()
    tries: tuple[Try, ...] = ()
    ended_s: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    timings: Timings | None = None
    """As the region told at the end."""

    @property
    def last(self) -> Try | None:
        return self.tries[-1] if self.tries else None


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """How far back an edge can tell: so many requests of each worker, and so long."""

    requests: int
    seconds: float


class StoryPage(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a question for one id, or for the newest ones."""

    edge: str
    kept: Kept
    stories: tuple[Story, ...]


class StepName(StrEnum):
    ADMIT = "admit"
    """Reading and checking the body, and getting a permit."""
    ROUTE = "route"
    HOLD = "hold"
    """In the edge's queue: every region was busy."""
    FAILED = "failed attempt"
    TRAVEL = "travel"
    """To the region and back, and its reading of the text."""
    QUEUE = "queue"
    """In the region's queue."""
    PREFILL = "prefill"
    """From the place on nodes to the first piece of the answer."""
    TRANSFER = "transfer"
    """Of KV between nodes; inside prefill, which it overlaps."""
    DECODE = "decode"
    RELAY = "relay"
    """What passing the answer on took beyond its making: a slow reader, or the way."""


class Step(msgspec.Struct, frozen=True, kw_only=True):
    name: StepName
    start_s: float
    seconds: float
    note: str = ""


def waterfall(story: Story) -> tuple[Step, ...]:
    """The request's time in the order it was spent. Of a request that runs, as far as it is."""
    return tuple(_steps(story))


def worst(steps: tuple[Step, ...]) -> Step | None:
    """The step that took longest. A transfer is a part of its prefill, so it counts only where
    it fills most of that."""
    candidates = [step for step in steps if step.name is not StepName.TRANSFER]
    longest = max(candidates, key=lambda step: step.seconds, default=None)
    if longest is None or longest.name is not StepName.PREFILL:
        return longest
    transfers = (step for step in steps if step.name is StepName.TRANSFER)
    return next((step for step in transfers if step.seconds > longest.seconds / 2), longest)


def _steps(story: Story) -> Iterator[Step]:
    end_s = story.age_s if story.ended_s is None else story.ended_s
    admitted_s = end_s if story.admitted_s is None else story.admitted_s
    yield Step(name=StepName.ADMIT, start_s=0.0, seconds=admitted_s)
    if story.choices:
        routed_s = story.choices[0].at_s
        reason = story.choices[0].reason
        yield _step(StepName.ROUTE, admitted_s, routed_s, reason)
    spans: list[tuple[float, list[Step]]] = []
    for wait in story.waits:
        until_s = end_s if wait.ended_s is None else wait.ended_s
        note = f"place {wait.position} at first, refused {wait.refused} times meanwhile"
        spans.append((wait.began_s, [_step(StepName.HOLD, wait.began_s, until_s, note)]))
    for one in story.tries:
        steps = _won(one, story.timings or Timings(), end_s)
        if one.outcome not in ("", "ok") and one.first_s is None:
            note = f"{one.region}: {one.outcome}"
            steps = [_step(StepName.FAILED, one.began_s, one.ended_s or end_s, note)]
        spans.append((one.began_s, steps))
    for _, steps in sorted(spans, key=lambda span: span[0]):
        yield from steps


def _won(one: Try, timings: Timings, end_s: float) -> list[Step]:
    """The parts of an attempt that answered, or that still runs."""
    done_s = end_s if one.ended_s is None else one.ended_s
    accepted_s = done_s if one.accepted_s is None else one.accepted_s
    first_s = max(accepted_s, done_s if one.first_s is None else one.first_s)
    queued_s = min(timings.queue_s, accepted_s - one.began_s)
    steps = [_step(StepName.TRAVEL, one.began_s, accepted_s - queued_s, one.region)]
    if queued_s:
        steps.append(_step(StepName.QUEUE, accepted_s - queued_s, accepted_s))
    if one.accepted_s is None:
        return steps
    nodes = " → ".join(name for name in (one.prefill, one.decode) if name)
    steps.append(_step(StepName.PREFILL, accepted_s, first_s, nodes))
    if timings.transfer_s:
        # When it began is not told; it ends before the first token is sampled.
        moved = f"{timings.kv_bytes / 1e6:.1f} MB of KV"
        began_s = max(accepted_s, first_s - timings.transfer_s)
        steps.append(
            Step(name=StepName.TRANSFER, start_s=began_s, seconds=timings.transfer_s, note=moved)
        )
    if one.first_s is None:
        return steps
    made_s = min(timings.decode_s, done_s - first_s) if timings.decode_s else done_s - first_s
    steps.append(_step(StepName.DECODE, first_s, first_s + made_s))
    if done_s > first_s + made_s:
        steps.append(_step(StepName.RELAY, first_s + made_s, done_s))
    return steps


def _step(name: StepName, start_s: float, end_s: float, note: str = "") -> Step:
    return Step(name=name, start_s=start_s, seconds=max(0.0, end_s - start_s), note=note)
