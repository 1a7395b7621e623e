"""How long a real edge thinks about a 200 kB prompt: the only figure here that needs a clock."""

from __future__ import annotations

import time

from core.config import Routing
from core.digest import Filter, build
from core.prefix import ID_BYTES, key_of, prompt_chain
from core.status import ModelStatus, RegionPrefixes, RegionStatus
from core.types import GenerateRequest, Message, ModelName, RegionName, RequestId
from edge.routing.placement import Asked, choose
from edge.routing.ring import Ring
from edge.routing.seen import Heard, SeenRegion

PROMPT_BYTES = 200_000
REGIONS = 20
ROUNDS = 200
MODEL = ModelName("model")
FLEET_KEY = b"a fleet secret of 32 characters!"


def milliseconds() -> tuple[float, float]:
    """(median, p99) of hashing the prompt, walking the ring and choosing among 20 regions with
    full digests, one of which holds the first half of the prompt."""
    times = []
    regions = _regions()
    ring = Ring({region.name: 100 for region in regions})
    for number in range(ROUNDS):
        request = _request(number)
        if number == 0:
            _hold(regions[7], request)
        began = time.perf_counter()
        chain = prompt_chain(request, fleet_key=FLEET_KEY)
        asked = Asked(
            model=MODEL,
            walk=ring.walk(key_of(chain).digest),
            text_bytes=chain.text_bytes,
            by_affinity=False,
            ids=chain.ids(),
            ends=chain.ends[1:],
        )
        choose([region.view(1.0) for region in regions], asked, Routing())
        times.append((time.perf_counter() - began) * 1000)
    times.sort()
    return times[len(times) // 2], times[int(len(times) * 0.99)]


def _request(number: int) -> GenerateRequest:
    """The same document with another question."""
    words = "routes are made of prefixes and regions hold them for a while. "
    document = (words * (PROMPT_BYTES // len(words) + 1))[: PROMPT_BYTES - 40]
    return GenerateRequest(
        id=RequestId("r"),
        model=MODEL,
        messages=(Message(role="user", content=f"{document} question {number}"),),
        seed=1,
        rendered_at=0,
    )


def _regions() -> list[SeenRegion]:
    ids = [(number * 0x9E3779B97F4A7C15 % 2**64).to_bytes(ID_BYTES) for number in range(16_000)]
    digest = build(ids)
    regions = []
    for number in range(REGIONS):
        name = RegionName(f"region-{number}")
        heard = Heard()
        heard.take(
            RegionStatus(
                region=name,
                epoch="e",
                sequence=1,
                models=(ModelStatus(name=MODEL, context=1 << 20, prefill_tokens_per_s=1e4),),
            ),
            1.0,
        )
        heard.digest.take(_frame(name, digest))
        regions.append(SeenRegion(name, 0.01 * number, frozenset({MODEL}), 100, heard))
    return regions


def _hold(region: SeenRegion, request: GenerateRequest) -> None:
    ids = prompt_chain(request, fleet_key=FLEET_KEY).ids()
    region.heard.digest.take(_frame(region.name, build(ids[: len(ids) // 2])))


def _frame(name: RegionName, digest: Filter) -> RegionPrefixes:
    return RegionPrefixes(region=name, epoch="e", version=1, base=1, filter=digest)
