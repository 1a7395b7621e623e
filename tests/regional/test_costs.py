"""The arithmetic of splitting, as a table, and the share of a node that has just come."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regional.cluster import HEAD_START_S, SLOW_START_S, share_of
from regional.costs import HANDOFF_S, alone_s, exposed_s, reading, split_s
from regional.kv_index import Held
from tests.regional.test_placement import DECODE, HEAVY, PREFILL


@pytest.mark.parametrize(
    ("transfer_s", "compute_s", "chunks", "seconds"),
    [
        (0.0, 1.0, 4, 0.0),
        (1.0, 4.0, 4, 0.25),  # the last chunk's part alone
        (4.0, 4.0, 4, 1.0),
        (8.0, 4.0, 4, 5.0),  # the link is what takes long: it starts after one chunk
        (1.0, 4.0, 1, 1.0),  # one chunk: nothing hides it
        (1.0, 0.0, 0, 1.0),  # nothing to compute
    ],
)
def test_what_of_a_transfer_shows(
    transfer_s: float, compute_s: float, chunks: float, seconds: float
) -> None:
    assert exposed_s(transfer_s, compute_s, chunks) == pytest.approx(seconds)


@given(*[st.floats(0, 100)] * 2, st.floats(0, 64))
def test_a_transfer_shows_neither_more_than_it_takes_nor_less_than_its_end(
    transfer_s: float, compute_s: float, chunks: float
) -> None:
    shown = exposed_s(transfer_s, compute_s, chunks)
    assert transfer_s / max(1.0, chunks) <= shown + 1e-9
    assert shown <= transfer_s + 1e-9


def test_running_streams_wait_for_what_their_node_reads() -> None:
    read = reading(DECODE, DECODE.offers[0], 1000, Held(), None, 0.0)
    assert alone_s(DECODE, read, next_stream=0) == pytest.approx(1.0)
    assert alone_s(DECODE, read) == pytest.approx(2.0)
    busy = replace(DECODE, sequences=3, prefill_tokens=500)
    assert alone_s(busy, read) == pytest.approx(0.5 + 5.0)


def test_a_split_waits_its_turn_reads_and_sends_what_is_missing() -> None:
    offer = HEAVY[0]
    held = Held(20, below=10)
    source = replace(PREFILL, prefill_tokens=300, prefills=1, kv_bytes_per_s=3.6e6)
    source = replace(source, tier_bytes_per_s=7.2e6)
    read = reading(source, offer, 1000, held, None, 0.0)
    assert (read.held_tokens, read.compute_tokens) == (320, 680)
    assert read.fetch_s == pytest.approx(0.5)
    seconds = split_s(source, read, missing_blocks=5, block_bytes=offer.block_bytes)
    shown = exposed_s(0.5, 0.68, 680 / 512)
    assert seconds == pytest.approx(0.3 + 0.5 + 0.68 + shown + HANDOFF_S)


def test_a_fresh_node_takes_a_growing_share() -> None:
    day = 86400.0
    shares = [share_of(age, day) for age in (0.0, 2.0, 5.0, 10.0, SLOW_START_S, day)]
    assert shares == sorted(shares)
    assert shares[0] == HEAD_START_S / (SLOW_START_S + HEAD_START_S)
    assert shares[-2:] == [1.0, 1.0]
    assert share_of(0.0, 0.0) == 1.0  # where all are fresh, all are equal
    assert share_of(0.5, 0.6) > 0.95
