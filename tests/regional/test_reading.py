"""What reading settles about a request: how long its answer may be, and where its text is read."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import msgspec
import pytest

from core.config import parse
from core.errors import ContextLengthExceeded, InvalidRequest
from core.types import Message, ToolCall
from regional.reading import Reader
from tests.regional.fake_node import MODEL
from tests.regional.fakes import ByteText, ask, topology

READER = Reader(parse(topology([("d1", "decode")])), {MODEL: ByteText()})


@pytest.mark.parametrize(("prompt_tokens", "allowed"), [(100, 16), (4090, 6), (4095, 1)])
def test_a_default_limit_yields_to_the_context(prompt_tokens: int, allowed: int) -> None:
    """B12: a prompt that fits is answered, however little room is left."""
    request = ask("x" * prompt_tokens, max_tokens=16)
    sampling = msgspec.structs.replace(request.sampling, max_tokens_yields=True)
    reading = asyncio.run(READER.read(msgspec.structs.replace(request, sampling=sampling)))
    settled = reading.request.sampling
    assert (settled.max_tokens, settled.max_tokens_yields) == (allowed, False)


def test_a_limit_that_was_asked_for_is_refused_and_not_shortened() -> None:
    with pytest.raises(ContextLengthExceeded):
        asyncio.run(READER.read(ask("x" * 4095, max_tokens=16)))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"stop_token_ids": (3, 256)}, "stop_token_ids"),
        ({"logit_bias": ((3, 1.0), (256, 1.0))}, "logit_bias"),
    ],
)
def test_ids_outside_the_vocabulary_are_refused_by_name(
    changes: dict[str, object], field: str
) -> None:
    """B10: nothing of it reaches a node."""
    request = ask()
    sampling = msgspec.structs.replace(request.sampling, **changes)
    with pytest.raises(InvalidRequest, match=f"'{field}' has the token id 256") as refused:
        asyncio.run(READER.read(msgspec.structs.replace(request, sampling=sampling)))
    assert refused.value.param == field


def test_a_minimum_that_the_context_has_no_room_for_is_refused() -> None:
    """B12, B19."""
    request = ask("x" * 4000, max_tokens=None)
    for least, fits in ((96, True), (97, False)):
        sampling = msgspec.structs.replace(request.sampling, min_tokens=least)
        reading = READER.read(msgspec.structs.replace(request, sampling=sampling))
        if fits:
            assert asyncio.run(reading).request.sampling.min_tokens == least
            continue
        with pytest.raises(ContextLengthExceeded) as refused:
            asyncio.run(reading)
        assert refused.value.param == "min_tokens"


CALL = ToolCall(id="c1", name="look", arguments="x" * 5000)


@pytest.mark.parametrize(
    ("messages", "aside"),
    [
        ((Message(role="user", content="x" * 100),), False),
        ((Message(role="user", content="x" * 5000),), True),
        ((Message(role="assistant", tool_calls=(CALL,)), Message(role="user", content="x")), True),
        ((Message(role="user", content="x"),) * 1000, True),
    ],
    ids=["short", "long", "long call", "many"],
)
def test_what_takes_long_to_read_does_not_hold_up_other_streams(
    messages: tuple[Message, ...], aside: bool
) -> None:
    where: list[threading.Thread] = []

    class Noting(ByteText):
        def encode_chat(self, messages: Sequence[Message], *, rendered_at: int) -> list[int]:
            where.append(threading.current_thread())
            return [1]

    reader = Reader(parse(topology([("d1", "decode")])), {MODEL: Noting()})
    request = msgspec.structs.replace(ask(), prompt=None, messages=messages)
    asyncio.run(reader.read(request))
    assert (where[0] is not threading.main_thread()) is aside
