"""Connections between ranks: who may come, what arrives, how one that has gone is noticed."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import pytest

from core.engine.crew import Peer, dial, gather, listen, own_address
from core.errors import NodeLost
from tests.listeners import Failing

SECRET = "of the node"
HERE = "127.0.0.1"


@contextmanager
def star(*ranks: int) -> Iterator[tuple[dict[int, Peer], dict[int, Peer]]]:
    """The middle's connections, by rank, and each rank's own to the middle."""
    with listen(HERE) as listener, ThreadPoolExecutor(1) as pool:
        gathering = pool.submit(gather, SECRET, listener, ranks, within_s=10)
        address = (HERE, listener.getsockname()[1])
        others = {rank: dial(address, 0, rank, SECRET, within_s=10) for rank in ranks}
        middle = gathering.result()
    try:
        yield middle, others
    finally:
        for peer in (*middle.values(), *others.values()):
            peer.close()


@pytest.mark.parametrize("size", [0, 1, 511, 512, 1 << 20])
def test_messages_arrive_whole_and_in_order(size: int) -> None:
    with star(2, 1) as (middle, others):
        assert list(middle) == [1, 2]
        for n in range(3):
            middle[1].say(bytes([n]) * size)
        others[2].say(b"from two")
        assert [others[1].hear() for _ in range(3)] == [bytes([n]) * size for n in range(3)]
        assert middle[2].hear() == b"from two"


def test_plans_that_are_much_alike_are_packed() -> None:
    """What is on the wire is counted against the least that a plan needs."""
    with listen(HERE) as listener:
        sock = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    with theirs:
        peer = Peer(1, sock)
        peer.say(b'{"sequence": "1.1", "token_ids": [7]}' * 100)
        peer.close()
        assert 0 < len(theirs.recv(1 << 16, socket.MSG_WAITALL)) < 200


def test_a_message_to_one_who_has_gone_and_one_that_never_comes() -> None:
    with star(1, 2) as (middle, others):
        others[1].close()
        with pytest.raises(NodeLost, match="rank 1 has gone"):
            middle[1].hear()
        with pytest.raises(NodeLost, match="rank 1 has gone"):
            say_until_refused(middle[1])


def say_until_refused(peer: Peer) -> None:
    for _ in range(100):  # the first may still fit into the socket
        peer.say(os.urandom(1 << 16))


def test_closing_wakes_the_thread_that_hears() -> None:
    with star(1) as (middle, _), ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(middle[1].hear)
        middle[1].close()
        with pytest.raises(NodeLost):
            waiting.result(30)


def test_strangers_are_turned_away_and_do_not_hold_up_the_others() -> None:
    with listen(HERE) as listener, ThreadPoolExecutor(1) as pool:
        gathering = pool.submit(gather, SECRET, listener, [1], within_s=10)
        address = (HERE, listener.getsockname()[1])
        wrong = dial(address, 0, 1, "guessed")
        unknown = dial(address, 0, 7, SECRET)
        noise = socket.create_connection(address)
        noise.sendall(b"\xff" * 64)
        right = dial(address, 0, 1, SECRET)
        found = gathering.result()
        for stranger in (wrong, unknown):
            with pytest.raises(NodeLost):
                stranger.hear()
        with suppress(ConnectionResetError):  # what it said was never read
            assert noise.recv(1) == b""
        found[1].say(b"welcome")
        assert right.hear() == b"welcome"
        for one in (right, wrong, unknown, found[1]):
            one.close()
        noise.close()


def test_without_room_for_a_rank_it_is_taken_in_a_moment_later() -> None:
    with Failing.of(listen(HERE), errno.EMFILE, times=2) as listener, ThreadPoolExecutor(1) as pool:
        gathering = pool.submit(gather, SECRET, listener, [1], within_s=10)
        one = dial((HERE, listener.getsockname()[1]), 0, 1, SECRET, within_s=10)
        found = gathering.result()
        assert listener.failed == 2
        found[1].close()
        one.close()


def test_a_rank_for_which_there_is_never_room_does_not_come() -> None:
    with (
        Failing.of(listen(HERE), errno.EMFILE, times=1 << 30) as listener,
        pytest.raises(NodeLost, match=r"rank 1 did not come: .*open files"),
    ):
        gather(SECRET, listener, [1], within_s=1.0)


def test_a_rank_that_does_not_come_is_named() -> None:
    with listen(HERE) as listener:
        with pytest.raises(NodeLost, match="rank 3, 4 did not come"):
            gather(SECRET, listener, [4, 3], within_s=0.1)
        port = listener.getsockname()[1]
    with pytest.raises(NodeLost, match=f"rank 0 is not at {HERE}:{port}"):
        dial((HERE, port), 0, 1, SECRET, within_s=0.1)


def test_ones_own_address_is_that_of_the_way_there() -> None:
    assert own_address((HERE, 9)) == HERE
