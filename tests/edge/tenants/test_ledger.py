"""Counts: all limits or none, exact at the end of whatever happened, shared by processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import pytest

from core.config_tenants import Tenant
from core.errors import ConfigError, LimitsUnavailable
from edge.tenants import lock
from edge.tenants.ledger import Ask, Ledger
from edge.tenants.meter import Fits, Kind, Short, TooLarge, TooMany, limits_of

NOW = 1_796_040_030.0  # 30 s into a minute, noon of a day
LEASE_S = 20.0


@contextmanager
def opened(folder: Path, owner: str = "me") -> Iterator[Ledger]:
    ledger = Ledger(folder / "budgets.sqlite", owner=owner, lease_s=LEASE_S)
    try:
        yield ledger
    finally:
        ledger.close()


def ask(name: str = "r1", tokens: int = 60, **limits: int) -> Ask:
    tenant = msgspec.convert(limits or {"tokens_per_minute": 100}, Tenant)
    return Ask(name, "acme", tokens, limits_of(tenant), tenant.concurrent_streams, leased=False)


def counts(ledger: Ledger, one: Ask, now: float = NOW) -> dict[str, tuple[int, int]]:
    meters = {
        limit.kind: ledger.meter(one.tenant, limit, limit.window(now)) for limit in one.limits
    }
    return {kind.value: (meter.used, meter.reserved) for kind, meter in meters.items()}


def test_the_sum_of_reservations_never_passes_the_limit(tmp_path: Path) -> None:
    with opened(tmp_path) as ledger:
        verdicts = [ledger.reserve(ask(f"r{i}"), NOW).verdict for i in range(10)]
        assert sum(isinstance(one, Fits) for one in verdicts) == 1
        assert verdicts[1] == Short(ask().limits[0], 20)
        assert isinstance(ledger.reserve(ask("r10", tokens=40), NOW).verdict, Fits)
        assert isinstance(ledger.reserve(ask("r11", tokens=1), NOW).verdict, Short)


def test_all_limits_or_none(tmp_path: Path) -> None:
    both = {"requests_per_minute": 5, "tokens_per_minute": 100, "tokens_per_day": 80}
    with opened(tmp_path) as ledger:
        first = ask("r1", 60, **both)
        assert isinstance(ledger.reserve(first, NOW).verdict, Fits)
        before = counts(ledger, first)
        verdict = ledger.reserve(ask("r2", 30, **both), NOW).verdict
        assert verdict == Short(first.limits[2], 10)
        assert counts(ledger, first) == before
        assert before == {"requests": (0, 1), "tokens": (0, 60), "tokens-day": (0, 60)}


def test_a_step_that_fails_changes_nothing(tmp_path: Path) -> None:
    with opened(tmp_path) as ledger:
        one = ask("r1", 40)
        ledger.reserve(one, NOW)
        with pytest.raises(LimitsUnavailable):
            ledger.reserve(one, NOW)  # no two reservations have one ID
        assert counts(ledger, one) == {"tokens": (0, 40)}
        assert ledger.settle("r1", 7)
        assert counts(ledger, one) == {"tokens": (7, 0)}


def test_settling_gives_back_what_was_not_used(tmp_path: Path) -> None:
    both = {"requests_per_minute": 5, "tokens_per_minute": 100}
    with opened(tmp_path) as ledger:
        one = ask("r1", 60, **both)
        ledger.reserve(one, NOW)
        assert ledger.settle("r1", 12)
        assert counts(ledger, one) == {"requests": (1, 0), "tokens": (12, 0)}
        assert not ledger.settle("r1", 12)
        assert counts(ledger, one) == {"requests": (1, 0), "tokens": (12, 0)}


def test_what_failed_costs_nothing(tmp_path: Path) -> None:
    both = {"requests_per_minute": 5, "tokens_per_minute": 100}
    with opened(tmp_path) as ledger:
        one = ask("r1", 60, **both)
        ledger.reserve(one, NOW)
        ledger.settle("r1", 0, counts=False)
        assert counts(ledger, one) == {"requests": (0, 0), "tokens": (0, 0)}


def test_a_correction_moves_the_reservation(tmp_path: Path) -> None:
    with opened(tmp_path) as ledger:
        one = ask("r1", 60)
        ledger.reserve(one, NOW)
        ledger.adjust("r1", 110)  # the prompt was longer than it looked
        assert counts(ledger, one) == {"tokens": (0, 110)}
        assert isinstance(ledger.reserve(ask("r2", 1), NOW).verdict, Short)
        ledger.settle("r1", 105)
        assert counts(ledger, one) == {"tokens": (105, 0)}


def test_the_window_turns_over_cleanly(tmp_path: Path) -> None:
    with opened(tmp_path) as ledger:
        one = ask("r1", 60)
        assert one.limits[0].resets_s(NOW) == 30
        ledger.reserve(one, NOW)
        ledger.renew(NOW + 15)
        assert isinstance(ledger.reserve(ask("r2"), NOW + 29.9).verdict, Short)
        assert isinstance(ledger.reserve(ask("r2"), NOW + 30).verdict, Fits)
        ledger.settle("r1", 55)  # it counts where it was let in
        assert counts(ledger, one) == {"tokens": (55, 0)}
        assert counts(ledger, one, NOW + 30) == {"tokens": (0, 60)}


def test_a_day_is_utcs(tmp_path: Path) -> None:
    day = {"tokens_per_day": 100}
    with opened(tmp_path) as ledger:
        ledger.reserve(ask("r1", 60, **day), NOW)
        midnight = NOW - NOW % 86_400 + 86_400
        assert isinstance(ledger.reserve(ask("r2", 60, **day), midnight - 1).verdict, Short)
        assert isinstance(ledger.reserve(ask("r2", 60, **day), midnight).verdict, Fits)


def test_what_can_never_fit_and_streams(tmp_path: Path) -> None:
    with opened(tmp_path) as ledger:
        one = ask("r0", 101)
        assert ledger.reserve(one, NOW).verdict == TooLarge(one.limits[0])
        for name in ("r1", "r2"):
            assert isinstance(ledger.reserve(ask(name, concurrent_streams=2), NOW).verdict, Fits)
        assert ledger.reserve(ask("r3", concurrent_streams=2), NOW).verdict == TooMany(2)
        ledger.settle("r1", 5)
        assert isinstance(ledger.reserve(ask("r3", concurrent_streams=2), NOW).verdict, Fits)


def test_the_dead_ones_reservations_end_charged_whole(tmp_path: Path) -> None:
    with opened(tmp_path, "dead") as dead:
        dead.reserve(ask("r1"), NOW)
    with opened(tmp_path, "alive") as alive:
        alive.reserve(ask("r2", 40), NOW)
        alive.renew(NOW + 15)
        assert counts(alive, ask()) == {"tokens": (0, 100)}
        alive.renew(NOW + LEASE_S + 0.1)
        assert counts(alive, ask()) == {"tokens": (60, 40)}
        assert alive.open_streams("acme") == 1


def test_a_refusal_looks_for_the_dead_first(tmp_path: Path) -> None:
    with opened(tmp_path, "dead") as dead:
        dead.reserve(ask("r1", concurrent_streams=1), NOW)
    with opened(tmp_path, "alive") as alive:
        later = NOW + LEASE_S + 0.1
        assert isinstance(alive.reserve(ask("r2", concurrent_streams=1), NOW).verdict, TooMany)
        assert isinstance(alive.reserve(ask("r2", concurrent_streams=1), later).verdict, Fits)


def test_what_is_final_is_used_at_once(tmp_path: Path) -> None:
    day = {"tokens_per_day": 100}
    with opened(tmp_path) as ledger:
        one = replace(ask("batch", 90, **day), final=True)
        assert isinstance(ledger.reserve(one, NOW).verdict, Fits)
        assert counts(ledger, one) == {"tokens-day": (90, 0)}
        assert not ledger.settle("batch", 0)
        assert isinstance(ledger.reserve(ask("r1", 11, **day), NOW).verdict, Short)


def test_leased_windows_grant_what_was_leased(tmp_path: Path) -> None:
    with opened(tmp_path) as ledger:
        one = replace(ask("r1", 60), leased=True)
        window = one.limits[0].window(NOW)
        assert ledger.reserve(one, NOW).verdict == Short(one.limits[0], 60)
        ledger.grant("acme", one.limits[0], window, 70, 30)
        reply = ledger.reserve(one, NOW)
        assert isinstance(reply.verdict, Fits)
        assert reply.meters[Kind.TOKENS].remaining == 40  # 10 here, 30 elsewhere
        ledger.grant("acme", one.limits[0], window, 50, 0)  # an answer that came late
        assert ledger.meter("acme", one.limits[0], window).granted == 70


def test_old_windows_go(tmp_path: Path) -> None:
    with opened(tmp_path) as ledger:
        one = ask("r1", 60)
        ledger.reserve(one, NOW)
        ledger.settle("r1", 60)
        ledger.renew(NOW + 61)
        assert counts(ledger, one) == {"tokens": (60, 0)}
        ledger.renew(NOW + 180)
        assert counts(ledger, one) == {"tokens": (0, 0)}


def test_a_stopped_holder_of_the_lock_does_not_stop_us(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "LOCK_S", 0.02)
    with opened(tmp_path, "stopped") as stopped, opened(tmp_path, "other") as other:
        with stopped._held(), pytest.raises(LimitsUnavailable):
            other.reserve(ask(), NOW)
        assert isinstance(other.reserve(ask(), NOW).verdict, Fits)


def _overwritten(path: Path) -> None:
    path.write_bytes(b"no ledger at all, but long enough to be looked at" * 40)


def _cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4096])


def _of_another_program(path: Path) -> None:
    path.unlink()
    with closing(sqlite3.connect(path)) as db:
        db.execute("create table facts (other text)")


@pytest.mark.parametrize("damage", [_overwritten, _cut_short, _of_another_program])
def test_a_file_that_is_no_ledger_is_named_and_let_go(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    path = tmp_path / "budgets.sqlite"
    with opened(tmp_path) as ledger:
        ledger.reserve(ask(), NOW)
    damage(path)
    with pytest.raises(ConfigError) as refused, opened(tmp_path):
        pass
    assert str(refused.value) == f"{path} is no ledger: move it away; counts begin anew"
    path.unlink()
    with opened(tmp_path) as ledger:
        assert isinstance(ledger.reserve(ask(), NOW).verdict, Fits)


def test_a_place_where_no_ledger_can_be(tmp_path: Path) -> None:
    (tmp_path / "budgets.sqlite").mkdir()
    with pytest.raises(ConfigError, match=r"budgets\.sqlite: cannot be used"), opened(tmp_path):
        pass


def test_a_ledger_that_is_busy_is_no_mistake_of_the_operators(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that was started again at a bad moment must not end its edge."""
    monkeypatch.setattr(lock, "LOCK_S", 0.01)
    with opened(tmp_path) as ledger, ledger._lock.held(), pytest.raises(LimitsUnavailable):
        Ledger(tmp_path / "budgets.sqlite", owner="other", lease_s=LEASE_S)


LIMIT = 1200


def _spend(folder: str, name: str, pipe: Connection) -> None:
    """Reserve one token at a time and keep every second reservation, until nothing is left."""
    with opened(Path(folder), name) as ledger:
        pipe.send(0)
        pipe.recv()
        got = 0
        while isinstance(
            ledger.reserve(ask(f"{name}-{got}", 1, tokens_per_minute=LIMIT), NOW).verdict, Fits
        ):
            if got % 2:
                ledger.settle(f"{name}-{got}", 1)
            got += 1
            pipe.send(got)
        pipe.send(-1)


def test_processes_share_one_limit_and_one_is_killed_in_the_middle(tmp_path: Path) -> None:
    """The kill may fall anywhere, in a transaction too: the counts stay those of whole steps."""
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
    with opened(tmp_path, "judge") as judge:
        one = ask("x", 1, tokens_per_minute=LIMIT)
        meter = judge.meter("acme", one.limits[0], one.limits[0].window(NOW))
        assert meter.used + meter.reserved == LIMIT
        assert LIMIT - sum(told) in (0, 1)  # the killed one may have reserved what it did not tell
        assert meter.reserved == judge.open_streams("acme")
