"""A prefill node and a decode node with different plans are one node: the KV of one is handed to
the other, and the logits that follow are those of a model that was never split."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from core.engine.plan import Row
from core.kv.memory import attach
from core.kv.shards import PoolMemory, endpoints
from core.kv.transports.base import BlockMemory
from core.parallel import Plan
from tests.core.engine.ranks import Steppers, steppers
from tests.core.models.families import FAMILIES, VARIANTS, family_folder
from tests.core.models.tiny import forced, load, prompt, row, stepper

TOLERANCE = 1e-4
TOKENS = prompt(44, 5)
HERE, THERE = (1, 5, 2), (7, 3, 9)
"""The prompt's blocks in the pools of one node and of the other."""
FAMILY = {
    "llama3": FAMILIES["llama3"],
    "qwen3_moe": FAMILIES["qwen3_moe"],
    "deepseek_v3": FAMILIES["deepseek_v3"],
    "window": VARIANTS["qwen3, biases, tied, window"],
}
PAIRS = [
    ("llama3", Plan(tp=4), Plan(pp=3)),
    ("llama3", Plan(tp=2, pp=2), Plan(tp=4)),
    ("llama3", Plan(), Plan(tp=2)),
    ("qwen3_moe", Plan(tp=2, ep=2), Plan(dp_attention=2, ep=2)),
    ("deepseek_v3", Plan(tp=2), Plan(pp=2)),
    ("deepseek_v3", Plan(pp=3), Plan(tp=2, ep=2)),
    ("window", Plan(tp=2), Plan(pp=3)),
]


@pytest.mark.parametrize(("family", "reader", "writer"), PAIRS, ids=str)
def test_what_follows_a_hand_over_is_what_one_unsplit_rank_says(
    tmp_path: Path, family: str, reader: Plan, writer: Plan
) -> None:
    folder = family_folder(tmp_path, FAMILY[family])
    one = stepper(load(folder))
    groups = len(one.pool.groups)

    def rows(start: int, end: int, table: tuple[int, ...]) -> list[Row]:
        return [row(TOKENS[start:end], start, table, name="a", groups=groups)]

    forced(one, rows(0, 40, HERE))
    expected = [forced(one, rows(n, n + 1, HERE)) for n in range(40, 44)]
    with steppers(folder, reader) as source, steppers(folder, writer) as target:
        source.forced(rows(0, 40, HERE))
        hand_over(memory_of(source), memory_of(target), groups)
        for n, wanted in enumerate(expected, start=40):
            found = target.forced(rows(n, n + 1, THERE))
            torch.testing.assert_close(found, wanted, atol=TOLERANCE, rtol=0)


def memory_of(node: Steppers) -> PoolMemory:
    """Of its first pool, mapped as a node's front maps it."""
    return PoolMemory(
        {
            rank: BlockMemory(loaded.geometry, attach(loaded.memory_fd, loaded.geometry.pool_bytes))
            for rank in node.plan.members(0)
            for loaded in (node.loaded[rank],)
        }
    )


def hand_over(source: PoolMemory, target: PoolMemory, groups: int) -> None:
    fill = (dict(enumerate(THERE)),) * groups
    for endpoint in endpoints(target.geometries, "here", fill):
        runs = source.runs_for(endpoint)
        for index in endpoint.blocks:
            data = b"".join(source.parts(endpoint.group, HERE[index], runs))
            target.block(endpoint.rank, endpoint.group, THERE[index])[:] = data
