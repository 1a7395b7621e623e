"""The file of all counts: damaged, full, held, cut short, opened too often."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from core.errors import ConfigError, LimitsUnavailable
from edge.tenants import board, lock
from edge.tenants.board import Board
from edge.tenants.ledger import Ledger
from edge.tenants.lock import KernelLock
from tests.edge.tenants.test_ledger import NOW, ask, fits, opened


def test_a_stopped_holder_of_the_lock_does_not_stop_us(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "LOCK_S", 0.02)
    with opened(tmp_path) as other:
        stopped = KernelLock(tmp_path / "budgets.counts")
        with stopped.held(), pytest.raises(LimitsUnavailable):
            other.reserve(ask(), NOW)
        assert fits(other, ask())
        stopped.close()


def _overwritten(path: Path) -> None:
    path.write_bytes(b"no ledger at all, but long enough to be looked at" * 40)


def _cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def _of_another_program(path: Path) -> None:
    path.write_bytes(b"SQLite format 3\0".ljust(4096, b"\0"))


@pytest.mark.parametrize("damage", [_overwritten, _cut_short, _of_another_program])
def test_a_file_that_is_no_ledger_is_named_and_let_go(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    path = tmp_path / "budgets.counts"
    with opened(tmp_path) as ledger:
        ledger.reserve(ask(), NOW)
    damage(path)
    with pytest.raises(ConfigError) as refused, opened(tmp_path):
        pass
    assert str(refused.value) == f"{path} is no ledger: move it away; counts begin anew"
    path.unlink()
    with opened(tmp_path) as ledger:
        assert fits(ledger, ask())


def test_a_file_that_is_cut_while_it_is_used_ends_no_process(tmp_path: Path) -> None:
    with opened(tmp_path) as ledger:
        assert fits(ledger, ask())
        os.truncate(tmp_path / "budgets.counts", 100)
        with pytest.raises(LimitsUnavailable, match="cut short"):
            ledger.reserve(ask("r2"), NOW)


def test_a_place_where_no_ledger_can_be(tmp_path: Path) -> None:
    (tmp_path / "budgets.counts").mkdir()
    with pytest.raises(ConfigError, match=r"budgets\.counts: cannot be used"), opened(tmp_path):
        pass


def test_more_processes_than_seats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board, "SEATS", 2)
    full = pytest.raises(ConfigError, match="2 edge processes")
    with opened(tmp_path), opened(tmp_path), full:
        Board(tmp_path / "budgets.counts")
    Board(tmp_path / "budgets.counts").close()


def test_a_ledger_that_is_busy_when_it_is_opened_is_there_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An edge that is started at a bad moment starts: it refuses who has limits until then."""
    monkeypatch.setattr(lock, "LOCK_S", 0.01)
    ticks = [0.0]
    with opened(tmp_path):
        busy = KernelLock(tmp_path / "budgets.counts")
        with busy.held():
            late = Ledger(tmp_path / "budgets.counts", ticks=lambda: ticks[0])
        busy.close()
        assert "held too long" in caplog.text
        with pytest.raises(LimitsUnavailable):
            late.reserve(ask(), NOW)  # not looked for again yet
        ticks[0] = 1.0
        assert fits(late, ask())
        late.close()


def test_a_full_disk_is_no_mistake_of_the_operators(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as ledger:
        assert fits(ledger, ask())

        def full(*_: object) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "pwrite", full)
        with pytest.raises(LimitsUnavailable, match="No space left"):
            ledger.reserve(replace(ask("r2"), tenant="new"), NOW)
        monkeypatch.setattr(os, "pwrite", lambda *_: 100)  # some of it was written
        with pytest.raises(LimitsUnavailable, match="No space left"):
            ledger.reserve(replace(ask("r2"), tenant="new"), NOW)
        monkeypatch.undo()
        assert fits(ledger, replace(ask("r2"), tenant="new"))
