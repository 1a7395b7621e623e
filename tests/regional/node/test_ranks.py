"""Nodes of several real rank processes: ready together, lost together, nothing left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import psutil
import pytest

from core.engine import messages as m
from core.engine.cells import fill_blocks
from core.engine.plan import SequenceId
from core.errors import ConfigError, NodeLost
from core.parallel import Hosts, Plan
from regional.node.rank_link import PATIENCE, RANK_COMMAND, Patience
from regional.node.ranks import Ranks

CONFIG = m.RankConfig(
    node="n1",
    socket_fd=-1,
    engine="scripted",
    source="nowhere",
    context=512,
    kv_blocks=32,
    scripted=m.ScriptedConfig(end_id=7, layers=5, kv_heads=2, block_bytes=2560),
)
PROMPT = tuple(range(100, 140))


@asynccontextmanager
async def ranks(plan: Plan, patience: Patience = PATIENCE) -> AsyncIterator[Ranks]:
    """Started; afterwards no process and no name of shared memory is left."""
    before = set(os.listdir("/dev/shm")) if Path("/dev/shm").exists() else set()
    config = msgspec.structs.replace(CONFIG, plan=plan)
    group = await Ranks.start(config, command=RANK_COMMAND, patience=patience)
    try:
        yield group
    finally:
        await group.close()
        assert not [link.pid for link in group.links if psutil.pid_exists(link.pid)]
        if before:
            assert set(os.listdir("/dev/shm")) - before == set()


async def answer(group: Ranks, leader: int, prompt: tuple[int, ...] = PROMPT) -> list[int]:
    """Tokens of one sequence, run to its end."""
    heard: asyncio.Queue[m.RankMessage] = asyncio.Queue()
    group.links[leader].attach(heard.put_nowait)
    spec = m.SequenceSpec(token_ids=prompt, max_tokens=100, stop_ids=frozenset({7}))
    group.links[leader].send(m.Run(SequenceId("a.1"), spec))
    tokens: list[int] = []
    async with asyncio.timeout(30):
        while 7 not in tokens:
            message = await heard.get()
            if isinstance(message, m.SequenceFailed):
                raise AssertionError(message.message)
            if isinstance(message, m.Stepped):
                for output in message.outputs:
                    tokens += output.token_ids
    return tokens


def test_each_rank_holds_its_part_of_every_block() -> None:
    async def go() -> None:
        async with ranks(Plan(tp=2, pp=2)) as group:
            loaded = await group.ready()
            held = [one.ready.geometry.groups[0] for one in loaded]
            assert [(g.first_layer, g.layers, g.first_head, g.kv_heads) for g in held] == [
                (0, 2, 0, 1), (0, 2, 1, 1), (2, 3, 0, 1), (2, 3, 1, 1),
            ]  # fmt: skip
            assert sum(one.ready.geometry.pool_bytes for one in loaded) == 32 * 2560
            assert await answer(group, 0) == [*PROMPT, 7]
            for rank, one in enumerate(loaded):
                block = fill_blocks(held[rank], PROMPT)[0]
                assert block in bytes(one.memory), f"rank {rank} has not computed its slabs"

    asyncio.run(go())


def test_data_parallel_pools_answer_each_for_itself() -> None:
    async def go() -> None:
        async with ranks(Plan(pp=2, dp_attention=2)) as group:
            await group.ready()
            plan = group.plan
            assert [plan.leader(0), plan.leader(1)] == [0, 1]
            assert [plan.members(0), plan.members(1)] == [(0, 2), (1, 3)]
            both = await asyncio.gather(answer(group, 0), answer(group, 1, (1, 2, 3)))
            assert list(both) == [[*PROMPT, 7], [1, 2, 3, 7]]

    asyncio.run(go())


@pytest.mark.parametrize(
    ("victim", "number", "how"),
    [
        (0, signal.SIGKILL, "was killed by SIGKILL"),
        (2, signal.SIGKILL, "was killed by SIGKILL"),
        (1, signal.SIGSTOP, "was silent for 3 s and is killed"),
    ],
)
def test_a_rank_that_dies_or_hangs_is_named_and_takes_the_others_along(
    victim: int, number: signal.Signals, how: str, capfd: pytest.CaptureFixture[str]
) -> None:
    async def go() -> None:
        async with ranks(Plan(tp=2, pp=2)) as group:
            await group.ready()
            await answer(group, 0)
            pid = group.links[victim].pid
            began = time.monotonic()
            os.kill(pid, number)
            error = await group.lost()
            assert time.monotonic() - began < 20
            assert str(error) == f"rank {victim} of node n1 (pid {pid}) {how}"

    asyncio.run(go())
    assert capfd.readouterr().err == "", "who is not to blame says nothing"


def test_a_rank_that_dies_while_the_others_load_is_named() -> None:
    async def go() -> None:
        async with ranks(Plan(pp=3)) as group:
            group.links[2].kill()
            with pytest.raises(NodeLost, match=r"rank 2 of node n1 .* was killed by SIGKILL"):
                await group.ready()

    asyncio.run(go())


def test_a_rank_that_cannot_load_is_the_operators_to_know() -> None:
    async def go() -> None:
        config = msgspec.structs.replace(
            CONFIG, plan=Plan(pp=2), scripted=m.ScriptedConfig(block_bytes=1)
        )
        group = await Ranks.start(config)
        try:
            with pytest.raises(ConfigError, match="block_bytes"):
                await group.ready()
        finally:
            await group.close()

    asyncio.run(go())


def test_strangers_at_the_meeting_place_are_turned_away() -> None:
    """They know the port and a rank's number, and not the secret."""

    async def go() -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        config = msgspec.structs.replace(CONFIG, plan=Plan(pp=2))
        hosts = [Hosts(n, 2, "127.0.0.1", port, "the same on both") for n in (0, 1)]
        first = await Ranks.start(config, hosts[0])
        stranger = await _connected(port)
        hello = msgspec.msgpack.encode({"rank": 1, "secret": "guessed"})
        stranger.sendall(len(hello).to_bytes(4, "big") + hello)
        second = await Ranks.start(config, hosts[1])
        try:
            await asyncio.gather(first.ready(), second.ready())
            assert stranger.recv(1) == b""
            assert await answer(first, 0) == [*PROMPT, 7]
        finally:
            stranger.close()
            await asyncio.gather(first.close(), second.close())

    asyncio.run(go())


async def _connected(port: int) -> socket.socket:
    async with asyncio.timeout(30):
        while True:
            try:
                return socket.create_connection(("127.0.0.1", port))
            except OSError:
                await asyncio.sleep(0.02)  # rank 0 has not bound it yet
