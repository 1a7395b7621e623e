"""A prompt's KV on its way while it is computed: several endpoints, some slower than others, pieces
in any order. Decode may begin when every endpoint has verified every piece, and not before."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from core.kv.handoff import Failure, Incoming, Outgoing, Phase, SendPhase
from core.kv.ticket import Endpoint, PieceKey, Ticket, model_digest, new_ticket_id

MODEL = model_digest(b"model")
GROUPS = 2


def ticket_of(hosts: list[list[int]], blocks: tuple[int, ...], window: tuple[int, ...]) -> Ticket:
    """Each host has some ranks, each rank a part of both groups; the second wants `window`."""
    ends = [
        Endpoint(
            rank=rank, address=f"host {number}", group=group, layers=1, heads=1, dtype="uint8",
            block_bytes=64 * (group + 1), blocks=window if group else blocks,
        )
        for number, ranks in enumerate(hosts)
        for rank in ranks
        for group in range(GROUPS)
    ]  # fmt: skip
    return Ticket(new_ticket_id(), 7, 30.0, tuple(ends))


def part(ticket: Ticket, host: int) -> Ticket:
    ends = tuple(one for one in ticket.endpoints if one.address == f"host {host}")
    return replace(ticket, endpoints=ends)


def chunks(dice: random.Random, total: int) -> Iterator[int]:
    ready = 0
    while ready < total:
        ready = min(total, ready + dice.randint(1, 40))
        yield ready


@pytest.mark.parametrize("hosts", [[[0]], [[0, 1]], [[0], [1]], [[0, 1], [2]], [[0], [1], [2]]])
def test_decode_begins_when_every_endpoint_has_every_piece(hosts: list[list[int]]) -> None:
    complete = 0
    for seed in range(60):
        try:
            complete += hand_over(random.Random(seed), hosts)
        except AssertionError as error:
            error.add_note(f"seed {seed}")
            raise
    assert 0 < complete <= 60


def hand_over(dice: random.Random, hosts: list[list[int]]) -> bool:
    """One prompt; False when its last host failed."""
    prompt = dice.randint(2, 130)
    blocks = tuple(range(-(-(prompt - 1) // 16)))
    cached = dice.randrange(len(blocks))
    ticket = ticket_of(hosts, blocks[cached:], blocks[dice.randrange(cached, len(blocks)) :])
    receivers = [Incoming(part(ticket, host), MODEL, now=0.0) for host in range(len(hosts))]
    at = {rank: host for host, ranks in enumerate(hosts) for rank in ranks}
    outgoing = Outgoing(ticket, prompt_tokens=prompt, now=0.0)
    for one in receivers:
        assert one.hello(ticket.id, ticket.generation, MODEL, now=0.0) is None
    outgoing.opened(now=0.0)

    under_way: list[list[PieceKey]] = [[] for _ in hosts]
    given_out: list[PieceKey] = []

    def arrive(host: int) -> None:
        """Some piece, in any order, gets there."""
        key = under_way[host].pop(dice.randrange(len(under_way[host])))
        assert receivers[host].begin(key, 64 * (key.group + 1), now=0.0) is None
        assert receivers[host].end_piece(key, intact=True, now=0.0) is None
        assert receivers[host].phase is Phase.RECEIVING, "nobody has said the end"

    for ready in chunks(dice, prompt - 1):
        complete = ready == prompt - 1
        due = outgoing.due(ready, complete=complete)
        assert all(complete or (key.block + 1) * 16 <= ready for key in due), "a block's rest"
        given_out += due
        for key in due:
            under_way[at[key.rank]].append(key)
        outgoing.sent(due, now=0.0)
        slow = dice.choice([None, *range(len(hosts))])
        for host in range(len(hosts)):
            for _ in range(0 if host == slow else dice.randint(0, len(under_way[host]))):
                arrive(host)
    outgoing.ended()
    wanted = [key for one in ticket.endpoints for key in one.pieces()]
    assert sorted(given_out) == sorted(wanted), "each piece once"

    order = dice.sample(range(len(hosts)), len(hosts))
    for number, host in enumerate(order):
        assert not all(one.phase is Phase.READY for one in receivers)
        if number == len(order) - 1 and under_way[host] and dice.random() < 0.3:
            receivers[host].fail(Failure.PEER_LOST)
            first = min(key.block for key in under_way[host])
            assert receivers[host].first_missing == first
            return False
        while under_way[host]:
            arrive(host)
        assert receivers[host].end(prompt - 1, now=0.0) is None
        assert receivers[host].phase is Phase.READY
        assert receivers[host].first_missing is None
    outgoing.acknowledged()
    assert outgoing.phase is SendPhase.DONE
    assert sum(one.received_bytes for one in receivers) == outgoing.sent_bytes
    return True
