"""The bounds that sharding is measured against, and how bytes on connections are read off."""

from __future__ import annotations

import socket
import sys

import pytest

from loadtest.sharding import least, traffic
from loadtest.sharding.least import Shape, Span

SHAPE = Shape(layers=2, hidden=8, item_bytes=4)


def test_the_least_of_a_tensor_parallel_token_by_hand() -> None:
    """Two ranks: each of the four sums moves one state each way; the embedding's row moves once."""
    assert least.tensor_parallel(SHAPE, 2, tokens=1, drawn=0) == 4 * 2 * 32 + 32
    assert least.tensor_parallel(SHAPE, 2, tokens=0, drawn=3) == 3 * 8
    assert least.tensor_parallel(SHAPE, 1, tokens=9, drawn=9) == 0


def test_a_pipeline_moves_each_state_once_a_border() -> None:
    assert least.pipeline(SHAPE, 3, tokens=5) == 5 * 2 * 32
    assert least.pipeline(SHAPE, 1, tokens=5) == 0


def test_a_perfect_pipeline_has_no_stretch() -> None:
    """Two equal stages, ten steps of one second each: eleven seconds, of which each works ten."""
    whole = Span((10.0, 10.0), 11.0)
    assert whole.stretch(10) == pytest.approx(1.0)
    assert whole.imbalance == 1.0
    late = Span((10.0, 10.0), 13.2)
    assert late.stretch(10) == pytest.approx(1.2)


def test_uneven_stages_show_twice() -> None:
    uneven = Span((12.0, 8.0), 12.0 * 11 / 10)
    assert uneven.imbalance == pytest.approx(1.2)
    assert uneven.stretch(10) == pytest.approx(1.2)


def test_a_span_lies_between_two_readings() -> None:
    """A bubble of a half: the stages stood still as long as they worked."""
    between = least.span(((1.0, 1.0), 0.5), ((4.0, 2.0), 0.25))
    assert between.stages == (3.0, 1.0)
    assert between.active_s == pytest.approx(4.0 - 2.0)
    assert least.span(((), 0.0), ((4.0, 2.0), 0.25)).active_s == pytest.approx(4.0)


LISTING = """\
0 0 127.0.0.1:1 127.0.0.1:2 users:(("python",pid=7,fd=3)) bbr rto:204 bytes_sent:100 bytes_acked:9
0 0 127.0.0.1:2 127.0.0.1:1 users:(("python",pid=77,fd=3)) bbr bytes_sent:20 bytes_received:4
0 0 127.0.0.1:5 127.0.0.1:6 users:(("python",pid=8,fd=3),("python",pid=9,fd=3)) bbr bytes_sent:3
0 0 127.0.0.1:6 127.0.0.1:5 users:(("python",pid=8,fd=4)) bbr rto:204
"""


def test_bytes_are_counted_for_the_asked_processes_alone() -> None:
    assert traffic.count(LISTING, {7}) == 100
    assert traffic.count(LISTING, {7, 9}) == 103
    assert traffic.count(LISTING, {1}) is None
    assert traffic.count("", {7}) is None


@pytest.mark.skipif(sys.platform != "linux", reason="ss is Linux's")
def test_what_a_connection_carries_is_seen() -> None:
    import os

    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
        with one, other:
            before = traffic.sent_bytes({os.getpid()})
            one.sendall(bytes(12345))
            assert len(other.recv(12345, socket.MSG_WAITALL)) == 12345
            after = traffic.sent_bytes({os.getpid()})
    if after is None:
        pytest.skip("no ss, or one that does not tell bytes")
    assert after - (before or 0) == 12345
