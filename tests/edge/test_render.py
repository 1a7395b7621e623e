"""Where the text of a stream lies among its chunks."""

from __future__ import annotations

import json

import pytest

from core.events import Delta, Done, Finish
from core.types import FinishReason, Usage
from edge.api.openai_render import Shown, TextRenderer

USAGE = Usage(prompt_tokens=1, completion_tokens=2)
LENGTH = Finish(reason=FinishReason.LENGTH)


def streamed(*steps: list[Shown]) -> list[tuple[int, str, str | None]]:
    renderer = TextRenderer(request_id="r", model="m", created=1, include_usage=False)
    data = b"".join(renderer.stream(step) for step in steps).decode()
    chunks = [json.loads(line.removeprefix("data: ")) for line in data.split("\n\n") if line]
    return [
        (choice["index"], choice["text"], choice["finish_reason"])
        for chunk in chunks
        for choice in chunk["choices"]
    ]


def test_text_that_comes_with_the_end_is_in_the_last_chunk() -> None:
    """B01: a half character that is flushed at the end has nothing after it."""
    assert streamed(
        [Delta(text="a")], [Delta(text="\ufffd"), LENGTH, Done(usage=USAGE)]
    ) == [(0, "a", None), (0, "\ufffd", "length")]  # fmt: skip


@pytest.mark.parametrize(
    ("steps", "chunks"),
    [
        ([[Delta(text="a"), Delta(text="b")]], [(0, "a", None), (0, "b", None)]),
        ([[Delta(text=""), LENGTH]], [(0, "", "length")]),
        ([[Delta(text="a")], [LENGTH]], [(0, "a", None), (0, "", "length")]),
        (
            [[Delta(text="a"), Finish(choice=1, reason=FinishReason.STOP), LENGTH]],
            [(0, "a", None), (1, "", "stop"), (0, "", "length")],
        ),
    ],
    ids=["no-end", "empty", "apart", "another-choice"],
)
def test_nothing_is_lost_or_moved(
    steps: list[list[Shown]], chunks: list[tuple[int, str, str | None]]
) -> None:
    assert streamed(*steps) == chunks
