"""A fault before every single step of hand-off and pull: the answer is the one without a fault, or
an error with a name; every block of every node that lives comes home; no rank ever reads KV that
was not computed for its tokens (`engine_rank` proves each cell it reads)."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from core.events import Accepted, Delta, Done, Event, Fault, Moved
from core.kv.transports.base import SHARED_MEMORY, TCP
from regional.placement import Placement
from tests.regional.node.desk import Desk, answer_text, reserve, work
from tests.regional.node.little import LittleRegion, little_region
from tests.regional.node.little_parts import direct, pulling, split

PROMPT = "".join(chr(97 + n * n % 26) for n in range(120))
HISTORY = PROMPT[:90]
OTHER = "".join(chr(97 + n * 7 % 26) for n in range(200))
LEASE_S = 0.15
STOPPED_S = 0.3
AT_ONCE = 12


@dataclass(frozen=True)
class Plan:
    """`warm`: who has read the history before; `parties` may be struck. `apart`: the decode node
    has two ranks, on two hosts."""

    name: str
    placed: Callable[[], Placement]
    warm: tuple[str, ...]
    parties: tuple[str, ...]
    apart: bool = False
    window: int = 0
    transport: str = TCP


PLANS = (
    Plan("split", lambda: split("p", "d"), (), ("p", "d")),
    Plan("pull", lambda: direct("d", pulling("s", 5, patience_s=LEASE_S)), ("s",), ("s", "d")),
    Plan(
        "split with pull",
        lambda: split("p", "d", pulling("s", 5, patience_s=LEASE_S)),
        ("s",),
        ("p", "d", "s"),
    ),
    Plan(
        "history from the decode node",
        lambda: split("p", "d", pulling("d", 5, patience_s=LEASE_S)),
        ("d",),
        ("p", "d"),
    ),
    Plan("two hosts", lambda: split("p", "d"), (), ("p", "d"), apart=True),
    Plan(
        "two hosts, a window",
        lambda: direct("d", pulling("s", 5, patience_s=LEASE_S)),
        ("s",),
        ("s", "d"),
        apart=True,
        window=40,
    ),
    Plan(
        "shared memory",
        lambda: split("p", "d", pulling("s", 5, patience_s=LEASE_S)),
        ("s",),
        ("p", "d", "s"),
        transport=SHARED_MEMORY,
    ),
)
Strike = Callable[[LittleRegion, str, "asyncio.Task[list[Event]]"], None]


def kill(region: LittleRegion, party: str, asking: asyncio.Task[list[Event]]) -> None:
    region.nodes[party].kill()


def stop(region: LittleRegion, party: str, asking: asyncio.Task[list[Event]]) -> None:
    """Longer than a lease, shorter than it takes the router to notice."""
    region.nodes[party].freeze()
    asyncio.get_running_loop().call_later(STOPPED_S, region.nodes[party].thaw)


def stop_and_lose(region: LittleRegion, party: str, asking: asyncio.Task[list[Event]]) -> None:
    """The router gives it up; it wakes afterwards and goes on where it stood."""
    stop(region, party, asking)
    asyncio.get_running_loop().call_later(STOPPED_S / 4, region.nodes[party].lose)


def cut(region: LittleRegion, party: str, asking: asyncio.Task[list[Event]]) -> None:
    region.nodes[party].cut()


def leave(region: LittleRegion, party: str, asking: asyncio.Task[list[Event]]) -> None:
    asking.cancel()


def router_dies(region: LittleRegion, party: str, asking: asyncio.Task[list[Event]]) -> None:
    region.router_dies()
    asking.cancel()


def router_stops(region: LittleRegion, party: str, asking: asyncio.Task[list[Event]]) -> None:
    region.router_stops()
    asyncio.get_running_loop().call_later(STOPPED_S, region.router_wakes)


STRIKES: tuple[Strike, ...] = (kill, stop, stop_and_lose, cut, leave, router_dies, router_stops)


@dataclass(frozen=True)
class Played:
    """How a request ended, its tokens as far as it was answered, who answered, and the steps."""

    ended: str
    ids: list[int]
    decoder: str
    labels: list[str]


async def play(plan: Plan, at: int = -1, strike: Strike | None = None, party: str = "") -> Played:
    """One request with a fault before step `at`."""
    async with little_region(
        ("s", "decode"), ("d", "decode"), ("p", "prefill"), blocks=40,
        lease_s=LEASE_S if strike is not None else 5.0,
        apart=plan.apart, shards={"d": 2} if plan.apart else None, window=plan.window,
        transport=plan.transport,
    ) as region:  # fmt: skip
        for name in plan.warm:
            await region.answer(HISTORY, direct(name))
        del region.steps.labels[:]
        asking = asyncio.create_task(region.answer(PROMPT, plan.placed()))
        if strike is not None:
            region.steps.at = at
            region.steps.fault = lambda: strike(region, party, asking)
        events = await outcome(asking)
        labels = list(region.steps.labels)
        region.steps.at = -1
        if strike in (stop, stop_and_lose):  # who wakes must find the blocks to be somebody else's
            await asyncio.gather(*(region.answer(OTHER, direct(name)) for name in region.decoders))
    last = events[-1] if events else None
    assert last is None or isinstance(last, Done | Fault), events
    return Played(
        ended="left" if last is None else "ok" if isinstance(last, Done) else last.code,
        ids=[token for event in events if isinstance(event, Delta) for token in event.token_ids],
        decoder="".join(one.decode for one in events[:-1] if isinstance(one, Accepted | Moved))[
            -1:
        ],
        labels=labels,
    )


async def outcome(asking: asyncio.Task[list[Event]]) -> list[Event]:
    try:
        return await asking
    except asyncio.CancelledError:
        return []


def judge(plan: Plan, expected: list[int], one: Played, strike: Strike, party: str) -> None:
    if one.ended == "ok":
        assert one.ids == expected
    elif strike in (leave, router_dies):
        assert one.ended == "left"
    else:
        # Only the node that answers can take an answer along that has begun.
        assert (one.ended, one.decoder) == ("node_lost", party)
        assert one.ids == expected[: len(one.ids)] != []


def campaign(plan: Plan, chosen: Callable[[int, int], bool]) -> Counter[str]:
    """Play all that is `chosen` of (number of the step, number of the fault): how they ended."""

    async def all_of_it() -> Counter[str]:
        base = await play(plan)
        assert base.ended == "ok"
        places = asyncio.Semaphore(AT_ONCE)
        ends: Counter[str] = Counter()
        faults = [(strike, party) for strike in STRIKES for party in plan.parties]

        async def one(at: int, strike: Strike, party: str) -> None:
            async with places:
                try:
                    result = await play(plan, at, strike, party)
                    judge(plan, base.ids, result, strike, party)
                except Exception as error:
                    before = base.labels[max(0, at - 3) : at + 1]
                    error.add_note(f"{plan.name}: {strike.__name__} {party} at {at}: {before}")
                    raise
            ends[f"{strike.__name__} {result.ended}"] += 1

        async with asyncio.TaskGroup() as tasks:
            for at in range(len(base.labels)):
                for number, (strike, party) in enumerate(faults):
                    if chosen(at, number):
                        tasks.create_task(one(at, strike, party))
        return ends

    return asyncio.run(all_of_it())


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.name)
def test_a_fault_at_many_steps(plan: Plan) -> None:
    """Each kind at each party, spread over the steps; `make soak` plays all of them."""
    faults = len(STRIKES) * len(plan.parties)
    ends = campaign(
        plan, lambda at, number: at % 2 == 0 and (at * 5 + 3) % (2 * faults) // 2 == number
    )
    assert ends["kill ok"] > 0
    assert ends["stop ok"] > 0
    assert ends["leave left"] > 0


def test_a_pool_full_of_reservations_comes_home_with_their_leases() -> None:
    async def go() -> None:
        async with little_region(
            ("s", "decode"), ("d", "decode"), ("p", "prefill"), lease_s=LEASE_S, blocks=40
        ) as region:
            fresh = await region.answer(PROMPT, direct("s"))
            node, desk = region.nodes["d"], Desk()
            node.front.session_opened(desk)
            for number in range(5):  # whose senders never come; four fit
                given = work([number] * 120)
                node.front.handle(reserve(f"x{number}", given), desk)
            refused = await desk.failed("x4")
            assert (refused.stage, refused.code) == ("reserve", "no_capacity")
            assert node.rank.used == 32
            answered = await region.answer(PROMPT, split("p", "d"))
            assert answer_text(answered) == answer_text(fresh)
            for number in range(4):
                assert "expired" in (await desk.failed(f"x{number}")).message
            await region.settled()
            assert answer_text(await region.answer(PROMPT, split("p", "d"))) == answer_text(fresh)
            node.front.session_closed(desk)

    asyncio.run(go())


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.name)
def test_every_fault_at_every_step(plan: Plan) -> None:
    ends = campaign(plan, lambda at, number: True)
    assert ends["stop_and_lose ok"] > ends["stop_and_lose node_lost"] > 0
