"""A few seconds of `make bench-admission`, and that its judge would notice."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from core.types import Usage
from core.usage import UsageRecord
from loadtest.admission import traffic
from loadtest.admission.__main__ import figures, records_of
from loadtest.admission.cast import cast
from loadtest.admission.judge import judge
from loadtest.admission.timing import Taken, measure
from loadtest.admission.traffic import Seen
from tests.servers import needed

USAGE = Usage(prompt_tokens=16, completion_tokens=12)
RECORD = UsageRecord(
    id="r1", at=1.0, edge="e", tenant="t", key="k", model="m", region="r", dialect="chat",
    outcome="ok", prompt=16, cached=0, completion=12, complete=True,
)  # fmt: skip
LIMIT = 300


@pytest.mark.world
@pytest.mark.parametrize(
    ("edges", "requests", "limit"),
    [
        (1, 150, LIMIT),
        pytest.param(3, 10_000, 6000, marks=[pytest.mark.soak, pytest.mark.timeout(900)]),
    ],
)
def test_ledgers_hold_what_callers_were_told_while_processes_die(
    tmp_path: Path, edges: int, requests: int, limit: int
) -> None:
    needed("redis-server")
    with cast(tmp_path, edges=edges, workers=2, tokens_per_minute=limit) as running:
        with traffic.window_of(running, limit) as window:
            seen = asyncio.run(traffic.run(running, requests, window))
        verdict = judge(seen, records_of(running))
        assert "ended" in (running.edges[0].state / "edge.log").read_text()  # a worker was killed
    assert verdict.requests == requests
    assert verdict.answered > requests / 2
    assert verdict.refused > 5  # the tight tenant asked for more than it may
    assert (verdict.matched, verdict.unheard, verdict.twice) == (verdict.answered, 0, 0)
    assert verdict.written == verdict.sent
    assert 0 < window.highest <= limit


def test_what_admission_adds_is_measured_in_processes_that_share_a_ledger(tmp_path: Path) -> None:
    taken = measure(tmp_path, processes=2, requests=20)
    assert len(taken) == 40
    assert 0 < min(one.before_ms for one in taken) < 50
    assert 0 < min(one.after_ms for one in taken) < 50


@pytest.mark.parametrize(
    ("records", "matched", "unheard", "twice"),
    [
        ([RECORD], 1, 0, 0),
        ([], 0, 0, 0),
        ([msgspec.structs.replace(RECORD, completion=11)], 0, 0, 0),
        ([msgspec.structs.replace(RECORD, complete=False)], 0, 0, 0),
        ([RECORD, RECORD], 1, 0, 1),
        ([RECORD, msgspec.structs.replace(RECORD, id="r2")], 1, 1, 0),
    ],
)
def test_the_judge_notices(
    records: list[UsageRecord], matched: int, unheard: int, twice: int
) -> None:
    verdict = judge([Seen("t", 200, "r1", USAGE)], records)
    assert (verdict.matched, verdict.unheard, verdict.twice) == (matched, unheard, twice)
    failing = {one.name for one in figures(verdict, 100, 100, [Taken(0.1, 0.1)] * 9) if one.fails}
    assert bool(failing) == (matched == 0 or unheard > 0 or twice > 0)


def test_requests_that_broke_off_may_be_written_unheard() -> None:
    left = Seen("t", 200, "r1", left=True)
    died = Seen("t", 0)
    for one in (left, died):
        assert judge([one], [RECORD]).unheard == 0
    refused = Seen("t", 429, "r9")
    assert judge([refused], [RECORD]).unheard == 1


def test_a_limit_that_was_passed_by_more_than_a_lease_fails() -> None:
    verdict = judge([Seen("t", 200, "r1", USAGE)], [RECORD])
    assert not any(one.fails for one in figures(verdict, 110, 100, [Taken(0.1, 0.1)] * 9))
    assert any(one.fails for one in figures(verdict, 111, 100, [Taken(0.1, 0.1)] * 9))
