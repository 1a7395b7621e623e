"""The contestants of a run, and what comes out of it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from xxhash import xxh3_64_intdigest

from core.kv.transports.base import SHARED_MEMORY, TCP
from loadtest.bench.figures import Figure
from loadtest.kv import __main__ as command
from loadtest.kv import exposed, transfers
from loadtest.kv.transfers import MEMCPY, MOONCAKE, RAW, Rates, WrongBytes


def test_each_ratio_is_the_median_of_the_rounds_own() -> None:
    found = Rates(
        {MEMCPY: [10.0, 2.0, 10.0], SHARED_MEMORY: [5.0, 1.8, 7.0], RAW: [4.0, 4.0, 4.0],
         TCP: [3.0, 2.0, 3.6]},
    )  # fmt: skip
    shared, tcp = transfers.figures(found)  # no Mooncake, no figure against it
    assert (shared.value, shared.verdict) == (0.7, "target met")
    assert (tcp.value, tcp.verdict) == (0.75, "floor met")
    found.rates[MOONCAKE] = [4.0, 4.0, 4.0]
    assert transfers.figures(found)[2].verdict == "BELOW THE FLOOR"


def test_everybody_moves_the_same_bytes_between_processes() -> None:
    said: list[str] = []
    found = transfers.measure(1, size=4 << 20, say=said.append)
    rates = {name: len(numbers) for name, numbers in found.rates.items()}
    assert rates.pop(MOONCAKE, 0) + len(found.missing) == 1
    assert rates == {MEMCPY: 1, SHARED_MEMORY: 1, RAW: 1, TCP: 1}
    assert all(rate > 0 for numbers in found.rates.values() for rate in numbers)
    assert len(said) == 1


def test_wrong_bytes_are_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "xxh3_64_intdigest", lambda data: xxh3_64_intdigest(data) ^ 1)
    with pytest.raises(WrongBytes, match=SHARED_MEMORY):
        transfers.measure(1, size=1 << 20, say=lambda _: None)


@pytest.mark.parametrize(("value", "status"), [(0.1, 0), (0.5, 1)])
def test_a_missed_floor_is_the_exit_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float, status: int
) -> None:
    figure = Figure("exposed", value, "×", 0.2, 0.35)
    monkeypatch.setattr(command, "PROJECT", tmp_path)
    monkeypatch.setattr(exposed, "figures", lambda source, *, quick: [figure])
    assert command.main(["--only", "exposed"]) == status
    said = msgspec.json.decode((tmp_path / "build" / "bench" / "kv.json").read_bytes())
    assert [one["value"] for one in said["figures"]] == [value]
    assert "exposed" in (tmp_path / "build" / "bench" / "kv.svg").read_text()
