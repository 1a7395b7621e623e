"""The rank's end of the socket pair: order, and a front that is slow, away or gone."""

from __future__ import annotations

import socket

import pytest

from core.engine.link import Link
from core.engine.messages import (
    Abort,
    Command,
    Loading,
    RankMessage,
    Shutdown,
    command_decoder,
    rank_message_decoder,
)
from core.engine.plan import SequenceId
from core.errors import InternalError
from core.framing import encode_frame

PATIENCE_S = 30.0


def test_a_front_that_does_not_read_neither_blocks_the_rank_nor_fills_its_memory() -> None:
    ours, theirs = socket.socketpair()
    link = Link(theirs, outbox_bytes=1 << 20)
    loading = Loading("x" * 100_000, 0.5)
    with pytest.raises(InternalError, match="unread"):
        link.send(*[loading] * 100)
    ours.sendall(encode_frame(Shutdown()))
    assert link.receive(wait=True) == [Shutdown()]
    link.close()
    ours.close()


def test_what_a_slow_front_left_is_sent_in_order_while_the_link_waits() -> None:
    ours, theirs = socket.socketpair()
    ours.settimeout(PATIENCE_S)
    link = Link(theirs)
    sent = [Loading(f"{n} " + "x" * 50_000, n / 40) for n in range(40)]
    link.send(*sent)
    decoder = rank_message_decoder()
    heard: list[RankMessage] = []
    while len(heard) < len(sent):
        assert link.receive(wait=False) == []
        heard.extend(decoder.feed(ours.recv(1 << 16)))
    assert heard == sent
    ours.close()
    assert link.receive(wait=True) == []
    assert link.closed
    link.send(*sent)  # to nobody: no error, the loop looks at `closed`
    link.close()


def test_commands_of_one_read_come_together_and_in_order() -> None:
    ours, theirs = socket.socketpair()
    link = Link(theirs)
    commands: list[Command] = [Abort(SequenceId(str(n))) for n in range(500)]
    ours.sendall(b"".join(encode_frame(command) for command in commands))
    assert link.receive(wait=True) == commands
    assert list(command_decoder().feed(encode_frame(commands[0]))) == commands[:1]
    link.close()
    ours.close()
