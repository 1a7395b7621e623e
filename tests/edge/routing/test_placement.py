"""The choice of a region as a table, and the load bound of case B21."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from random import Random

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
    RouteDecision,
    Standing,
    choose,
    load_bound_s,
)
from edge.routing.ring import Ring
from edge.routing.view import RegionView

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
    assert _choice(view, _asked(EU, US, size=1024)).reason == Reason.FASTEST


def test_affinity_outranks_nearness() -> None:
    view = [_view(EU, trip=0.01), _view(US, trip=0.09)]
    decision = _choice(view, _asked(US, EU, size=3, affinity=True))
    assert decision == RouteDecision((US, EU), Reason.AFFINITY)


class _Holds:
    """A cache that holds the first `blocks` of anything."""

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks

    def overlap(self, ids: Sequence[bytes], now: float) -> int:
        return min(self._blocks, len(ids))


IDS = [bytes([i]) * 8 for i in range(20)]
ENDS = [512 * (i + 1) for i in range(20)]


def _long(*walk: RegionName, draw: float = 0.99) -> Asked:
    """A prompt of twenty blocks, some 2.6 seconds of reading."""
    return Asked(
        model=MODEL, walk=walk, text_bytes=512 * 20, by_affinity=False, ids=IDS, ends=ENDS,
        draws=(draw, draw),
    )  # fmt: skip


def test_the_region_that_holds_the_prompt_is_found_wherever_it_is() -> None:
    """Neither near nor early in the walk: its digest makes it a candidate."""
    names = [RegionName(f"r{i}") for i in range(8)]
    view = [_view(name, trip=0.01 * i) for i, name in enumerate(names)]
    view[7] = replace(view[7], cache=_Holds(18))
    decision = _choice(view, _long(*names))
    assert (decision.candidates[0], decision.reason) == (names[7], Reason.PREFIX_HELD)
    stood = {one.region: one.standing for one in decision.options}
    assert stood == {
        names[7]: Standing.TAKEN,
        **dict.fromkeys(names[:2], Standing.WEIGHED),
        **dict.fromkeys(names[2:7], Standing.NOT_A_CANDIDATE),
    }
    held = next(one for one in decision.options if one.region == names[7])
    assert held.held_tokens == 18 * 512 / 4
    assert held.read_s == pytest.approx(2 * 512 / 4 / 1000)
    assert held.total_s == pytest.approx(0.07 + held.read_s)
    assert decision.work_s(names[7]) == held.read_s


def test_a_short_prompt_stays_where_it_was_read_while_the_status_still_shows_that_work() -> None:
    busy = replace(_view(EU, trip=0.010, queue=0.100), cache=_Holds(1))
    asked = replace(_asked(EU, US, size=200), ids=(b"one",), ends=(200,))
    assert _choice([busy, _view(US, trip=0.090)], asked).candidates[0] == EU
    cold = replace(busy, cache=_Holds(0))
    assert _choice([cold, _view(US, trip=0.090)], asked).candidates[0] == US


def test_a_long_queue_outweighs_a_short_overlap() -> None:
    view = [replace(_view(EU, queue=5.0), cache=_Holds(1)), _view(US, trip=0.09)]
    decision = _choice(view, _long(EU, US))
    assert (decision.candidates[0], decision.reason) == (US, Reason.FASTEST)
    view = [replace(_view(EU, queue=5.0), cache=_Holds(20)), _view(US, trip=0.09)]
    assert _choice(view, _long(EU, US)).reason == Reason.PREFIX_HOME


def test_what_this_edge_has_just_sent_counts() -> None:
    view = [replace(_view(EU), sent_s=3.0), _view(US)]
    assert _choice(view, _long(EU, US)).candidates[0] == US
    view = [replace(_view(EU), sent_s=25.0), replace(_view(US), cache=_Holds(0))]
    assert _choice(view, _long(EU, US)).reason == Reason.PREFIX_SPILL


def test_a_prefix_that_had_to_move_comes_home_when_its_home_is_back() -> None:
    """B21, B23: now and then, more often the less it costs; a hot one also when its home was only
    full; and it stays when both hold it."""
    view = [_view(EU), replace(_view(US), cache=_Holds(20))]
    back = [replace(view[0], returned=True), view[1]]

    def at_home(view: list[RegionView], *, hot: bool = False) -> int:
        asked = replace(_long(EU, US), hot=hot)
        drawn = [_choice(view, replace(asked, draws=(i / 1000, 0.5))) for i in range(1000)]
        assert {one.reason for one in drawn} <= {Reason.PREFIX_HOME, Reason.PREFIX_HELD}
        return sum(one.candidates[0] == EU for one in drawn)

    assert at_home(view) == 0
    assert 20 < at_home(back) < 200
    assert 0 < at_home(view, hot=True) < at_home(back)
    cheaper = [back[0], replace(view[1], cache=_Holds(4))]
    assert at_home(cheaper) > 2 * at_home(back)
    both = [replace(one, cache=_Holds(20)) for one in view]
    assert at_home(both) == 1000


def test_short_prompts_do_not_herd() -> None:
    """Equal regions share them; a far one hardly gets any; a heavier one gets more."""
    chance = Random(3)

    def shares(view: list[RegionView]) -> Counter[RegionName]:
        asked = _asked(EU, US, ASIA, size=10)
        return Counter(
            _choice(view, replace(asked, draws=(chance.random(), chance.random()))).candidates[0]
            for _ in range(2000)
        )

    even = shares([_view(name, trip=0.05) for name in (EU, US, ASIA)])
    assert min(even.values()) > 300
    far = shares([_view(EU, trip=0.01), _view(US, trip=0.1), _view(ASIA, trip=0.2)])
    assert far[EU] > 1950
    busy = shares([_view(EU, trip=0.05, queue=2.0), _view(US, trip=0.05), _view(ASIA, trip=0.05)])
    assert busy[EU] < 20


def test_a_region_that_keeps_failing_is_used_last() -> None:
    view = [replace(_view(EU), broken=True, cache=_Holds(20)), _view(US), _view(ASIA)]
    for asked in (_long(EU, US, ASIA), _asked(EU, US, ASIA, size=3)):
        assert _choice(view, asked).candidates[-1] == EU
    affinity = _choice(view, _asked(EU, US, ASIA, affinity=True))
    assert affinity == RouteDecision((US, ASIA, EU), Reason.AFFINITY_SPILL)
    all_broken = [replace(one, broken=True) for one in view]
    assert _choice(all_broken, _long(EU, US, ASIA)).candidates == (EU, US, ASIA)


def test_a_region_that_is_back_bears_a_part_of_the_bound() -> None:
    view = [replace(_view(EU, work=5.0), cache=_Holds(20)), _view(US), _view(ASIA)]
    assert _choice(view, _long(EU, US, ASIA)).candidates[0] == EU
    view[0] = replace(view[0], ramp=0.1)
    assert _choice(view, _long(EU, US, ASIA)).reason == Reason.PREFIX_SPILL


_flags = st.lists(
    st.tuples(st.booleans(), st.booleans(), st.booleans(), st.booleans(), st.floats(0, 50)),
    min_size=2, max_size=6,
)  # fmt: skip


@given(_flags, st.integers(0, 63), st.booleans(), st.sampled_from([3, 9000]), st.floats(0, 0.999))
def test_no_hop_leaves_the_residency_set(
    states: list[tuple[bool, bool, bool, bool, float]],
    members: int,
    by_affinity: bool,
    size: int,
    draw: float,
) -> None:
    """Whatever is dead, draining, broken or full: not the first choice, not a fail-over."""
    names = [RegionName(f"r{i}") for i in range(len(states))]
    view = [
        replace(
            _view(name, fresh=fresh, draining=draining, work=work),
            broken=broken,
            cache=_Holds(20 if holds else 0),
        )
        for name, (fresh, draining, broken, holds, work) in zip(names, states, strict=True)
    ]
    allowed = frozenset(name for i, name in enumerate(names) if members >> i & 1)
    asked = replace(
        _long(*names), allowed=allowed, by_affinity=by_affinity, text_bytes=size,
        draws=(draw, draw),
    )  # fmt: skip
    try:
        decision = choose(view, asked, POLICY)
    except RegionUnavailable:
        drained = {one.name for one in view if one.draining}
        assert allowed <= drained
        return
    assert set(decision.candidates) <= allowed
    assert decision.reason in set(Reason)
    for one in decision.options:
        assert (one.standing is Standing.FORBIDDEN) == (one.region not in allowed)
        assert one.region in allowed or not one.held_tokens  # its digest was not even asked


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
