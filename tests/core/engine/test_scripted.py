from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec
import pytest

from core.engine.cells import Broken, fill_blocks, prove
from core.engine.messages import Begin, ScriptedConfig
from core.engine.plan import Row, SampleSpec, SequenceId, StepPlan
from core.engine.scripted import ScriptedRunner, scripted_geometry, shard
from core.errors import ConfigError
from core.kv.memory import attach
from core.parallel import Plan
from tests.core.engine.harness import GROUP, Front, rank_config, spec
from tests.core.engine.watched import END

S = SequenceId("s")
FIRST = SampleSpec(temperature=0, top_p=1, top_k=0, seed=0, choice=0, position=0)


def quiet(stage: str, fraction: float) -> None:
    assert 0 <= fraction <= 1


@pytest.fixture
def runner() -> Iterator[ScriptedRunner]:
    one = ScriptedRunner(rank_config(blocks=8))
    one.load(quiet)
    yield one
    one.close()


def ask(
    runner: ScriptedRunner, tokens: tuple[int, ...], start: int, blocks: tuple[int, ...],
    sample: SampleSpec | None = FIRST,
) -> tuple[int | None, str | None]:  # fmt: skip
    row = Row(S, tokens[start:], start, (blocks,), sample)
    (result,) = runner.submit(StepPlan(1, (row,))).result().rows
    return (result.token_ids or (None,))[0], result.error


@pytest.mark.parametrize("block_bytes", [256, 384, 4096, 368_640])
def test_geometry_has_the_wanted_block_size(block_bytes: int) -> None:
    geometry = scripted_geometry(ScriptedConfig(block_bytes=block_bytes), 3)
    assert geometry.groups[0].block_bytes == block_bytes
    assert geometry.pool_bytes == 3 * block_bytes


@pytest.mark.parametrize("block_bytes", [128, 300, 1000])
def test_a_block_that_does_not_hold_cells_is_refused(block_bytes: int) -> None:
    with pytest.raises(ConfigError, match=f"block_bytes is {block_bytes}"):
        scripted_geometry(ScriptedConfig(block_bytes=block_bytes), 3)


def test_the_prompt_is_played_back_out_of_the_blocks(runner: ScriptedRunner) -> None:
    tokens = tuple(range(10, 30))
    assert ask(runner, tokens, 0, (5, 2)) == (10, None)
    later = (*tokens, 10)
    second = SampleSpec(temperature=0, top_p=1, top_k=0, seed=0, choice=0, position=1)
    assert ask(runner, later, 20, (5, 2), second) == (11, None)


def test_control_ids_are_skipped_and_the_end_follows() -> None:
    config = msgspec.structs.replace(
        rank_config(blocks=8), scripted=ScriptedConfig(skip_ids=(7, 8), end_id=END)
    )
    runner = ScriptedRunner(config)
    runner.load(quiet)
    out: list[int] = []
    while not out or out[-1] != END:
        position = SampleSpec(temperature=0, top_p=1, top_k=0, seed=0, choice=0, position=len(out))
        token, error = ask(runner, (7, 20, END, 8, 21, *out), 0, (0,), position)
        assert error is None
        assert token is not None
        out.append(token)
    assert out == [20, 21, END]
    runner.close()


def test_the_fill_is_what_the_runner_writes(runner: ScriptedRunner) -> None:
    tokens = tuple(range(10, 45))
    assert ask(runner, tokens, 0, (1, 4, 6))[1] is None
    for block, content in zip((1, 4, 6), fill_blocks(GROUP, tokens), strict=True):
        assert runner._block(block) == content
    check, ids = prove(GROUP, fill_blocks(GROUP, tokens)[0], 0, 16, 0)
    assert ids == tokens[:16]
    assert check > 0


@pytest.mark.parametrize("cell", [0, 15])
@pytest.mark.parametrize("plane", [0, 1])
@pytest.mark.parametrize("byte", [0, 4, 8, 11])
@pytest.mark.parametrize("block", [0, 1, 2])
def test_one_changed_byte_anywhere_is_found(block: int, plane: int, cell: int, byte: int) -> None:
    runner = ScriptedRunner(rank_config(blocks=8, block_bytes=384))
    loaded = runner.load(quiet)
    tokens = tuple(range(10, 58))
    assert ask(runner, tokens, 0, (1, 4, 6))[1] is None
    assert ask(runner, (*tokens, 9), 48, (1, 4, 6, 7))[1] is None  # proved once, and remembered
    memory = attach(loaded.memory_fd, loaded.geometry.pool_bytes)
    at = (1, 4, 6)[block] * 384 + plane * 192 + cell * 12 + byte
    memory[at] ^= 1
    token, error = ask(runner, (*tokens, 9), 48, (1, 4, 6, 7))
    memory.close()
    runner.close()
    assert token is None
    assert error == f"the KV of position {16 * block + cell} is not what was computed there"


