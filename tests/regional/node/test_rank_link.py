"""Real rank processes: they start, they die in every way, and they never outlive the front."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import msgspec
import psutil
import pytest

from core.engine import messages as m
from core.engine.plan import SequenceId
from core.errors import ConfigError, NodeLost
from regional.node.rank_link import (
    PATIENCE,
    RANK_COMMAND,
    Patience,
    RankLink,
    rank_environment,
)

CONFIG = m.RankConfig(
    node="n1",
    socket_fd=-1,
    engine="scripted",
    source="nowhere",
    context=512,
    kv_blocks=32,
    scripted=m.ScriptedConfig(end_id=7),
)
PULSING = msgspec.structs.replace(CONFIG, pulse_s=0.2)
HASTY = Patience(exit_s=0.3)


@asynccontextmanager
async def rank(
    command: Sequence[str] = RANK_COMMAND,
    config: m.RankConfig = CONFIG,
    patience: Patience = PATIENCE,
) -> AsyncIterator[RankLink]:
    link = await RankLink.start(config, command=command, patience=patience)
    try:
        yield link
    finally:
        await link.close()
        assert not psutil.pid_exists(link.pid)


def script(code: str) -> tuple[str, ...]:
    """A rank of a few lines; `sock` is its end of the pair."""
    head = (
        "import json, os, signal, socket, sys, time\n"
        "sock = socket.socket(fileno=json.loads(os.environ['SKERRY_RANK'])['socket_fd'])\n"
    )
    return (sys.executable, "-c", head + code)


def test_a_rank_loads_shares_its_memory_and_answers() -> None:
    async def go() -> None:
        async with rank() as link:
            loaded = await link.ready()
            assert loaded.ready.geometry.blocks[0] == 32
            assert len(loaded.memory) == loaded.ready.geometry.pool_bytes
            heard: asyncio.Queue[m.RankMessage] = asyncio.Queue()
            link.attach(heard.put_nowait)
            spec = m.SequenceSpec(token_ids=(1, 2, 3), max_tokens=9, stop_ids=frozenset({7}))
            link.send(m.Run(SequenceId("a.1"), spec))
            tokens: list[int] = []
            async with asyncio.timeout(30):
                while 7 not in tokens:
                    message = await heard.get()
                    if isinstance(message, m.Stepped):
                        for output in message.outputs:
                            tokens += output.token_ids
            assert tokens == [1, 2, 3, 7]
            assert any(loaded.memory), "the prompt's KV lies in the memory that we share"
            lost = asyncio.create_task(link.lost())
            await link.close()
            assert str(await lost).endswith("exited with code 0")

    asyncio.run(go())


def test_a_killed_rank_is_named_with_its_signal() -> None:
    async def go() -> None:
        async with rank() as link:
            await link.ready()
            began = time.monotonic()
            os.kill(link.pid, signal.SIGKILL)
            async with asyncio.timeout(30):
                error = await link.lost()
            assert time.monotonic() - began < 20
            assert isinstance(error, NodeLost)
            assert f"rank 0 of node n1 (pid {link.pid}) was killed by SIGKILL" in str(error)

    asyncio.run(go())


def test_a_rank_that_hangs_is_killed_and_named() -> None:
    """A stopped process, or one in a deadlock, keeps its socket: only its silence tells."""

    async def go() -> None:
        patience = Patience(serving_s=2.0, look_s=0.1)
        async with rank(config=PULSING, patience=patience) as link:
            await link.ready()
            with pytest.raises(TimeoutError):  # idle, it pulses: patience is never at its end
                async with asyncio.timeout(3.0):
                    await link.lost()
            os.kill(link.pid, signal.SIGSTOP)
            async with asyncio.timeout(30):
                error = await link.lost()
            assert f"rank 0 of node n1 (pid {link.pid}) was silent for 2 s" in str(error)

    asyncio.run(go())


def test_a_rank_that_hangs_while_it_loads_has_a_limit_of_its_own() -> None:
    async def go() -> None:
        patience = Patience(serving_s=0.1, loading_s=1.0, look_s=0.1)
        async with rank(script("time.sleep(60)"), patience=patience) as link:
            began = time.monotonic()
            async with asyncio.timeout(30):
                with pytest.raises(NodeLost, match="silent for 1 s"):
                    await link.ready()
            assert time.monotonic() - began >= 1.0

    asyncio.run(go())


def test_a_front_that_was_frozen_does_not_blame_its_rank() -> None:
    async def go() -> None:
        async with rank(config=PULSING, patience=Patience(serving_s=2.0, look_s=0.1)) as link:
            await link.ready()
            os.kill(link.pid, signal.SIGSTOP)  # both are, as when a laptop sleeps
            time.sleep(2.2)  # our loop stands still
            await asyncio.sleep(0.3)  # we wake first, and look
            os.kill(link.pid, signal.SIGCONT)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(2.2):
                    await link.lost()

    asyncio.run(go())


def test_a_rank_that_gives_up_is_quoted(capfd: pytest.CaptureFixture[str]) -> None:
    async def go() -> None:
        code = "print('first', file=sys.stderr); print('out of luck', file=sys.stderr); sys.exit(4)"
        async with rank(script(code)) as link:
            async with asyncio.timeout(30):
                with pytest.raises(NodeLost, match="exited with code 4; its last words: out of lu"):
                    await link.ready()

    asyncio.run(go())
    assert "first" in capfd.readouterr().err, "its lines go on to our own stderr"


@pytest.mark.parametrize(
    "code",
    [
        "sock.close(); time.sleep(60)",
        "sock.sendall(b'\\xff' * 64); time.sleep(60)",
        "sock.sendall(b'\\0\\0\\0\\1\\xc1'); time.sleep(60)",
    ],
    ids=["closes its socket", "huge frame", "no msgpack"],
)
def test_a_rank_that_talks_nonsense_or_hangs_up_is_ended(code: str) -> None:
    async def go() -> None:
        async with rank(script(code), patience=HASTY) as link:
            async with asyncio.timeout(30):
                with pytest.raises(NodeLost, match="SIGKILL"):
                    await link.ready()

    asyncio.run(go())


def test_memory_that_cannot_be_mapped_ends_the_rank() -> None:
    code = (
        "from core.engine.messages import Ready\n"
        "from core.framing import encode_frame\n"
        "from core.kv.geometry import KVGeometry, KVGroup\n"
        "from core.kv.memory import allocate\n"
        "group = KVGroup(name='full', layers=1, kv_heads=1, head_dim=8, dtype='float32')\n"
        "ready = Ready(fingerprint=b'f', context=1, vocab_size=1, max_sequences=1,\n"
        "    geometry=KVGeometry(groups=(group,), blocks=(1 << 20,)), max_step_tokens=1,\n"
        "    prefill_tokens_per_s=1, decode_tokens_per_s=1)\n"
        "socket.send_fds(sock, [encode_frame(ready)], [allocate(4096)[0]])\n"
        "time.sleep(60)\n"
    )

    async def go() -> None:
        async with rank(script(code), patience=HASTY) as link:
            async with asyncio.timeout(30):
                with pytest.raises(NodeLost, match="SIGKILL"):
                    await link.ready()

    asyncio.run(go())


def test_a_fault_of_ours_in_the_middle_of_its_words_ends_the_rank(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What was lost with the message is not known: better a lost node than answers that hang."""

    async def go() -> None:
        async with rank() as link:
            await link.ready()

            def fail(_: m.RankMessage) -> None:
                raise LookupError("a fault of ours")

            link.attach(fail)
            link.send(m.Run(SequenceId("a.1"), m.SequenceSpec(token_ids=(1, 2), max_tokens=1)))
            async with asyncio.timeout(30):
                assert isinstance(await link.lost(), NodeLost)

    asyncio.run(go())
    assert "LookupError" in caplog.text


