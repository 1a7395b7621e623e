"""A world that a region `asia` and an edge `sfo` come to and leave, and who streams meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable

import httpx
from msgspec.structs import replace

from core.config import Topology
from tests.world.faults import until
from tests.world.scripted import Answer, ask, completion, lines_of, streaming, take

ASIA = {"asia", "asia-prefill", "asia-decode"}


def grown(topology: Topology) -> Topology:
    eu, (ams, *_) = topology.regions[0], topology.edges
    nodes = tuple(replace(node, name=f"asia-{node.role}") for node in eu.nodes)
    trips = {**ams.round_trip_ms, "asia": 1}
    sfo = replace(ams, name="sfo", round_trip_ms={"asia": 1, "eu": 9, "us": 5})
    return replace(
        topology,
        regions=(*topology.regions, replace(eu, name="asia", nodes=nodes)),
        edges=(*(replace(edge, round_trip_ms=trips) for edge in topology.edges), sfo),
    )


def stunted(topology: Topology) -> Topology:
    """Its new node wants what no machine has."""
    after = grown(topology)
    asia = after.regions[-1]
    nodes = tuple(replace(node, kv_tokens=1 << 50) for node in asia.nodes)
    return replace(after, regions=(*after.regions[:-1], replace(asia, nodes=nodes)))


def without(*names: str) -> Callable[[Topology], Topology]:
    """The grown topology, less these."""

    def change(topology: Topology) -> Topology:
        after = grown(topology)
        regions = tuple(one for one in after.regions if one.name not in names)
        left = {one.name for one in regions}
        edges = (
            replace(one, round_trip_ms={k: v for k, v in one.round_trip_ms.items() if k in left})
            for one in after.edges
            if one.name not in names
        )
        return replace(after, regions=regions, edges=tuple(edges))

    return change


def key_to_asia(edge: str) -> str:
    """Whose prompts an edge sends there, once it hears of it."""
    found: list[str] = []

    def one_is_found() -> bool:
        for number in range(100):
            key = f"key {number}"
            said = ask(edge, completion("where?", max_tokens=2, prompt_cache_key=key))
            if said.headers.get("x-skerry-region") == "asia":
                found.append(key)
                return True
        return False

    assert until(one_is_found), "nothing goes to asia"
    return found[0]


def long_in_asia(edge: str, tokens: int) -> tuple[Long, str]:
    """A stream that is under way there, and a key to it. Where others keep the region busy its own
    prompts may go elsewhere."""
    for _ in range(20):
        key = key_to_asia(edge)
        long = Long(edge, tokens, prompt_cache_key=key)
        if long.answer.headers["x-skerry-region"] == "asia":
            return long, key
        long.leave()
    raise AssertionError("no stream of twenty went to asia")


class Long:
    """A stream that is under way."""

    def __init__(self, edge: str, tokens: int, **more: object) -> None:
        self.answer = Answer(0, httpx.Headers())
        self._begun = threading.Event()
        self._left = threading.Event()
        self._body = completion("a long watch beside the lamp ", max_tokens=tokens, **more)
        self._thread = threading.Thread(target=self._read, args=(edge,))
        self._thread.start()
        assert self._begun.wait(60)

    def end(self) -> Answer:
        self._thread.join(60)
        return self.answer

    def leave(self) -> Answer:
        """As far as it came."""
        self._left.set()
        return self.end()

    def _read(self, edge: str) -> None:
        with streaming(edge, self._body) as response:
            self.answer.status, self.answer.headers = response.status_code, response.headers
            try:
                for line in lines_of(response):
                    if take(self.answer, line):
                        self._begun.set()
                    if self._left.is_set():
                        return
            except httpx.HTTPError as error:
                self.answer.error = {"cut": str(error)}
