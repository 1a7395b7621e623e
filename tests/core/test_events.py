"""Wire form of every struct between processes: golden bytes both ways, and the framing."""

from __future__ import annotations

import itertools
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.digest import Filter
from core.errors import VersionSkew
from core.events import (
    Accepted,
    Delta,
    Done,
    Event,
    Fault,
    Finish,
    Moved,
    TokenLogprob,
    ToolCallDelta,
    encode_frame,
    event_decoder,
)
from core.framing import MAX_FRAME_BYTES, FrameDecoder
from core.status import (
    ModelStatus,
    NodeStatus,
    RegionMore,
    RegionPrefixes,
    RegionStatus,
    Told,
    Wanted,
    status_decoder,
)
from core.types import (
    FinishReason,
    GenerateRequest,
    Message,
    ModelName,
    NodeName,
    RegionName,
    RequestId,
    ResponseFormat,
    ResumePoint,
    Role,
    Sampling,
    Timings,
    Tool,
    ToolCall,
    ToolChoice,
    Usage,
)

GOLDEN = Path(__file__).parent / "golden"
"""Written once by the release that introduced a form, never written again: a difference means that
the previous release can no longer be talked to. A new form gets a new file beside the old one."""

EVENTS: dict[str, Event] = {
    "accepted": Accepted(
        prefill=NodeName("p1"), decode=NodeName("d1"), prompt_tokens=7, reason="split"
    ),
    "accepted-alone": Accepted(prefill=None, decode=NodeName("d1"), prompt_tokens=7),
    "moved": Moved(prefill=NodeName("p2"), decode=NodeName("d2"), reason="node_lost"),
    "delta": Delta(choice=0, token_ids=(5, 49151), text="é!"),
    "delta-empty": Delta(token_ids=(9,)),
    "delta-full": Delta(
        choice=1,
        token_ids=(1,),
        text="x",
        logprobs=(
            TokenLogprob(
                token="x",
                utf8=b"x",
                logprob=-0.5,
                top=(TokenLogprob(token="y", utf8=b"\xff", logprob=-9999.0),),
            ),
        ),
        tool_calls=(ToolCallDelta(index=0, id="c1", name="f", arguments='{"a'),),
        reasoning="because",
    ),
    "finish": Finish(choice=0, reason=FinishReason.LENGTH),
    "done": Done(
        usage=Usage(prompt_tokens=100, completion_tokens=20, cached_tokens=96),
        timings=Timings(
            queue_s=0.25, prefill_s=0.5, decode_s=1.5, transfer_s=0.125, kv_bytes=1 << 40
        ),
    ),
    "fault": Fault(
        code="no_capacity", message="full", retryable=True, retry_after_s=1.5, param=None
    ),
}