def test_a_model_that_does_not_load_is_the_operators_to_know() -> None:
    async def go() -> None:
        config = m.RankConfig(
            node="n1", socket_fd=-1, engine="scripted", source="x", kv_blocks=4,
            scripted=m.ScriptedConfig(block_bytes=1),
        )  # fmt: skip
        async with rank(config=config) as link:
            async with asyncio.timeout(30):
                with pytest.raises(ConfigError, match="block_bytes"):
                    await link.ready()

    asyncio.run(go())


def test_a_rank_that_ignores_every_request_to_stop_is_killed() -> None:
    async def go() -> None:
        code = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: time.sleep(1)"
        began = time.monotonic()
        async with rank(script(code), patience=HASTY):
            pass
        assert time.monotonic() - began < 20

    asyncio.run(go())


def test_more_commands_than_the_socket_holds_all_arrive() -> None:
    async def go() -> None:
        async with rank() as link:
            await link.ready()
            done = asyncio.Event()
            seen: set[str] = set()

            def hear(message: m.RankMessage) -> None:
                if isinstance(message, m.SequenceFailed):
                    seen.add(message.sequence)
                if len(seen) == 200:
                    done.set()

            link.attach(hear)
            spec = m.SequenceSpec(token_ids=tuple(range(5000)), max_tokens=1)
            for number in range(200):  # 3 MB; every prompt is longer than the context
                link.send(m.Run(SequenceId(f"{number}.1"), spec))
            async with asyncio.timeout(30):
                await done.wait()
            assert seen == {f"{number}.1" for number in range(200)}

    asyncio.run(go())


def test_the_environment_keeps_waiting_threads_from_spinning() -> None:
    environment = rank_environment(CONFIG, {"PATH": "/bin", "OMP_NUM_THREADS": "64"})
    assert environment["PATH"] == "/bin"
    assert environment["OMP_NUM_THREADS"] == "1"
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE"
