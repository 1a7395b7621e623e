"""Every choice says why, in words of a closed set, and what each region was in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from core.config import Routing
from core.status import ModelStatus, RegionStatus
from core.types import ModelName, RegionName
from edge.routing.placement import Asked, Reason, RouteDecision, Standing, choose
from edge.routing.view import RegionView

MODEL = ModelName("m")
EU, US, ASIA, OZ = (RegionName(name) for name in ("eu", "us", "asia", "oz"))
WALK = (EU, US, ASIA, OZ)


@dataclass(frozen=True)
class _Holds:
    blocks: int

    def overlap(self, ids: Sequence[bytes], now: float) -> int:
        return min(self.blocks, len(ids))


def _world(**changed: RegionView) -> list[RegionView]:
    """Four idle regions, the nearest first in the walk; `changed` by name."""
    views = {
        name: RegionView(
            name=name,
            round_trip_s=0.01 + 0.05 * place,
            configured=frozenset({MODEL}),
            fresh=True,
            age_s=0.1,
            status=_status(name),
            cache=_Holds(0),
        )
        for place, name in enumerate(WALK)
    }
    return list((views | changed).values())


def _status(name: RegionName, **more: object) -> RegionStatus:
    models = (ModelStatus(name=MODEL, context=9, prefill_tokens_per_s=1000.0),)
    return RegionStatus(region=name, epoch="e", sequence=1, **{"models": models, **more})  # type: ignore[arg-type]  # a table of fields


def _one(
    name: RegionName, *, status: dict[str, object] | None = None, **more: object
) -> RegionView:
    [view] = [one for one in _world() if one.name == name]
    return replace(view, status=_status(name, **(status or {})), **more)  # type: ignore[arg-type]  # the same


LONG = Asked(
    model=MODEL, walk=WALK, text_bytes=8000, by_affinity=False,
    ids=[bytes([i]) * 8 for i in range(10)], ends=[800 * (i + 1) for i in range(10)],
)  # fmt: skip
SHORT = replace(LONG, text_bytes=100, ids=(), ends=(), draws=(0.0, 0.0))
BUSY: dict[str, object] = {"prefill_work_s": 60.0}

CASES = {
    Reason.PREFIX_HOME: (_world(), LONG),
    Reason.PREFIX_HELD: (_world(oz=_one(OZ, cache=_Holds(9))), LONG),
    Reason.FASTEST: (_world(eu=_one(EU, status={"prefill_work_s": 5.0})), LONG),
    Reason.PREFIX_SPILL: (_world(eu=_one(EU, status=BUSY, cache=_Holds(9))), LONG),
    Reason.NEAREST_SHORT: (_world(), SHORT),
    Reason.AFFINITY: (_world(), replace(SHORT, by_affinity=True)),
    Reason.AFFINITY_SPILL: (_world(eu=_one(EU, status=BUSY)), replace(SHORT, by_affinity=True)),
}


def test_every_reason_has_a_case() -> None:
    assert {*CASES, Reason.FAILOVER} == set(Reason)  # that one is the gateway's


@pytest.mark.parametrize("reason", CASES)
def test_why(reason: Reason) -> None:
    decision = choose(*CASES[reason], Routing())
    assert decision.reason is reason
    [taken] = [one for one in decision.options if one.standing is Standing.TAKEN]
    assert taken.region == decision.candidates[0]
    assert [one.region for one in decision.options] == list(WALK)


def _stood(decision: RouteDecision) -> dict[str, Standing]:
    return {str(one.region): one.standing for one in decision.options}


def test_what_each_region_was() -> None:
    view = _world(
        eu=_one(EU, status={"draining": True}, cache=_Holds(9)),
        us=_one(US, fresh=False),
        asia=_one(ASIA, broken=True),
    )
    assert _stood(choose(view, LONG, Routing())) == {
        "eu": Standing.DRAINING, "us": Standing.SUSPECT, "asia": Standing.FAILING,
        "oz": Standing.TAKEN,
    }  # fmt: skip
    view = _world(eu=_one(EU, status={"models": ()}), us=_one(US, status=BUSY))
    pinned = replace(LONG, allowed=frozenset({EU, US, OZ}))
    assert _stood(choose(view, pinned, Routing())) == {
        "eu": Standing.NO_MODEL, "us": Standing.FULL, "asia": Standing.FORBIDDEN,
        "oz": Standing.TAKEN,
    }  # fmt: skip
    assert _stood(choose(_world(), LONG, Routing())) == {
        "eu": Standing.TAKEN, "us": Standing.WEIGHED,
        "asia": Standing.NOT_A_CANDIDATE, "oz": Standing.NOT_A_CANDIDATE,
    }  # fmt: skip
    drawn = replace(SHORT, draws=(0.0, 0.999))
    assert _stood(choose(_world(), drawn, Routing())) == {
        "eu": Standing.TAKEN, "us": Standing.NOT_DRAWN, "asia": Standing.NOT_DRAWN,
        "oz": Standing.WEIGHED,
    }  # fmt: skip


def _cold(start_s: float) -> dict[str, object]:
    return {"models": (ModelStatus(name=MODEL, context=9, start_s=start_s),)}


@pytest.mark.parametrize("asked", [LONG, SHORT, replace(SHORT, by_affinity=True)])
def test_a_cold_home_comes_behind_the_warm_ones_that_are_sooner(asked: Asked) -> None:
    decision = choose(_world(eu=_one(EU, status=_cold(3.0))), asked, Routing())
    assert decision.candidates == (US, ASIA, OZ, EU)
    assert _stood(decision)["eu"] is Standing.COLD


@pytest.mark.parametrize("asked", [LONG, SHORT, replace(SHORT, by_affinity=True)])
def test_a_cold_home_is_taken_where_the_warm_ones_take_longer(asked: Asked) -> None:
    later = {str(name): _one(name, status={"prefill_work_s": 9.0}) for name in (US, ASIA, OZ)}
    decision = choose(_world(eu=_one(EU, status=_cold(3.0)), **later), asked, Routing())
    assert decision.candidates[0] == EU
    option = decision.of(EU)
    assert option is not None
    assert option.wait_s == 3.0


def test_warm_ones_that_are_full_do_not_keep_from_a_cold_one() -> None:
    """Nobody is within the bound but the region that has nothing to do."""
    full = {str(name): _one(name, sent_s=2.0, ramp=0.0) for name in (US, ASIA, OZ)}
    decision = choose(_world(eu=_one(EU, status=_cold(3.0)), **full), LONG, Routing())
    assert decision.candidates[0] == EU


def test_where_all_are_cold_one_is_started() -> None:
    cold = {str(name): _one(name, status=_cold(3.0)) for name in WALK}
    decision = choose(_world(**cold), LONG, Routing())
    assert decision.candidates[0] == EU
    assert Standing.COLD not in _stood(decision).values()


def test_every_standing_is_met() -> None:
    """None is a word that nothing can be."""
    met = {
        standing
        for view, asked in CASES.values()
        for standing in _stood(choose(view, asked, Routing())).values()
    }
    assert set(Standing) - met == {
        Standing.SUSPECT, Standing.FAILING, Standing.DRAINING, Standing.NO_MODEL,
        Standing.FORBIDDEN, Standing.COLD,
    }  # fmt: skip  # and those are in the other tests


def test_scores_are_what_was_predicted() -> None:
    held = _one(US, status={"prefill_work_s": 2.0}, cache=_Holds(5), sent_s=0.5, drained_s=0.3)
    decision = choose(_world(us=held), LONG, Routing())
    option = decision.of(US)
    assert option is not None
    assert (option.held_tokens, option.read_s) == (1000.0, 1.0)
    assert option.wait_s == pytest.approx(2.2)
    assert option.total_s == pytest.approx(0.06 + 2.2 + 1.0)
    assert decision.bound_s == pytest.approx(2.2 / 4 + 10)
    assert decision.work_s(US) == 1.0
    assert decision.of(RegionName("nowhere")) is None


def test_what_an_affinity_brings_is_counted() -> None:
    """The edge's own count of what it sent: also where nothing had to be compared."""
    decision = choose(_world(), replace(LONG, by_affinity=True), Routing())
    assert decision.work_s(decision.candidates[0]) == pytest.approx(2.0)