def test_a_slab_of_another_head_or_layer_is_found() -> None:
    """What a hand-over between two plans could mix up."""
    whole = scripted_geometry(ScriptedConfig(layers=2, kv_heads=2, block_bytes=1024), 1)
    tokens = tuple(range(10, 26))
    shards = [shard(whole, Plan(tp=2, pp=2), rank).groups[0] for rank in range(4)]
    blocks = [fill_blocks(group, tokens)[0] for group in shards]
    assert sum(map(len, blocks)) == len(fill_blocks(whole.groups[0], tokens)[0]) == 1024
    for one, block in enumerate(blocks):
        assert prove(shards[one], block, 0, 16, 0)[1] == tokens
        for other in {0, 1, 2, 3} - {one}:
            with pytest.raises(Broken, match="position 0"):
                prove(shards[other], block, 0, 16, 0)


def test_blocks_of_another_sequence_or_in_another_order_are_found(runner: ScriptedRunner) -> None:
    tokens, other = tuple(range(10, 42)), tuple(range(50, 82))
    assert ask(runner, tokens, 0, (0, 1))[1] is None
    assert ask(runner, other, 0, (2, 3))[1] is None
    assert ask(runner, (*tokens, 9), 32, (0, 1, 4))[1] is None
    for blocks, position in (((0, 3, 4), 16), ((1, 0, 4), 0), ((0, 5, 4), 16)):
        error = ask(runner, (*tokens, 9), 32, blocks)[1]
        assert error == f"the KV of position {position} is not what was computed there"


def test_a_row_that_does_not_sample_checks_what_it_continues(runner: ScriptedRunner) -> None:
    tokens = tuple(range(10, 42))
    assert ask(runner, tokens[:16], 0, (0,), None) == (None, None)
    assert ask(runner, tokens, 16, (0, 1), None) == (None, None)
    assert ask(runner, tokens, 16, (3, 1), None)[1] is not None


def test_pace_is_kept_for_steps_and_prompt_tokens() -> None:
    config = msgspec.structs.replace(
        rank_config(blocks=8), scripted=ScriptedConfig(step_s=0.02, prefill_tokens_per_s=1000)
    )
    runner = ScriptedRunner(config)
    loaded = runner.load(quiet)
    assert (loaded.prefill_tokens_per_s, loaded.decode_tokens_per_s) == (1000, 50)
    row = Row(S, tuple(range(30)), 0, ((0, 1),), FIRST)
    before = time.monotonic()
    handles = [runner.submit(StepPlan(n, (row,))) for n in (1, 2)]
    first, second = (handle.result() for handle in handles)
    assert time.monotonic() - before >= 0.1
    assert first.seconds >= 0.05
    assert second.number == 2
    runner.close()
    runner.close()


def test_kv_computed_by_one_engine_is_generated_from_by_another() -> None:
    """Prefill here, decode there: the blocks are copied, the text is the solo text."""
    config = rank_config(blocks=16)
    prefill, decode = Front(config), Front(config)
    try:
        wanted = spec(range(100, 170))
        reserved = decode.reserve("d", wanted).reserved
        assert reserved is not None
        prefill.prefill("p", wanted)
        prefill.settle()
        sequence = prefill.engine.scheduler.roster.get(SequenceId("p"))
        assert sequence is not None
        for index, block in reserved.fill[0].items():
            decode.write(block, prefill.read_block(sequence.table.groups[0][index]))
        prefill.release("p")
        decode.all["d"].stage = "queued"
        decode.all["d"].seen = 69
        decode.send(Begin(SequenceId("d")))
        decode.finish_all()
        assert decode.all["d"].computed == 1
    finally:
        prefill.close()
        decode.close()


def test_a_hand_over_that_missed_a_block_is_an_error_not_an_answer() -> None:
    front = Front(rank_config(blocks=16))
    try:
        reserved = front.reserve("d", spec(range(100, 170))).reserved
        assert reserved is not None
        content = fill_blocks(GROUP, tuple(range(100, 169)))
        for index, block in reserved.fill[0].items():
            if index != 2:
                front.write(block, content[index])
        front.all["d"].seen = 69
        front.all["d"].stage = "queued"
        front.send(Begin(SequenceId("d")))
        front.settle()
        assert front.all["d"].code == "internal_error"
        assert "position 32" in front.all["d"].message
        assert front.stats.blocks_used == 0
        assert front.engine.scheduler.blocks.cache.idle == 0  # nobody else gets them
    finally:
        front.close()
