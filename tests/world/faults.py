"""What the fault tests ask of a world's state."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import httpx

from deploy.launcher import LocalWorld
from tests.world.scripted import PLAIN, Answer, page, region_status

PATIENCE_S = 60.0
_T = TypeVar("_T")


def until(what: Callable[[], bool], within_s: float = PATIENCE_S) -> bool:
    """Whether `what` comes true in time; asked again and again, as a monitor would."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        try:
            if what():
                return True
        except httpx.TransportError:
            pass  # the process that is asked may be the one that is down
        time.sleep(0.05)
    return False


def split(asked: Callable[[int], Answer]) -> tuple[Answer, int]:
    """An answer whose prompt another node has read, and the number that `asked` was given for it.
    What was measured of a busy machine may speak against that way, and nobody measures again who is
    not asked: so more and more ask at once, until the way around those who wait is the shorter one.
    Numbers are for prompts that nobody has read before."""

    def crossed(answer: Answer) -> bool:
        assert answer.done, answer.error
        return bool(answer.facts["kv_bytes"])

    return crowded(asked, crossed)


def crowded(asked: Callable[[int], _T], crossed: Callable[[_T], bool]) -> tuple[_T, int]:
    """See `split`."""
    first = 0
    for crowd in range(1, 8):
        numbers = range(first, first + crowd)
        with ThreadPoolExecutor(crowd) as pool:
            answers = list(pool.map(asked, numbers))
        for number, answer in zip(numbers, answers, strict=True):
            if crossed(answer):
                return answer, number
        first += crowd
    raise AssertionError(f"no prompt of {first} was read by another node")


def blocks_used(world: LocalWorld, region: str) -> int:
    return sum(node.get("blocks_used", 0) for node in region_status(world, region)["nodes"])


def forgotten(world: LocalWorld, region: str) -> bool:
    """Whether the region holds nothing of any request."""
    return blocks_used(world, region) == 0 and region_status(world, region).get("active", 0) == 0


def alive(world: LocalWorld, region: str) -> bool:
    """Whether both nodes of the region serve, and every edge has heard it."""
    url = f"{world.routers[region]}/readyz"
    ready = httpx.get(url, timeout=5, trust_env=False, verify=PLAIN).status_code == 200
    both = ready and sum(one["alive"] for one in region_status(world, region)["nodes"]) == 2
    return both and all(_hears(edge, region) for edge in world.edges.values())


def _hears(edge: str, region: str) -> bool:
    return any(
        one["name"] == region and one["state"] == "fresh" and one["status"].get("models")
        for one in page(f"{edge}/status")["regions"]
    )


def frames_of(edge: str, region: str) -> int:
    """The sequence number of the last status frame that an edge has of a region. Who holds a prompt
    is in the one after the next: that may be on its way."""
    (known,) = [one for one in page(f"{edge}/status")["regions"] if one["name"] == region]
    return int(known["status"]["sequence"])
