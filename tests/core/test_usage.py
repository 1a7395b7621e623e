"""The usage ledger: whole lines, one day a file, each request once, money exact."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import msgspec
import pytest

from core.config_tenants import Price
from core.types import Usage
from core.usage import UsageReader, UsageRecord, UsageWriter

NOON = 1_796_040_000.0  # 2026-11-30, 12:00 UTC


def record(name: str = "r1", **changes: object) -> UsageRecord:
    base = UsageRecord(
        id=name, at=NOON, edge="here", tenant="acme", key="k", model="tiny", region="eu",
        dialect="chat", outcome="ok", prompt=10, cached=4, completion=3, complete=True,
    )  # fmt: skip
    return msgspec.structs.replace(base, **changes)


def test_there_and_back(tmp_path: Path) -> None:
    writer = UsageWriter(tmp_path, "here-1", clock=lambda: NOON)
    written = [record(f"r{i}", prompt=i) for i in range(5)]
    for one in written:
        writer.write(one)
    writer.close()
    assert UsageReader().read(tmp_path) == written
    assert [path.name for path in tmp_path.iterdir()] == ["2026-11-30"]


def test_a_new_day_is_a_new_file(tmp_path: Path) -> None:
    now = [NOON]
    writer = UsageWriter(tmp_path, "here-1", clock=lambda: now[0])
    writer.write(record("before"))
    now[0] += 43_200
    writer.write(record("after", at=now[0]))
    writer.close()
    reader = UsageReader()
    assert [one.id for one in reader.read(tmp_path, since="2026-12-01")] == ["after"]
    assert [one.id for one in reader.read(tmp_path, until="2026-11-30")] == ["before"]
    assert len(reader.read(tmp_path)) == 2


@pytest.mark.parametrize("cut", [2, 30, 120])
def test_a_torn_last_line_is_skipped_and_the_next_is_whole(tmp_path: Path, cut: int) -> None:
    writer = UsageWriter(tmp_path, "here-1", clock=lambda: NOON)
    writer.write(record("kept"))
    writer.write(record("torn"))
    writer.close()
    path = next(tmp_path.glob("*/*.jsonl"))
    path.write_bytes(path.read_bytes()[:-cut])
    again = UsageWriter(tmp_path, "here-1", clock=lambda: NOON)
    again.write(record("next"))
    again.close()
    reader = UsageReader()
    assert [one.id for one in reader.read(tmp_path)] == ["kept", "next"]
    assert reader.torn == 1


def test_every_prefix_of_a_line_is_torn(tmp_path: Path) -> None:
    """What lets a reader tell a torn line without a checksum."""
    line = msgspec.json.encode(record())
    for length in range(1, len(line)):
        with pytest.raises(msgspec.MsgspecError):
            msgspec.json.decode(line[:length], type=UsageRecord)


def test_a_request_counts_once_however_often_it_is_there(tmp_path: Path) -> None:
    for name, one in (
        ("a", record("r1", complete=False, prompt=1, outcome="cancelled")),
        ("b", record("r1", prompt=10)),
        ("c", record("r1", prompt=99)),
    ):
        writer = UsageWriter(tmp_path, name, clock=lambda: NOON)
        writer.write(one)
        writer.close()
    assert UsageReader().read(tmp_path) == [record("r1", prompt=10)]


def test_money_is_decimal() -> None:
    price = Price(input=Decimal("0.1"), cached_input=Decimal("0.02"), output=Decimal("0.3"))
    usage = Usage(prompt_tokens=10, completion_tokens=3, cached_tokens=4)
    assert price.of(usage) == Decimal("0.00000158")  # (6 × 0.1 + 4 × 0.02 + 3 × 0.3) / 1e6
    assert Price(input=Decimal(1)).of(usage) == Decimal("0.00001")  # cached at the input's price
