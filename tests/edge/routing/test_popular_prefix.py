"""B21: one popular prefix must not melt one region. Virtual time, one edge, eight regions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from random import Random

from core.config import Routing
from core.digest import Filter, build
from core.status import ModelStatus, RegionPrefixes, RegionStatus
from core.types import ModelName, RegionName
from edge.routing.placement import Asked, choose
from edge.routing.ring import Ring
from edge.routing.seen import Heard, SeenRegion

MODEL = ModelName("m")
NAMES = [RegionName(f"r{number}") for number in range(8)]
WORK_S = 0.2
POLICY = Routing(load_ratio=1.25, load_margin_s=2 * WORK_S)
"""Of the case: at most max(1.25 × mean, mean + 2) requests in flight, here in seconds of work."""
RATE = 25_000.0
"""Tokens a second: prompts of 5,000 tokens, four fifths of them shared."""
EVERY_S = 0.01


@dataclass
class _Region:
    """Reads one prompt after the other; knows what it holds."""

    name: RegionName
    seen: SeenRegion = field(init=False)
    reading: list[tuple[float, float, float]] = field(default_factory=list)
    """(end, when it was sent, seconds of work that the edge saw in it), in the order of arrival."""
    held: set[bytes] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.seen = SeenRegion(self.name, 0.01, frozenset({MODEL}), 100, Heard())

    def take(self, now: float, seen_s: float, work_s: float, ids: list[bytes]) -> None:
        self.reading.append((now + self.work_s(now) + work_s, now, seen_s))
        self.held.update(ids)

    def work_s(self, now: float) -> float:
        return max(0.0, self.reading[-1][0] - now) if self.reading else 0.0

    def answer(self, now: float) -> None:
        """First deltas of what has been read."""
        while self.reading and self.reading[0][0] <= now:
            end, sent_at, seen_s = self.reading.pop(0)
            self.seen.read(seen_s, sent_at, end)

    def tell(self, now: float, sequence: int) -> None:
        self.seen.heard.take(
            RegionStatus(
                region=self.name,
                epoch="e",
                sequence=sequence,
                models=(ModelStatus(name=MODEL, context=99_999, prefill_tokens_per_s=RATE),),
                prefill_work_s=self.work_s(now),
            ),
            now,
        )
        self.seen.heard.digest.take(
            RegionPrefixes(
                region=self.name, epoch="e", version=sequence, base=sequence, filter=self._filter()
            )
        )

    def _filter(self) -> Filter:
        return build(self.held)


def _ids(word: str, blocks: int) -> list[bytes]:
    return [blake2b(f"{word} {i}".encode(), digest_size=8).digest() for i in range(blocks)]


def _moments() -> Iterator[float]:
    """400 requests, half as fast again as eight regions could bear if nothing were cached."""
    return (number * WORK_S / 12 for number in range(400))


class _World:
    def __init__(self) -> None:
        self.regions = {name: _Region(name) for name in NAMES}
        self.ring = Ring(dict.fromkeys(NAMES, 100))
        self.chance = Random(21)
        self._told = -EVERY_S
        self._sequence = 0

    def advance(self, now: float) -> None:
        """The last frames before `now`; those in between told nothing that these do not."""
        told = now - now % EVERY_S
        if told <= self._told:
            return
        self._told, self._sequence = told, self._sequence + 1
        for region in self.regions.values():
            region.answer(told)
            region.tell(told, self._sequence)

    def ask(self, now: float, word: str) -> tuple[RegionName, RegionName]:
        """(home, where it went). A prompt of four blocks that all share, and a block of its own."""
        self.advance(now)
        ids = [*_ids(word, 4), self.chance.randbytes(8)]
        walk = self.ring.walk(word.encode())
        asked = Asked(
            model=MODEL, walk=walk, text_bytes=int(4 * RATE * WORK_S), by_affinity=False, ids=ids,
            ends=[int(4 * RATE * WORK_S * (i + 1) / len(ids)) for i in range(len(ids))],
            hot=word == "hot", draws=(self.chance.random(), self.chance.random()),
        )  # fmt: skip
        view = [region.seen.view(now) for region in self.regions.values()]
        decision = choose(view, asked, POLICY)
        taken = self.regions[decision.candidates[0]]
        work_s = decision.work_s(taken.name)
        taken.seen.sent(ids, work_s, now)
        taken.take(now, work_s, max(work_s, WORK_S / 4), ids)
        return walk[0], taken.name

    def work_s(self, now: float) -> list[float]:
        return [region.work_s(now) for region in self.regions.values()]


def test_a_popular_prefix_spreads_to_few_and_the_others_stay() -> None:
    world, hot_at = _World(), Counter[RegionName]()
    usual: dict[str, RegionName] = {}
    strayed = again = 0
    for number, now in enumerate(_moments()):
        word = "hot" if number % 5 else f"w{number % 40}"
        _, taken = world.ask(now, word)
        if word == "hot":
            hot_at[taken] += 1
        else:
            again += word in usual
            strayed += usual.setdefault(word, taken) != taken
        work_s = world.work_s(now)
        mean = sum(work_s) / len(work_s)
        # Above the bound by the one request that was let in below it.
        assert max(work_s) <= max(1.25 * mean, mean + 2 * WORK_S) + WORK_S
    assert 1 < len(hot_at) < len(NAMES) - 1
    assert again > 60
    assert strayed / again <= 0.1


def test_it_returns_home_when_the_load_falls() -> None:
    world = _World()
    for now in _moments():
        world.ask(now, "hot")
    later = [world.ask(60.0 + number, "hot") for number in range(90)]
    assert sum(taken == home for home, taken in later[-30:]) >= 27


def test_a_quiet_world_spills_nothing() -> None:
    """Differences of a request or two are none: where a prefix was read first, it stays."""
    world = _World()
    usual, away = dict[str, RegionName](), 0
    for number in range(200):
        word = f"w{number % 20}"
        home, taken = world.ask(number * WORK_S, word)
        away += number < 20 and taken != home
        assert usual.setdefault(word, taken) == taken
    assert away <= 5  # its home was reading at that moment, another was not
    assert len(set(usual.values())) > 5
