"""A rank as its front meets it: a process, a socket pair and shared memory."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

import msgspec
import psutil
import pytest

from core.engine import rank as rank_module
from core.engine.messages import (
    PULSE_S,
    Abort,
    Begin,
    LoadFailed,
    Loading,
    Prefill,
    PrefillProgress,
    Pulse,
    RankConfig,
    Ready,
    Release,
    Reserve,
    Reserved,
    Run,
    SequenceFailed,
    Shutdown,
    Stepped,
)
from core.engine.plan import SequenceId
from core.engine.rank import EXIT_ENGINE, serve
from core.framing import encode_frame
from core.kv.memory import attach
from tests.core.engine.harness import rank_config, spec
from tests.core.engine.rank_process import complaint, rank_process
from tests.core.engine.watched import END

A, B = SequenceId("a"), SequenceId("b")


def test_a_rank_starts_quickly_serves_and_leaves_with_its_front() -> None:
    with rank_process(rank_config(blocks=32)) as rank:
        ready = rank.until(Ready)
        assert psutil.Process(rank.process.pid).cpu_times().user < 5  # a third of a second
        assert isinstance(ready, Ready)
        assert ready.context == 512
        assert any(isinstance(message, Loading) for message in rank.heard)
        (descriptor,) = rank.descriptors
        memory = attach(descriptor, ready.geometry.pool_bytes)
        assert memory[:16] == bytes(16)
        rank.say(Run(A, spec(range(100, 140))), Run(B, spec(range(200, 210))))
        assert rank.until_finished(A) == [*range(100, 140), END]
        assert rank.until_finished(B) == [*range(200, 210), END]
        assert memory[:] != bytes(len(memory))  # the KV is in the memory that we share
        memory.close()
        rank.sock.close()
        assert rank.exit_code() == 0
        assert complaint(rank) == ""


def test_kv_goes_from_one_rank_process_to_another_through_shared_memory() -> None:
    config = rank_config(blocks=16, step_tokens=32)
    with rank_process(config) as prefill, rank_process(config) as decode:
        ready = prefill.until(Ready)
        decode.until(Ready)
        assert isinstance(ready, Ready)
        wanted = spec(range(100, 170))
        decode.say(Reserve(A, wanted))
        reserved = decode.until(Reserved)
        assert isinstance(reserved, Reserved)
        prefill.say(Prefill(A, wanted))
        progress: list[PrefillProgress] = []
        while not (progress and progress[-1].complete):
            message = prefill.until(Stepped)
            assert isinstance(message, Stepped)
            progress.extend(message.progress)
        assert [one.ready_tokens for one in progress] == [32, 64, 69]
        source = attach(prefill.descriptors[0], ready.geometry.pool_bytes)
        target = attach(decode.descriptors[0], ready.geometry.pool_bytes)
        for index, block in reserved.fill[0].items():
            start, end = ready.geometry.block_span(0, progress[-1].blocks[0][index])
            into, until = ready.geometry.block_span(0, block)
            target[into:until] = source[start:end]
        source.close()
        target.close()
        prefill.say(Release(A))
        decode.say(Begin(A))
        assert decode.until_finished(A) == [*range(100, 170), END]


def test_an_abort_stops_a_sequence_and_the_gauges_say_so() -> None:  # B25
    with rank_process(rank_config(blocks=32, repeat=True, step_s=0.005)) as rank:
        rank.until(Ready)
        rank.say(Run(A, spec(range(100, 140), max_tokens=400)))
        while len(rank.tokens(A)[0]) < 3:
            assert rank.listen()
        rank.heard.clear()  # a report from before A ran would look like one from after it
        rank.say(Abort(A))
        while True:
            message = rank.until(Stepped)
            assert isinstance(message, Stepped)
            if message.stats.running == message.stats.blocks_used == 0:
                break
        assert rank.tokens(A)[1] is None
        rank.heard.clear()
        rank.say(Run(B, spec(range(10, 14), max_tokens=6)))
        assert rank.until_finished(B) == [10, 11, 12, 13, 10, 11]
        assert rank.tokens(A) == ([], None)


def test_commands_are_taken_while_a_step_computes() -> None:
    with rank_process(rank_config(blocks=32, repeat=True, step_s=60.0)) as rank:
        rank.until(Ready)
        rank.say(Run(A, spec(range(100, 140), max_tokens=400)))
        message = rank.until(Stepped)
        while not (isinstance(message, Stepped) and message.stats.running == 1):
            message = rank.until(Stepped)
        rank.say(Run(B, spec([-1])))
        assert isinstance(rank.until(SequenceFailed), SequenceFailed)
        rank.say(Reserve(B, spec(range(200, 240))))
        assert isinstance(rank.until(Reserved), Reserved)
        rank.say(Abort(A))
        while not (isinstance(message, Stepped) and message.stats.running == 0):
            message = rank.until(Stepped)
        assert message.stats.blocks_used == 6  # A's too, until the step is over


def test_a_deadline_is_kept_while_a_step_computes() -> None:
    with rank_process(rank_config(blocks=32, step_s=60.0)) as rank:
        rank.until(Ready)
        before = time.monotonic()
        rank.say(Run(A, spec(range(100, 140), deadline_s=0.3)))
        failed = rank.until(SequenceFailed)
        assert isinstance(failed, SequenceFailed)
        assert (failed.sequence, failed.code) == (A, "deadline_exceeded")
        assert 0.3 <= time.monotonic() - before < 30


def test_a_rank_that_has_nothing_to_say_says_so() -> None:
    """Idle or in a long step: whoever listens can tell it from one that hangs."""
    assert rank_config(blocks=1).pulse_s == PULSE_S
    config = msgspec.structs.replace(rank_config(blocks=32, step_s=60.0), pulse_s=0.3)
    began = time.monotonic()
    with rank_process(config) as rank:
        rank.until(Ready)
        rank.until(Pulse)
        rank.say(Run(A, spec(range(100, 140))))
        message = rank.until(Stepped)
        assert isinstance(message, Stepped)
        assert message.stats.running == 1
        for _ in range(2):
            rank.until(Pulse)
        most = 3 + (time.monotonic() - began) / 0.3
        assert sum(isinstance(one, Pulse) for one in rank.heard) + 3 <= most, "no flood of them"
        assert rank.tokens(A) == ([], None), "all came in the middle of the step"


def test_a_step_that_never_ends_ends_the_rank() -> None:
    """A deadlock in the thread that computes: the one that speaks goes on, so it has to look."""
    ours, theirs = socket.socketpair()
    config = msgspec.structs.replace(rank_config(blocks=32, step_s=3.0), pulse_s=0.1)
    ours.sendall(encode_frame(Run(A, spec(range(100, 140)))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_module, "STUCK_S", 0.2)
        assert serve(config, theirs) == EXIT_ENGINE
    ours.close()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_plans_ahead_and_guesses_change_no_text(depth: int) -> None:
    config = rank_config(blocks=64, repeat=True, step_s=0.001)
    with rank_process(msgspec.structs.replace(config, depth=depth)) as rank:
        rank.until(Ready)
        wanted = [spec(range(100 + 10 * n, 117 + 10 * n), max_tokens=120) for n in range(3)]
        rank.say(*(Run(SequenceId(str(n)), one) for n, one in enumerate(wanted)))
        for n, one in enumerate(wanted):
            assert rank.until_finished(str(n)) == [one.token_ids[i % 17] for i in range(120)]
        stats = [message.stats for message in rank.heard if isinstance(message, Stepped)][-1]
        assert stats.accepted_tokens > 100
        assert stats.generated_tokens == 360


def test_shutdown_ends_the_process_with_status_0() -> None:
    with rank_process(rank_config(blocks=8)) as rank:
        rank.until(Ready)
        rank.say(Shutdown())
        assert rank.exit_code() == 0
        assert not rank.listen()


def test_a_killed_rank_is_seen_as_the_end_of_its_stream() -> None:
    with rank_process(rank_config(blocks=32, repeat=True, step_s=0.005)) as rank:
        rank.until(Ready)
        rank.say(Run(A, spec(range(100, 140), max_tokens=400)))
        while len(rank.tokens(A)[0]) < 2:
            assert rank.listen()
        rank.process.send_signal(signal.SIGKILL)
        while rank.listen():
            pass
        assert rank.tokens(A)[1] is None
        assert rank.exit_code() == -signal.SIGKILL


def test_an_interrupt_is_the_fronts_business() -> None:
    with rank_process(rank_config(blocks=32)) as rank:
        rank.until(Ready)
        rank.process.send_signal(signal.SIGINT)
        rank.say(Run(A, spec(range(100, 104))))
        assert rank.until_finished(A) == [*range(100, 104), END]


def test_bad_ids_are_refused_and_neighbours_go_on() -> None:  # B10
    with rank_process(rank_config(blocks=32)) as rank:
        rank.until(Ready)
        rank.say(Run(A, spec(range(100, 140))), Run(B, spec([-1])))
        failed = rank.until(SequenceFailed)
        assert isinstance(failed, SequenceFailed)
        assert (failed.sequence, failed.code) == (B, "invalid_request")
        assert rank.until_finished(A) == [*range(100, 140), END]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (encode_frame(Run(A, spec([1])))[:6] + b"\xff" * 4000, "a frame"),
        (b"\x00\x00\x00\x05\xc1\xc1\xc1\xc1\xc1", "does not decode"),
        (encode_frame(Run(A, spec(range(50)))) * 2, "in use already"),
    ],
)
def test_what_is_no_command_ends_the_rank_with_a_line(data: bytes, says: str) -> None:
    with rank_process(rank_config(blocks=8, step_s=0.05)) as rank:
        rank.until(Ready)
        rank.sock.sendall(data)
        assert rank.exit_code() == 4
        text = complaint(rank)
        assert says in text
        assert text.count("\n") == 1


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (rank_config(blocks=8, block_bytes=100), "block_bytes is 100"),
        (msgspec.structs.replace(rank_config(blocks=8), engine="abacus"), "'abacus' is neither"),
    ],
)
def test_a_load_that_fails_is_told_in_a_sentence(config: RankConfig, says: str) -> None:
    with rank_process(config) as rank:
        failed = rank.until(LoadFailed)
        assert isinstance(failed, LoadFailed)
        assert says in failed.message
        assert rank.exit_code() == 3
        assert complaint(rank).count("\n") == 1


def test_a_rank_without_a_configuration_says_so() -> None:
    env = {key: value for key, value in os.environ.items() if key != "SKERRY_RANK"}
    done = subprocess.run(
        [sys.executable, "-m", "core.engine.rank"], env=env, capture_output=True, check=False
    )
    assert done.returncode == 2
    assert b"SKERRY_RANK" in done.stderr
    assert done.stderr.count(b"\n") == 1
