"""What the page shows of the world and of its last requests, as plain data. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from core.config import Topology
from core.status import RegionStatus
from core.story import Step, Story, Weighed, waterfall
from edge.api.openai_types import ModelOut
from edge.api.status_page import RegionPage, StatusPage


class EdgeCard(msgspec.Struct, frozen=True, kw_only=True):
    """An edge of the world. `state`: up, down, or unknown where it cannot be asked from here.
    `url` is empty then, and counts are None."""

    name: str
    place: str
    here: bool
    state: str
    url: str = ""
    in_flight: int | None = None
    held: int | None = None
    round_trip_ms: dict[str, float] = {}


class RegionCard(RegionPage, frozen=True, kw_only=True):
    place: str


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    """Prompt tokens of answered requests since the routers started, over all regions: how many
    some node of the region held, the chosen one held, and nobody computed again."""

    all: int
    reusable: int
    routed: int
    delivered: int


class WorldPage(msgspec.Struct, frozen=True, kw_only=True):
    """`near`: asked from the edge's own machine. `needs_key`: callers without a key are refused."""

    edge: str
    place: str
    version: str
    near: bool
    needs_key: bool
    models: list[ModelOut]
    edges: list[EdgeCard]
    regions: list[RegionCard]
    tokens: Tokens


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One request in the list. `at`: Unix seconds of its arrival; `outcome` is empty while it runs;
    `ttft_s` is None before the first piece. `by`: the Worker that asked."""

    id: str
    at: float
    by: str
    edge: str
    outcome: str
    model: str | None
    region: str | None
    prefill: str | None
    decode: str | None
    reason: str
    node_reason: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    ttft_s: float | None
    total_s: float | None


class Rows(msgspec.Struct, frozen=True, kw_only=True):
    rows: list[Row]


class StoryCard(msgspec.Struct, frozen=True, kw_only=True):
    """One request as a waterfall. `weighed`: the regions at the last choice."""

    row: Row
    steps: tuple[Step, ...]
    weighed: tuple[Weighed, ...]


def world_page(
    topology: Topology,
    status: StatusPage,
    statuses: Iterable[RegionStatus],
    others: Sequence[EdgeCard],
    *,
    near: bool,
    needs_key: bool,
) -> WorldPage:
    """`others` are the edges besides this one; all are shown in the topology's order."""
    here = EdgeCard(
        name=status.edge,
        place=status.place,
        here=True,
        state="up",
        in_flight=status.in_flight,
        held=status.held,
        round_trip_ms={region.name: region.round_trip_ms for region in status.regions},
    )
    cards = {card.name: card for card in (here, *others)}
    places = {region.name: region.place for region in topology.regions}
    return WorldPage(
        edge=status.edge,
        place=status.place,
        version=status.version,
        near=near,
        needs_key=needs_key,
        models=status.models,
        edges=[cards[edge.name] for edge in topology.edges if edge.name in cards],
        regions=[
            RegionCard(**msgspec.structs.asdict(region), place=places.get(region.name, ""))
            for region in status.regions
        ],
        tokens=_tokens(list(statuses)),
    )


def row(story: Story) -> Row:
    last = story.last
    return Row(
        id=story.id,
        at=story.at,
        by=story.by,
        edge=story.edge,
        outcome=story.outcome,
        model=story.model,
        region=last.region if last else None,
        prefill=last.prefill if last else None,
        decode=last.decode if last else None,
        reason=last.reason if last else "",
        node_reason=last.node_reason if last else "",
        prompt_tokens=story.prompt_tokens,
        cached_tokens=story.cached_tokens,
        completion_tokens=story.completion_tokens,
        ttft_s=last.first_s if last else None,
        total_s=story.ended_s,
    )


def story_card(story: Story) -> StoryCard:
    weighed = story.choices[-1].weighed if story.choices else ()
    return StoryCard(row=row(story), steps=waterfall(story), weighed=weighed)


def _tokens(statuses: list[RegionStatus]) -> Tokens:
    return Tokens(
        all=sum(one.more.prompts.all for one in statuses),
        reusable=sum(one.more.prompts.reusable for one in statuses),
        routed=sum(one.more.prompts.routed for one in statuses),
        delivered=sum(one.more.prompts.delivered for one in statuses),
    )
