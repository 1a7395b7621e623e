"""Counts: all limits or none, exact at the end of whatever happened, shared by processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as some

from core.config_tenants import Tenant
from edge.tenants.ledger import Ask, Ledger
from edge.tenants.meter import STEP_S, Fits, Kind, Short, TooLarge, TooMany, limits_of

NOW = 1_796_040_030.0  # at a step's beginning, noon of a day


@contextmanager
def opened(folder: Path) -> Iterator[Ledger]:
    ledger = Ledger(folder / "budgets.counts")
    try:
        yield ledger
    finally:
        ledger.close()


def ask(name: str = "r1", tokens: int = 60, **limits: int) -> Ask:
    tenant = msgspec.convert(limits or {"tokens_per_minute": 100}, Tenant)
    return Ask(name, "acme", tokens, limits_of(tenant), tenant.concurrent_streams, leased=False)


def counts(ledger: Ledger, one: Ask, now: float = NOW) -> dict[str, int]:
    return {limit.kind.value: ledger.meter(one.tenant, limit, now).taken for limit in one.limits}


def fits(ledger: Ledger, one: Ask, now: float = NOW) -> bool:
    return isinstance(ledger.reserve(one, now).verdict, Fits)


def test_the_sum_of_reservations_never_passes_the_limit(tmp_path: Path) -> None:
    with opened(tmp_path) as ledger:
        verdicts = [ledger.reserve(ask(f"r{i}"), NOW).verdict for i in range(10)]
        assert sum(isinstance(one, Fits) for one in verdicts) == 1
        assert verdicts[1] == Short(ask().limits[0], 20)
        assert fits(ledger, ask("r10", tokens=40))
        assert not fits(ledger, ask("r11", tokens=1))


def test_all_limits_or_none(tmp_path: Path) -> None:
    both = {"requests_per_minute": 5, "tokens_per_minute": 100, "tokens_per_day": 80}
    with opened(tmp_path) as ledger:
        first = ask("r1", 60, **both)
        assert fits(ledger, first)
        before = counts(ledger, first)
        verdict = ledger.reserve(ask("r2", 30, **both), NOW).verdict
        assert verdict == Short(first.limits[2], 10)
        assert counts(ledger, first) == before
        assert before == {"requests": 1, "tokens": 60, "tokens-day": 60}


def test_settling_gives_back_what_was_not_used(tmp_path: Path) -> None:
    both = {"requests_per_minute": 5, "tokens_per_minute": 100}
    with opened(tmp_path) as ledger:
        one = ask("r1", 60, **both)
        ledger.reserve(one, NOW)
        assert ledger.settle("r1", 12, NOW)
        assert counts(ledger, one) == {"requests": 1, "tokens": 12}
        assert not ledger.settle("r1", 12, NOW)
        assert counts(ledger, one) == {"requests": 1, "tokens": 12}


def test_what_failed_costs_nothing(tmp_path: Path) -> None:
    both = {"requests_per_minute": 5, "tokens_per_minute": 100}
    with opened(tmp_path) as ledger:
        one = ask("r1", 60, **both)
        ledger.reserve(one, NOW)
        ledger.settle("r1", 0, NOW, counts=False)
        assert counts(ledger, one) == {"requests": 0, "tokens": 0}


def test_a_correction_moves_the_reservation(tmp_path: Path) -> None:
    with opened(tmp_path) as ledger:
        one = ask("r1", 60)
        ledger.reserve(one, NOW)
        ledger.adjust("r1", 110, NOW)  # the prompt was longer than it looked
        assert counts(ledger, one) == {"tokens": 110}
        assert not fits(ledger, ask("r2", 1))
        ledger.settle("r1", 105, NOW)
        assert counts(ledger, one) == {"tokens": 105}


def test_a_minute_slides(tmp_path: Path) -> None:
    """The failing case of fixed windows: a whole limit before a border, another one after it."""
    with opened(tmp_path) as ledger:
        one = ask("r1", 60)
        ledger.reserve(one, NOW)
        for later in (29.9, 30, 31, 59.9, 64.9):
            assert not fits(ledger, ask("r2"), NOW + later)
        ledger.settle("r1", 55, NOW + 64)  # it counts where it was let in
        assert counts(ledger, one, NOW + 64) == {"tokens": 55}
        assert fits(ledger, ask("r2"), NOW + 65)
        assert counts(ledger, one, NOW + 65) == {"tokens": 60}


@given(
    some.lists(
        some.tuples(
            some.floats(0, 40), some.integers(1, 70), some.integers(0, 70), some.integers(0, 3)
        ),
        max_size=40,
    )
)
def test_no_sixty_seconds_see_more_than_the_limit(
    tmp_path_factory: pytest.TempPathFactory, turns: list[tuple[float, int, int, int]]
) -> None:
    """Against the list of all that was let in: never more than the limit in any minute, and what
    is refused would not fit into the last 65 seconds."""
    let_in: list[tuple[float, int]] = []
    waiting: list[tuple[str, int]] = []
    now = NOW
    with opened(tmp_path_factory.mktemp("slides")) as ledger:
        for number, (pause_s, tokens, used, settle) in enumerate(turns):
            now += pause_s
            if settle and waiting:
                name, place = waiting.pop()
                at, reserved = let_in[place]
                let_in[place] = at, min(used, reserved)
                ledger.settle(name, min(used, reserved), now)
            in_65_s = sum(count for at, count in let_in if at > now - 65)
            if fits(ledger, ask(f"r{number}", tokens), now):
                waiting.append((f"r{number}", len(let_in)))
                let_in.append((now, tokens))
            else:
                assert in_65_s + tokens > 100
            assert sum(count for at, count in let_in if at > now - 60) <= 100


def test_a_day_is_utcs(tmp_path: Path) -> None:
    day = {"tokens_per_day": 100}
    with opened(tmp_path) as ledger:
        ledger.reserve(ask("r1", 60, **day), NOW)
        midnight = NOW - NOW % 86_400 + 86_400
        assert not fits(ledger, ask("r2", 60, **day), midnight - 1)
        assert fits(ledger, ask("r2", 60, **day), midnight)
        ledger.settle("r1", 0, midnight)  # of a day that is over
        assert counts(ledger, ask("x", **day), midnight) == {"tokens-day": 60}


def test_a_clock_that_is_set_back_opens_nothing(tmp_path: Path) -> None:
    with opened(tmp_path) as ledger:
        assert fits(ledger, ask("r1"), NOW)
        assert not fits(ledger, ask("r2"), NOW - 3600)
        assert fits(ledger, ask("r3", 40), NOW - 3600)


def test_a_clock_that_was_far_ahead_shuts_nobody_out(tmp_path: Path) -> None:
    """Once it is right again: what was counted at that time is of no minute and no day."""
    one = ask("r1", tokens_per_minute=100, tokens_per_day=100)
    with opened(tmp_path) as ledger:
        assert fits(ledger, one, NOW + 3 * 86_400)
        assert fits(ledger, replace(one, id="r2"), NOW)
        assert not fits(ledger, replace(one, id="r3"), NOW)
        assert ledger.settle("r1", 60, NOW)
        assert counts(ledger, one) == {"tokens": 60, "tokens-day": 60}
        minutes = ask("r4", tokens_per_minute=100)
        assert fits(ledger, replace(minutes, tenant="other"), NOW + 3700)
        assert fits(ledger, replace(minutes, tenant="other", id="r5"), NOW)


def test_what_can_never_fit_and_streams(tmp_path: Path) -> None:
    with opened(tmp_path) as ledger:
        one = ask("r0", 101)
        assert ledger.reserve(one, NOW).verdict == TooLarge(one.limits[0])
        for name in ("r1", "r2"):
            assert fits(ledger, ask(name, concurrent_streams=2))
        assert ledger.reserve(ask("r3", concurrent_streams=2), NOW).verdict == TooMany(2)
        ledger.settle("r1", 5, NOW)
        assert fits(ledger, ask("r3", concurrent_streams=2))


def test_what_the_dead_reserved_is_charged_and_their_streams_end(tmp_path: Path) -> None:
    with opened(tmp_path) as alive:
        with opened(tmp_path) as dead:
            assert fits(dead, ask("r1", concurrent_streams=1, tokens_per_minute=100))
            assert alive.reserve(ask("r2", 1, concurrent_streams=1), NOW).verdict == TooMany(1)
        assert fits(alive, ask("r2", 40, concurrent_streams=1, tokens_per_minute=100))
        assert not fits(alive, ask("r3", 1))
        assert alive.open_streams("acme", NOW) == 1


def test_a_process_that_takes_a_dead_ones_seat_has_none_of_its_streams(tmp_path: Path) -> None:
    with opened(tmp_path) as dead:
        assert fits(dead, ask("r1", concurrent_streams=1))
    with opened(tmp_path) as heir:
        assert heir.open_streams("acme", NOW) == 0


def test_what_is_final_is_used_at_once_and_may_be_given_back(tmp_path: Path) -> None:
    day = {"tokens_per_day": 100}
    with opened(tmp_path) as ledger:
        one = replace(ask("batch", 90, **day), final=True)
        assert fits(ledger, one)
        assert counts(ledger, one) == {"tokens-day": 90}
        assert counts(ledger, ask()) == {"tokens": 0}  # of the minute nothing
        assert not ledger.settle("batch", 0, NOW)
        assert not fits(ledger, ask("r1", 11, **day))
        ledger.correct_day("acme", one.limits[0].window(NOW), -30, NOW)
        assert counts(ledger, one) == {"tokens-day": 60}
        ledger.correct_day("acme", one.limits[0].window(NOW) - 1, -30, NOW)  # yesterday's
        assert counts(ledger, one) == {"tokens-day": 60}


def test_leased_windows_grant_what_was_leased(tmp_path: Path) -> None:
    with opened(tmp_path) as ledger:
        one = replace(ask("r1", 60), leased=True)
        limit, window = one.limits[0], one.limits[0].window(NOW)
        assert ledger.reserve(one, NOW).verdict == Short(limit, 60)
        ledger.grant("acme", limit, window, 70, 30, NOW)
        reply = ledger.reserve(one, NOW)
        assert isinstance(reply.verdict, Fits)
        assert reply.meters[Kind.TOKENS].remaining == 40  # 10 here, 30 elsewhere
        ledger.grant("acme", limit, window, 50, 0, NOW)  # an answer that came late
        assert ledger.granted("acme", limit, window, NOW) == 70


def test_a_lease_for_a_step_to_come_is_there_when_it_begins(tmp_path: Path) -> None:
    with opened(tmp_path) as ledger:
        one = replace(ask("r1", 60), leased=True)
        limit, window = one.limits[0], one.limits[0].window(NOW)
        for ahead in range(1, 4):
            ledger.grant("acme", limit, window + ahead, 60 + ahead, 0, NOW)
        ledger.grant("acme", limit, window + 4, 99, 0, NOW)  # too far ahead to be known
        assert not fits(ledger, one, NOW)
        assert fits(ledger, one, NOW + STEP_S)
        granted = [ledger.granted("acme", limit, window + i, NOW + STEP_S) for i in range(5)]
        assert granted == [0, 61, 62, 63, 0]
        assert ledger.meter("acme", limit, NOW + STEP_S).counted[-1] == 60


def test_many_tenants_and_processes_that_add_them(tmp_path: Path) -> None:
    with opened(tmp_path) as one, opened(tmp_path) as other:
        for i in range(40):
            asked = replace(ask(f"r{i}", 10 + i), tenant=f"tenant-{i}")
            assert fits((one, other)[i % 2], asked)
        for ledger in (one, other):
            for i in range(40):
                asked = replace(ask(), tenant=f"tenant-{i}")
                assert counts(ledger, asked) == {"tokens": 10 + i}


LIMIT = 1200


def _spend(folder: str, name: str, pipe: Connection) -> None:
    """Reserve one token at a time and settle every second reservation, until nothing is left."""
    with opened(Path(folder)) as ledger:
        pipe.send(0)
        pipe.recv()
        got = 0
        while fits(ledger, ask(f"{name}-{got}", 1, tokens_per_minute=LIMIT)):
            if got % 2:
                ledger.settle(f"{name}-{got}", 1, NOW)
            got += 1
            pipe.send(got)
        pipe.send(-1)


def test_processes_share_one_limit_and_one_is_killed_in_the_middle(tmp_path: Path) -> None:
    """The kill may fall anywhere, between two words too: no count is lost."""
    spawn = multiprocessing.get_context("spawn")
    pipes = [spawn.Pipe() for _ in range(2)]
    workers = [
        spawn.Process(target=_spend, args=(str(tmp_path), f"w{i}", theirs))
        for i, (_, theirs) in enumerate(pipes)
    ]
    for worker in workers:
        worker.start()
    for ours, theirs in pipes:
        theirs.close()
        assert ours.recv() == 0
    for ours, _ in pipes:
        ours.send("go")
    victim, other = pipes[0][0], pipes[1][0]
    told = [0, 0]
    while told[0] < 60:
        told[0] = victim.recv()
        assert told[0] > 0, "it came to the end before it could be killed"
    pid = workers[0].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    with suppress(EOFError):
        while True:
            told[0] = victim.recv()
    while (got := other.recv()) != -1:
        told[1] = got
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [-signal.SIGKILL, 0]
    with opened(tmp_path) as judge:
        assert counts(judge, ask("x", 1, tokens_per_minute=LIMIT)) == {"tokens": LIMIT}
        assert LIMIT - sum(told) in (0, 1)  # the killed one may have reserved what it did not tell
        assert fits(judge, ask("y", 1, concurrent_streams=1))  # all of them ended
