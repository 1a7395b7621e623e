"""Where the text of a stream lies among its chunks."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest

from core.events import Delta, Done, Finish, TokenLogprob
from core.types import FinishReason, Usage
from edge.api.openai_render import ChatRenderer, Shown, TextRenderer

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


def entry(utf8: bytes, logprob: float = -0.5, *top: TokenLogprob) -> TokenLogprob:
    token = utf8.decode(errors="backslashreplace")
    return TokenLogprob(token=token, utf8=utf8, logprob=logprob, top=top)


HALF, REST = entry(b"\xc3"), entry(b"\xa9", -1.0)
END = TokenLogprob(token="<end>", utf8=b"", logprob=-0.25)
SAID: list[Shown] = [
    Delta(text="a", logprobs=(entry(b"a", -0.5, entry(b"a"), entry(b"\xc3", -9999.0)),)),
    Delta(choice=1, text="b", logprobs=(entry(b"b"),)),
    Delta(),
    Delta(text="\u00e9!", logprobs=(HALF, REST, entry(b"!"))),
    Finish(choice=1, reason=FinishReason.LENGTH),
    Delta(logprobs=(END,)),
    Finish(reason=FinishReason.STOP),
    Done(usage=USAGE),
]


def chunks_of(renderer: ChatRenderer | TextRenderer) -> list[dict[str, Any]]:
    """Each event as a step of its own."""
    data = b"".join(renderer.stream([event]) for event in SAID).decode()
    return [json.loads(line.removeprefix("data: ")) for line in data.split("\n\n") if line]


def test_chat_choices_and_their_logprobs() -> None:  # B05, B14
    make = partial(ChatRenderer, request_id="r", model="m", created=1, include_usage=False)
    whole = make(logprobs=True)
    whole.take(SAID)
    answer = json.loads(whole.whole(USAGE))
    assert [
        (one["index"], one["message"]["content"], one["finish_reason"])
        for one in answer["choices"]
    ] == [(0, "a\u00e9!", "stop"), (1, "b", "length")]  # fmt: skip
    first = answer["choices"][0]["logprobs"]["content"]
    assert bytes(b for one in first for b in one["bytes"]).decode() == "a\u00e9!"
    assert [one["token"] for one in first] == ["a", "\\xc3", "\\xa9", "!", "<end>"]
    assert first[0]["top_logprobs"] == [
        {"token": "a", "logprob": -0.5, "bytes": [97]},
        {"token": "\\xc3", "logprob": -9999.0, "bytes": [0xC3]},
    ]
    assert first[1]["top_logprobs"] == []
    chunks = [chunk["choices"][0] for chunk in chunks_of(make(logprobs=True))]
    for index in (0, 1):
        mine = [one for one in chunks if one["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert sum("role" in one["delta"] for one in mine) == 1
        joined = [e for one in mine if one["logprobs"] for e in one["logprobs"]["content"]]
        assert joined == answer["choices"][index]["logprobs"]["content"]
        assert (
            "".join(one["delta"].get("content", "") for one in mine)
            == (answer["choices"][index]["message"]["content"])
        )
    silent = make()
    silent.take([Delta(text="a"), Finish(reason=FinishReason.STOP)])
    assert json.loads(silent.whole(USAGE))["choices"][0]["logprobs"] is None


def test_legacy_choices_and_their_logprobs() -> None:  # B05
    make = partial(TextRenderer, request_id="r", model="m", created=1, include_usage=False)
    whole = make(logprobs=True)
    whole.take(SAID)
    answer = json.loads(whole.whole(USAGE))
    assert [(one["index"], one["text"]) for one in answer["choices"]] == [(0, "a\u00e9!"), (1, "b")]
    first = answer["choices"][0]["logprobs"]
    assert first == {
        "tokens": ["a", "bytes:\\xc3", "bytes:\\xa9", "!", "<end>"],
        "token_logprobs": [-0.5, -0.5, -1.0, -0.5, -0.25],
        "top_logprobs": [
            {"a": -0.5, "bytes:\\xc3": -9999.0},
            {"bytes:\\xc3": -0.5},
            {"bytes:\\xa9": -1.0},
            {"!": -0.5},
            {"<end>": -0.25},
        ],
        "text_offset": [0, 1, 1, 2, 3],
    }
    chunks = [chunk["choices"][0] for chunk in chunks_of(make(logprobs=True))]
    for index in (0, 1):
        mine = [one["logprobs"] for one in chunks if one["index"] == index and one["logprobs"]]
        for field, wanted in answer["choices"][index]["logprobs"].items():
            assert [value for one in mine for value in one[field]] == wanted


def test_a_plain_chunk_is_what_the_encoder_would_write() -> None:
    """Its surroundings are written once for all pieces of a choice."""
    renderer = ChatRenderer(request_id="r", model='mo"del the text', created=7, include_usage=True)
    renderer.stream([Delta(choice=2, text="before")])

    def chunk(delta: Delta) -> dict[str, Any]:
        [line, rest] = renderer.stream([delta]).decode().split("\n\n")
        assert rest == ""
        found: dict[str, Any] = json.loads(line.removeprefix("data: "))
        return found

    one = TokenLogprob(token="x", utf8=b"x", logprob=0.0)
    for text in ("a", '"quoted" \\', "\n\t\u2028", "é🦙", "the text", "}]}"):
        plain = chunk(Delta(choice=2, text=text))
        encoded = chunk(Delta(choice=2, text=text, logprobs=(one,)))
        encoded["choices"][0]["logprobs"] = None
        assert plain == encoded
        assert plain["choices"][0]["delta"] == {"content": text}