REQUESTS: dict[str, GenerateRequest] = {
    "request-chat": GenerateRequest(
        id=RequestId("r1"),
        model=ModelName("m"),
        messages=(
            Message(role="system", content="Be brief."),
            Message(role="user", content="Grüße", name="ann"),
            Message(role="assistant", tool_calls=(ToolCall(id="c1", name="f", arguments="{}"),)),
            Message(role="tool", content="18", tool_call_id="c1"),
        ),
        sampling=Sampling(
            temperature=0.5,
            top_p=0.25,
            top_k=40,
            max_tokens=64,
            stop=("\n", "END"),
            stop_token_ids=(2,),
            ignore_eos=True,
        ),
        seed=2**64 - 1,
        rendered_at=1_800_000_000,
        deadline_s=12.5,
        priority=1,
        namespace="acme",
        resume=(ResumePoint(choice=0, token_ids=(1, 2), chars_sent=3),),
    ),
    "request-sampling": GenerateRequest(
        id=RequestId("r4"),
        model=ModelName("m"),
        prompt="Hi",
        sampling=Sampling(
            temperature=0.5,
            min_p=0.125,
            repetition_penalty=1.5,
            presence_penalty=-2.0,
            frequency_penalty=0.25,
            logit_bias=((7, -100.0), (49151, 0.5)),
            min_tokens=3,
            n=4,
            logprobs=20,
        ),
        seed=7,
        rendered_at=1,
    ),
    "request-routed": GenerateRequest(
        id=RequestId("r4"),
        model=ModelName("m"),
        prompt="Hi",
        seed=0,
        rendered_at=1,
        route_chain=b"01234567abcdefgh",
        route_ends=(512, 600, 600),
    ),
    "request-tools": GenerateRequest(
        id=RequestId("r5"),
        model=ModelName("m"),
        messages=(Message(role="user", content="Weather?"),),
        seed=1,
        rendered_at=1,
        tools=(
            Tool(name="f", description="d", parameters='{"type":"object"}', strict=True),
            Tool(name="g"),
        ),
        tool_choice=ToolChoice.REQUIRED,
        forced_tool="f",
        parallel_tool_calls=False,
        response_format=ResponseFormat(schema='{"type":"object"}', param="p"),
        grammar="start: x",
    ),
    "request-ids": GenerateRequest(
        id=RequestId("r2"), model=ModelName("m"), prompt=(1, 2, 70000), seed=0, rendered_at=1
    ),
    "request-traced": GenerateRequest(
        id=RequestId("r6"),
        model=ModelName("m"),
        prompt="Hi",
        seed=0,
        rendered_at=1,
        trace="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    ),
    "request-text": GenerateRequest(
        id=RequestId("r3"), model=ModelName("m"), prompt="Hi", seed=0, rendered_at=1
    ),
}

STATUS: dict[str, RegionStatus] = {
    "status": RegionStatus(
        region=RegionName("eu"),
        epoch="e1",
        sequence=7,
        models=(
            ModelStatus(
                name=ModelName("m"),
                context=8192,
                prefill_tokens_per_s=1000.5,
                decode_tokens_per_s=60.25,
            ),
        ),
        nodes=(
            NodeStatus(
                name=NodeName("d1"),
                role=Role.DECODE,
                model=ModelName("m"),
                pid=42,
                alive=False,
                draining=True,
                running=3,
                waiting=1,
                blocks_used=10,
                blocks_cached=20,
                blocks_total=100,
                prefill_backlog_tokens=512,
                generated_tokens=1000,
                computed_prompt_tokens=2000,
                cached_prompt_tokens=3000,
                preemptions=1,
                kv_bytes_sent=5,
                kv_bytes_received=6,
            ),
        ),
        prefill_work_s=0.5,
        decode_work_s=1.25,
        queue_s=0.125,
        queued=2,
        active=5,
        kv_used=0.75,
        draining=True,
        release="1",
    ),
    "status-small": RegionStatus(region=RegionName("eu"), epoch="e1", sequence=1),
    "status-pools": RegionStatus(
        region=RegionName("eu"),
        epoch="e1",
        sequence=2,
        nodes=(
            NodeStatus(
                name=NodeName("d"),
                role=Role.COMBINED,
                model=ModelName("m"),
                pool="gpu",
                placed=2,
                idle_s=1.5,
            ),
        ),
        more=RegionMore(
            wanted=(
                Wanted(
                    model=ModelName("m2"),
                    role=Role.COMBINED,
                    nodes=1,
                    why="asked",
                    waiting=3,
                    waiting_s=2.5,
                    in_use=True,
                    no_place=True,
                ),
            )
        ),
    ),
}
PREFIXES: dict[str, RegionPrefixes] = {
    "prefixes": RegionPrefixes(
        region=RegionName("eu"),
        epoch="e1",
        version=9,
        base=4,
        filter=Filter(bits=bytes(range(16))),
        added=b"01234567abcdefgh",
        hot=b"hot-pref",
        counts=(12.5,),
        total=40.25,
    ),
    "prefixes-small": RegionPrefixes(region=RegionName("eu"), epoch="e1", version=1),
}

FRAMED: dict[str, Event | RegionStatus | RegionPrefixes] = {**EVENTS, **STATUS, **PREFIXES}


def _golden(name: str) -> bytes:
    return (GOLDEN / f"{name}.msgpack").read_bytes()


def test_every_golden_file_has_a_test() -> None:
    assert {p.stem for p in GOLDEN.glob("*.msgpack")} == {*FRAMED, *REQUESTS}


@pytest.mark.parametrize("name", FRAMED)
def test_frames_are_written_as_ever(name: str) -> None:
    assert encode_frame(FRAMED[name]) == _golden(name)


@pytest.mark.parametrize("name", EVENTS)
def test_golden_events_are_read(name: str) -> None:
    assert list(event_decoder().feed(_golden(name))) == [EVENTS[name]]


@pytest.mark.parametrize("name", [*STATUS, *PREFIXES])
def test_golden_statuses_are_read(name: str) -> None:
    assert list(status_decoder().feed(_golden(name))) == [FRAMED[name]]


def test_an_edge_of_the_release_before_skips_prefix_frames() -> None:
    old = FrameDecoder[RegionStatus](RegionStatus)
    told = _golden("status-small") + _golden("prefixes") + _golden("status")
    assert list(old.feed(told)) == [STATUS["status-small"], STATUS["status"]]


@pytest.mark.parametrize("name", REQUESTS)
def test_requests_are_written_and_read_as_ever(name: str) -> None:
    # as maps: the width of a map's head may grow with the number of its fields, read or not
    written = msgspec.msgpack.decode(msgspec.msgpack.encode(REQUESTS[name]))
    assert written == msgspec.msgpack.decode(_golden(name))
    assert msgspec.msgpack.decode(_golden(name), type=GenerateRequest) == REQUESTS[name]


def _frame(message: object) -> bytes:
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(4, "big") + body


def test_unknown_fields_are_ignored() -> None:
    for name, message in FRAMED.items():
        newer = msgspec.msgpack.decode(_golden(name)[4:]) | {"from_the_future": [1, {"a": None}]}
        decoder: FrameDecoder[Event] | FrameDecoder[Told] = (
            event_decoder() if name in EVENTS else status_decoder()
        )
        assert list(decoder.feed(_frame(newer))) == [message]
    for name, request in REQUESTS.items():
        newer = msgspec.msgpack.decode(_golden(name)) | {"from_the_future": 1}
        body = msgspec.msgpack.encode(newer)
        assert msgspec.msgpack.decode(body, type=GenerateRequest) == request


def test_unknown_kinds_are_skipped() -> None:
    strange = _frame({"kind": "image", "pixels": b"\x00"})
    finish = encode_frame(EVENTS["finish"])
    assert list(event_decoder().feed(strange + finish + strange)) == [EVENTS["finish"]]


def test_words_of_a_newer_release_are_read() -> None:
    """A reason to finish and a node's role that we have no word for break no stream."""
    finish = _frame({"kind": "finish", "choice": 1, "reason": "boredom"})
    assert list(event_decoder().feed(finish)) == [Finish(choice=1, reason=FinishReason.STOP)]
    status = msgspec.msgpack.decode(_golden("status")[4:])
    status["nodes"][0]["role"] = "encoder"
    [read] = status_decoder().feed(_frame(status))
    assert isinstance(read, RegionStatus)
    assert [node.role for node in read.nodes] == ["encoder"]
    assert [node.role for node in STATUS["status"].nodes] == [Role.DECODE.value]


@pytest.mark.parametrize(
    "message",
    [
        {"kind": "finish", "choice": 0, "reason": 3},
        {"kind": "finish", "choice": "zero", "reason": "stop"},
        {"kind": "done"},
        {"choice": 0},
        {"kind": ["done"]},
        [1, 2],
        3,
    ],
    ids=["value", "type", "missing", "no kind", "kind of no kind", "array", "number"],
)
def test_what_does_not_decode_is_version_skew(message: object) -> None:
    with pytest.raises(VersionSkew):
        list(event_decoder().feed(_frame(message)))


def test_no_msgpack_and_too_much_of_it() -> None:
    with pytest.raises(VersionSkew):
        list(event_decoder().feed(b"\x00\x00\x00\x01\xc1"))
    with pytest.raises(VersionSkew, match="limit"):
        list(event_decoder().feed((MAX_FRAME_BYTES + 1).to_bytes(4, "big")))


@given(st.lists(st.sampled_from(list(EVENTS.values())), max_size=8), st.lists(st.integers(0, 400)))
def test_frames_may_be_cut_anywhere(events: list[Event], cuts: list[int]) -> None:
    data = b"".join(encode_frame(event) for event in events)
    places = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    decoder = event_decoder()
    seen = [
        event
        for start, end in itertools.pairwise(places)
        for event in decoder.feed(data[start:end])
    ]
    assert seen == events
    assert decoder.pending == 0
    list(decoder.feed(b"\x00\x00"))
    assert decoder.pending == 2
