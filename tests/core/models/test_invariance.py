"""Bit for bit: a sequence's logits depend on nothing but the sequence (B14), in native code.

On a model in GGUF's 4-bit blocks with KV in bf16, as the product runs it, with heads of 64 (the
vector path) and of 16 (the plain one), with a window and without, and on one kept in floats.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from core.engine import batch
from core.models.decoder import Decoder
from kernels.ops import TorchOps
from tests.core.models.tiny import (
    Config,
    forced,
    load,
    prompt,
    random_state,
    row,
    stepper,
    tiny_config,
    write_folder,
    write_gguf,
)

HEADS_OF_64: Config = {"head_dim": 64, "num_attention_heads": 6, "num_key_value_heads": 2}
WINDOW: Config = {
    "model_type": "qwen2",
    "use_sliding_window": True,
    "sliding_window": 50,
    "max_window_layers": 1,
}
LENGTH = 150


def make(
    kind: str, path: Path, *, dtype: torch.dtype = torch.bfloat16, threads: int = 1
) -> Decoder:
    changes = {"blocks": HEADS_OF_64, "window": HEADS_OF_64 | WINDOW}.get(kind, {})
    config = tiny_config(**changes)
    state = random_state(config)
    if kind in ("window", "floats"):
        source = write_folder(path / kind, config, state)
    else:
        path.mkdir(exist_ok=True)
        source = write_gguf(path / f"{kind}.gguf", config, state, "Q4_1")
    decoder = load(source, dtype, threads=threads)
    if isinstance(decoder.ops, TorchOps):
        pytest.skip("native kernels are not built")
    return decoder


KINDS = ["blocks", "small heads", "window", "floats"]


@pytest.fixture(scope="module", params=KINDS)
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return make(request.param, tmp_path_factory.mktemp("model"))


def chunked(decoder: Decoder, ids: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """Logits of all tokens, computed in chunks of `sizes`, the last one repeated."""
    machine = stepper(decoder)
    groups, at, parts, left = len(machine.pool.groups), 0, [], list(sizes)
    while at < len(ids):
        size = left.pop(0) if len(left) > 1 else left[0]
        own = ids[at : at + size]
        parts.append(forced(machine, [row(own, at, range(12), groups=groups)]))
        at += size
    return torch.cat(parts)


@pytest.mark.parametrize("sizes", [(1,), (7,), (64,), (16, 1, 3, 100, 9), (LENGTH - 1, 1)])
def test_chunks_of_any_size_give_the_same_bits(decoder: Decoder, sizes: Sequence[int]) -> None:
    ids = prompt(LENGTH)
    assert torch.equal(chunked(decoder, ids, sizes), chunked(decoder, ids, (512,)))


def test_company_changes_no_bit(decoder: Decoder) -> None:
    """One token beside 31 others: decode rows, short rows as for drafts, and prompts."""
    machine = stepper(decoder, blocks=512)
    groups = len(machine.pool.groups)
    rows, alone = [], []
    for number in range(32):
        before, new = number * 5, (1, 1, 1, 5, 40)[number % 5]
        table = range(number * 16, number * 16 + 16)
        ids = prompt(before + new, number)
        if before:
            forced(machine, [row(ids[:before], 0, table, groups=groups)])
        rows.append(row(ids[before:], before, table, groups=groups, name=str(number)))
        alone.append(forced(machine, [rows[-1]]))
    order = batch.order(rows)
    expected = torch.cat([alone[rows.index(one)] for one in order])
    assert torch.equal(forced(machine, order), expected)


def test_a_cached_prefix_gives_the_same_bits(decoder: Decoder) -> None:
    """Blocks that another sequence filled, by other chunks, in other places (B15)."""
    ids = prompt(LENGTH)
    machine = stepper(decoder)
    groups = len(machine.pool.groups)
    whole = forced(machine, [row(ids, 0, range(10), groups=groups)])
    table = (40, 33, 60, 12, 13, 50, 20, 21, 22, 23)
    for cached in (16, 64, 144):
        other = stepper(decoder)
        for at in range(0, cached, 16):
            forced(other, [row(ids[at : at + 16], at, table, groups=groups)])
        rest = forced(other, [row(ids[cached:], cached, table, groups=groups)])
        assert torch.equal(rest, whole[cached:])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_threads_change_no_bit(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    ids = prompt(LENGTH)
    found = [
        chunked(make(kind, tmp_path, dtype=dtype, threads=threads), ids, (100, 1))
        for threads in (1, 2)
    ]
    assert torch.equal(*found)
    assert found[0].isfinite().all()
