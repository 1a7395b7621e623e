"""`skerry usage`: totals that add up to the ledger, in exact money."""

from __future__ import annotations

import csv
import io
from decimal import Decimal
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from core.errors import ConfigError
from core.usage import UsageRecord, UsageWriter
from deploy.commands import app

NOON = 1_796_040_000.0  # 2026-11-30, 12:00 UTC
MODEL = "smollm2-135m-instruct"
DAY_S = 86_400


def usage(state: Path, *words: str) -> Result:
    return CliRunner().invoke(app, ["usage", *words, "--state", str(state)])


def rows(state: Path, *words: str) -> list[dict[str, str]]:
    said = usage(state, "--csv", *words)
    assert said.exit_code == 0, said.output
    return list(csv.DictReader(io.StringIO(said.stdout)))


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """Thirty requests of two tenants over three days, every fifth of them unfinished."""
    now = [NOON]
    writer = UsageWriter(tmp_path / "usage", "here-1", clock=lambda: now[0])
    for i in range(30):
        now[0] = NOON + i // 10 * DAY_S
        writer.write(
            UsageRecord(
                id=f"r{i}", at=now[0], edge="here", tenant=("acme", "beta")[i % 2], key="k",
                model=MODEL if i % 3 else "free", region="eu", dialect="chat",
                outcome="ok" if i % 5 else "cancelled", prompt=100 + i, cached=i, completion=7,
                complete=bool(i % 5),
            )
        )  # fmt: skip
    writer.close()
    return tmp_path


@pytest.mark.parametrize(("by", "lines"), [("tenant", 2), ("model", 2), ("day", 3)])
def test_however_it_is_cut_the_sum_is_the_ledgers(state: Path, by: str, lines: int) -> None:
    found = rows(state, "--by", by)
    assert len(found) == lines
    assert all(row[by] for row in found)
    whole = [i for i in range(30) if i % 5]
    for column, total in (
        ("requests", len(whole)),
        ("prompt_tokens", sum(100 + i for i in whole)),
        ("cached_tokens", sum(whole)),
        ("completion_tokens", 7 * len(whole)),
        ("unfinished", 6),
        ("unfinished_prompt_tokens", sum(100 + i for i in range(0, 30, 5))),
    ):
        assert sum(int(row[column]) for row in found) == total, column
    # 0.10 for a million of input, 0.02 cached, 0.40 of output, in two-regions
    paid = [i for i in whole if i % 3]
    cost = sum(100 * Decimal("0.10") + i * Decimal("0.02") + 7 * Decimal("0.40") for i in paid)
    assert sum(Decimal(row["cost"]) for row in found) == Decimal(cost) / 1_000_000


def test_days(state: Path) -> None:
    days = [row["day"] for row in rows(state, "--by", "day")]
    assert days == ["2026-11-30", "2026-12-01", "2026-12-02"]
    (one,) = rows(state, "--by", "day", "--since", days[1], "--until", days[1])
    assert (one["day"], one["requests"], one["unfinished"]) == (days[1], "8", "2")
    assert isinstance(usage(state, "--since", "yesterday").exception, ConfigError)


def test_a_table_for_people(state: Path) -> None:
    said = usage(state, "--by", "model")
    head, *lines = said.stdout.splitlines()
    assert head.split() == [
        "model", "requests", "prompt", "cached", "completion", "USD", "unfinished",
    ]  # fmt: skip
    assert [line.split()[0] for line in lines] == ["free", MODEL]
    assert "no price" in said.stderr
    assert "free" in said.stderr


def test_an_empty_ledger(tmp_path: Path) -> None:
    assert rows(tmp_path) == []


def test_a_folder_that_is_not_there_is_an_error_and_an_empty_one_is_not(tmp_path: Path) -> None:
    missing = usage(tmp_path / "typo")
    assert isinstance(missing.exception, ConfigError)
    assert f"{tmp_path}/typo: no such folder" in str(missing.exception)
    empty = usage(tmp_path)
    assert (empty.exit_code, empty.stderr) == (
        0, f"{tmp_path}/usage: no request has been recorded yet\n",
    )  # fmt: skip
