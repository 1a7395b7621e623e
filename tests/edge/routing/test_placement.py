"""The choice of a region as a table, and the load bound of case B21."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.config import Routing
from core.errors import RegionUnavailable
from core.status import ModelStatus, RegionStatus
from core.types import ModelName, RegionName
from edge.routing.placement import (
    Asked,
    Reason,
    RegionView,
    RouteDecision,
    choose,
    load_bound_s,
)
from edge.routing.ring import Ring

MODEL = ModelName("m")
POLICY = Routing()
EU, US, ASIA = RegionName("eu"), RegionName("us"), RegionName("asia")


def _view(
    name: RegionName,
    *,
    trip: float = 0.0,
    work: float = 0.0,
    queue: float = 0.0,
    fresh: bool = True,
    draining: bool = False,
    models: tuple[str, ...] = (MODEL,),
) -> RegionView:
    status = RegionStatus(
        region=name,
        epoch="e",
        sequence=1,
        models=tuple(ModelStatus(name=ModelName(m), context=10) for m in models),
        decode_work_s=work,
        queue_s=queue,
        draining=draining,
    )
    return RegionView(
        name=name,
        round_trip_s=trip,
        configured=frozenset({MODEL}),
        fresh=fresh,
        age_s=0.1,
        status=status,
    )


def _asked(*walk: RegionName, size: int = 9000, affinity: bool = False) -> Asked:
    return Asked(model=MODEL, walk=walk, text_bytes=size, by_affinity=affinity)


def _choice(view: list[RegionView], asked: Asked) -> RouteDecision:
    return choose(view, asked, POLICY)


def test_the_walk_decides_and_is_the_fail_over_order() -> None:
    view = [_view(EU, trip=0.01), _view(US, trip=0.09), _view(ASIA, trip=0.2)]
    decision = _choice(view, _asked(ASIA, EU, US))
    assert decision == RouteDecision((ASIA, EU, US), Reason.PREFIX_HOME)


def test_short_prompts_go_near_and_the_queue_counts() -> None:
    view = [_view(EU, trip=0.01, queue=0.5), _view(US, trip=0.09)]
    decision = _choice(view, _asked(EU, US, size=1023))
    assert decision == RouteDecision((US, EU), Reason.NEAREST_SHORT)
    assert _choice(view, _asked(EU, US, size=1024)).reason == Reason.PREFIX_HOME


def test_affinity_outranks_nearness() -> None:
    view = [_view(EU, trip=0.01), _view(US, trip=0.09)]
    decision = _choice(view, _asked(US, EU, size=3, affinity=True))
    assert decision == RouteDecision((US, EU), Reason.AFFINITY)


def test_a_full_home_spills_to_the_next_of_the_walk() -> None:
    view = [_view(EU, work=30), _view(US, work=1), _view(ASIA, work=1)]
    decision = _choice(view, _asked(EU, ASIA, US))
    assert decision == RouteDecision((ASIA, EU, US), Reason.PREFIX_SPILL)


def test_quiet_worlds_do_not_spill() -> None:
    view = [_view(EU, work=1.9), _view(US), _view(ASIA)]
    assert _choice(view, _asked(EU, US, ASIA)).reason == Reason.PREFIX_HOME


@pytest.mark.parametrize(
    "out",
    [{"draining": True}, {"models": ()}, {"models": ("other",)}],
    ids=["draining", "no-models", "other-model"],
)
def test_regions_that_cannot_are_skipped(out: dict[str, object]) -> None:
    view = [replace_view(_view(EU), out), _view(US)]
    for asked in (_asked(EU, US), _asked(EU, US, size=3)):
        assert _choice(view, asked).candidates == (US,)
    assert _choice(view, _asked(EU, US)).reason == Reason.PREFIX_SPILL
    with pytest.raises(RegionUnavailable) as caught:
        _choice(view[:1], _asked(EU, US))
    assert caught.value.retry_after_s is not None


def replace_view(view: RegionView, out: dict[str, object]) -> RegionView:
    again = _view(view.name, **out)  # type: ignore[arg-type]  # a table of keyword arguments
    return replace(again, round_trip_s=view.round_trip_s)


def test_suspects_come_last_but_still_come() -> None:
    unknown = RegionView(name=ASIA, round_trip_s=0.0, configured=frozenset({MODEL}))
    view = [_view(EU, fresh=False), _view(US, trip=1.0), unknown]
    assert _choice(view, _asked(EU, ASIA, US)).candidates == (US, EU, ASIA)
    assert _choice(view, _asked(EU, ASIA, US, size=3)).candidates == (US, EU, ASIA)
    assert _choice(view[:1], _asked(EU)).candidates == (EU,)


_works = st.lists(st.floats(0, 1000), min_size=2, max_size=8)


@given(_works, st.randoms())
def test_whoever_is_chosen_is_within_the_bound(works: list[float], random: st.DataObject) -> None:
    names = [RegionName(f"r{i}") for i in range(len(works))]
    view = [_view(name, work=work) for name, work in zip(names, works, strict=True)]
    walk = list(names)
    random.shuffle(walk)  # type: ignore[attr-defined]  # hypothesis types its random loosely
    decision = _choice(view, _asked(*walk))
    chosen = dict(zip(names, works, strict=True))[decision.candidates[0]]
    assert chosen <= load_bound_s(works, POLICY) + 1e-9
    assert sorted(decision.candidates) == sorted(names)


def test_a_hot_prefix_stays_within_the_bound_and_leaves_others_at_home() -> None:
    """B21: 80 % of requests share one prefix; each brings 0.2 s of work that drains by 40 % a
    round over eight regions."""
    names = [RegionName(f"r{i}") for i in range(8)]
    ring = Ring(dict.fromkeys(names, 100))
    work = dict.fromkeys(names, 0.0)
    hot_at: Counter[RegionName] = Counter()
    strayed = others = 0
    for i in range(4000):
        hot = i % 5 != 0
        walk = ring.walk(b"hot" if hot else i.to_bytes(4))
        view = [_view(name, work=work[name]) for name in names]
        first = _choice(view, _asked(*walk)).candidates[0]
        bound = load_bound_s(list(work.values()), POLICY)
        assert work[first] <= bound
        work[first] += 0.2
        if hot:
            hot_at[first] += 1
        else:
            others += 1
            strayed += first != walk[0]
        if i % 25 == 24:
            work = {name: value * 0.6 for name, value in work.items()}
    assert len(hot_at) <= 4
    assert strayed / others < 0.2
    calm = [_view(name) for name in names]
    home = ring.walk(b"hot")
    assert _choice(calm, _asked(*home)).candidates[0] == home[0]
