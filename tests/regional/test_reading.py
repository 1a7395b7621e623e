"""What reading settles about a request: how long its answer may be, and where its text is read."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import msgspec
import pytest

from core.config import parse
from core.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound
from core.types import GenerateRequest, Message, ResponseFormat, Tool, ToolCall, ToolChoice
from regional.reading import READERS, Reader
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


def test_ids_of_a_prompt_are_counted_before_they_are_looked_at() -> None:
    """B12: exactly, and without reading any of them."""
    with pytest.raises(ContextLengthExceeded, match=r"has 5000 tokens.*may have 4096"):
        asyncio.run(READER.read(ask((-1,) * 5000, max_tokens=1)))


@pytest.mark.parametrize(
    "messages",
    [
        (Message(role="user", content=""),) * 4097,
        (Message(role="assistant", tool_calls=(ToolCall(id="", name=""),) * 4096),),
    ],
    ids=["messages", "calls"],
)
def test_more_turns_than_tokens_are_refused_unrendered(messages: tuple[Message, ...]) -> None:
    class Never(ByteText):
        def encode_chat(
            self,
            messages: Sequence[Message],
            *,
            rendered_at: int,
            at_most: int | None = None,
            **_: object,
        ) -> list[int]:
            raise AssertionError("it was rendered")

    reader = Reader(parse(topology([("d1", "decode")])), {MODEL: Never()})
    request = msgspec.structs.replace(ask(), prompt=None, messages=messages)
    with pytest.raises(ContextLengthExceeded, match="4097 messages and calls"):
        asyncio.run(reader.read(request))


def test_no_more_than_a_few_long_prompts_are_read_at_once_also_when_their_clients_leave() -> None:
    """A thread cannot be stopped: what nobody waits for any more still counts."""
    at_once, most, lock, go_on = 0, 0, threading.Lock(), threading.Event()

    class Slow(ByteText):
        def encode_prompt(
            self, prompt: str | Sequence[int], *, at_most: int | None = None
        ) -> list[int]:
            nonlocal at_once, most
            with lock:
                at_once += 1
                most = max(most, at_once)
            assert go_on.wait(20)
            with lock:
                at_once -= 1
            return [1]

    async def test() -> None:
        reader = Reader(parse(topology([("d1", "decode")])), {MODEL: Slow()})
        asked = [asyncio.create_task(reader.read(ask("x" * 100_000))) for _ in range(4)]
        async with asyncio.timeout(30):
            while at_once < READERS:
                await asyncio.sleep(0.005)
        for one in asked:
            one.cancel()
        await asyncio.wait(asked)
        last = asyncio.create_task(reader.read(ask("x" * 100_000)))
        ordinary = asyncio.create_task(reader.read(ask("x" * 10_000)))  # in other threads
        async with asyncio.timeout(30):
            while at_once < READERS + 1:
                await asyncio.sleep(0.005)
        go_on.set()
        async with asyncio.timeout(30):
            await asyncio.gather(last, ordinary)
        assert most == READERS + 1
        reader.close()

    asyncio.run(test())


def test_what_the_edge_says_for_the_region_alone_goes_no_further() -> None:
    request = msgspec.structs.replace(ask(), route_chain=b"i" * 8, route_ends=(512, 600))
    reading = asyncio.run(READER.read(request))
    assert (reading.request.route_chain, reading.request.route_ends) == (b"", ())


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
        def encode_chat(
            self,
            messages: Sequence[Message],
            *,
            rendered_at: int,
            at_most: int | None = None,
            **_: object,
        ) -> list[int]:
            where.append(threading.current_thread())
            return [1]

    reader = Reader(parse(topology([("d1", "decode")])), {MODEL: Noting()})
    request = msgspec.structs.replace(ask(), prompt=None, messages=messages)
    asyncio.run(reader.read(request))
    assert (where[0] is not threading.main_thread()) is aside


@pytest.mark.parametrize(("asked", "served"), [(None, 4096), (1000, 1000), (6000, 6000)])
def test_a_topology_may_ask_for_a_stretched_context(asked: int | None, served: int) -> None:
    world = parse(topology([("d1", "decode")]))
    model = msgspec.structs.replace(world.models[MODEL], context=asked)
    world = msgspec.structs.replace(world, models={MODEL: model})
    assert Reader(world, {MODEL: ByteText()}).context(MODEL) == served


# ------------------------------------------------------------------ schemas and tools


class Held(ByteText):
    """Every answer is held to something; it was asked on this thread."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []

    def grammar(self, request: GenerateRequest) -> str:
        self.threads.append(threading.current_thread())
        return "start: x"


FORMED = msgspec.structs.replace(
    ask(),
    prompt=None,
    messages=(Message(role="user", content="x"),),
    tools=(Tool(name="f", description="d", parameters="{}"),),
    tool_choice=ToolChoice.REQUIRED,
    forced_tool="f",
    response_format=ResponseFormat(schema="{}"),
)


def test_a_node_is_told_the_grammar_and_the_names_of_tools_alone() -> None:
    text = Held()
    reader = Reader(parse(topology([("d1", "decode")])), {MODEL: text})
    read = asyncio.run(reader.read(FORMED)).request
    assert read.grammar == "start: x"
    assert read.tools == (Tool(name="f"),)
    assert (read.tool_choice, read.forced_tool) == (ToolChoice.REQUIRED, "f")
    assert read.response_format is None
    assert text.threads != [threading.current_thread()]
    reader.close()


def test_plain_requests_have_no_grammar() -> None:
    text = Held()
    reader = Reader(parse(topology([("d1", "decode")])), {MODEL: text})
    assert asyncio.run(reader.read(ask())).request.grammar == ""
    assert text.threads == []


@pytest.mark.parametrize(("field", "value"), [("ignore_eos", True), ("min_tokens", 3)])
def test_what_a_schema_makes_impossible_is_refused_by_name(field: str, value: object) -> None:
    sampling = msgspec.structs.replace(FORMED.sampling, **{field: value})
    reader = Reader(parse(topology([("d1", "decode")])), {MODEL: Held()})
    with pytest.raises(InvalidRequest, match=f"'{field}'") as refused:
        asyncio.run(reader.read(msgspec.structs.replace(FORMED, sampling=sampling)))
    assert refused.value.param == field
    reader.close()


@pytest.mark.parametrize(
    ("name", "hint"),
    [("smal", "did you mean 'small'?"), ("zzz", f"there are: {MODEL}, small, default")],
)
def test_an_unknown_model_has_the_nearest_name_or_all_of_them(name: str, hint: str) -> None:
    with pytest.raises(ModelNotFound) as refused:
        asyncio.run(READER.read(ask(model=name)))
    assert refused.value.message == f"no model {name!r} here; {hint}"
