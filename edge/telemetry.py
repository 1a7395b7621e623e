"""What an edge tells of a request's trace: its own span, and one for each attempt at a region.

The ids are chosen before anything is sent, as the region's spans are children of the attempt that
brought it there. All else comes from the request's story when it has ended.
"""

from __future__ import annotations

from dataclasses import dataclass

from core.story import Story
from core.telemetry import MOST_ATTEMPTS, OPERATIONS, PROVIDER, Kind, Span, TraceContext, Value
from core.types import RegionName


@dataclass(slots=True)
class Sent:
    """One attempt; its times are the journal's. `outcome` is empty while it runs."""

    context: TraceContext
    region: RegionName
    reason: str
    began_s: float
    ended_s: float | None = None
    outcome: str = ""


class Traced:
    """The trace of one request. Also attempts that its story leaves out, since a held request may
    be refused often, are here: their regions have told spans below them."""

    def __init__(self, context: TraceContext) -> None:
        self.context = context
        self.sent: list[Sent] = []
        self.header = ""
        """What the present attempt takes along."""

    def tried(self, region: RegionName, reason: str, now_s: float) -> None:
        context = self.context.child()
        if len(self.sent) < MOST_ATTEMPTS:
            self.sent.append(Sent(context, region, reason, now_s))
        else:
            context = context.untold()
        self.header = str(context)

    def ended(self, outcome: str, now_s: float) -> None:
        """The present attempt is over, if one runs."""
        if self.sent and self.sent[-1].ended_s is None:
            self.sent[-1].ended_s, self.sent[-1].outcome = now_s, outcome


def spans_of(story: Story, traced: Traced) -> list[Span]:
    """Of a request that has ended. Pure."""
    began = story.at
    end_s = story.age_s if story.ended_s is None else story.ended_s
    admitted_s = end_s if story.admitted_s is None else story.admitted_s
    operation = OPERATIONS.get(story.dialect, story.dialect)
    whole = Span(
        f"{operation} {story.model or 'unknown'}",
        traced.context,
        began,
        began + end_s,
        _attributes(story, operation),
        Kind.SERVER,
        _failed(story.outcome),
    )

    def step(name: str, start_s: float, until_s: float | None, **attributes: Value) -> Span:
        until = began + (end_s if until_s is None else until_s)
        return Span(name, traced.context.child(), began + start_s, until, attributes)

    steps = [step("admit", 0.0, admitted_s)]
    if story.choices:
        reason = story.choices[0].reason
        steps.append(step("route", admitted_s, story.choices[0].at_s, **{"skerry.route": reason}))
    steps += [
        step("hold", wait.began_s, wait.ended_s, **{"skerry.refused_turns": wait.refused})
        for wait in story.waits
    ]
    return [whole, *steps, *(_attempt(one, began, end_s) for one in traced.sent)]


def _attempt(one: Sent, began: float, end_s: float) -> Span:
    attributes: dict[str, Value] = {"skerry.region": one.region, "skerry.route": one.reason}
    failed = _failed(one.outcome)
    if failed:
        attributes["error.type"] = failed
    until = began + (end_s if one.ended_s is None else one.ended_s)
    return Span("attempt", one.context, began + one.began_s, until, attributes, Kind.CLIENT, failed)


def _attributes(story: Story, operation: str) -> dict[str, Value]:
    attributes: dict[str, Value] = {
        "gen_ai.operation.name": operation,
        "gen_ai.request.model": story.model or "unknown",
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.stream": story.stream,
        "gen_ai.usage.input_tokens": story.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": story.cached_tokens,
        "gen_ai.usage.output_tokens": story.completion_tokens,
        "skerry.request.id": story.id,
        "skerry.edge": story.edge,
    }
    last = story.last
    if last is not None:
        attributes |= {"skerry.region": last.region, "skerry.route": last.reason}
        if last.first_s is not None:
            attributes["gen_ai.response.time_to_first_chunk"] = last.first_s
        for name, value in (("prefill", last.prefill), ("decode", last.decode)):
            if value is not None:
                attributes[f"skerry.{name}"] = value
    if _failed(story.outcome):
        attributes["error.type"] = story.outcome
    return attributes


def _failed(outcome: str) -> str:
    return "" if outcome == "ok" else outcome
