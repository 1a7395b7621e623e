"""The command line's own client: stream reading by table, refusals in one line."""

import socket
import threading

import httpx
import pytest

from deploy.calling import edge_client
from deploy.client import (
    AnswerBuilder,
    AskFailed,
    Comment,
    Data,
    SseReader,
    Turn,
    ask,
    refusal,
    waits_for,
)


def read(*lines: str) -> list[Data | Comment]:
    reader = SseReader()
    return [event for line in lines if (event := reader.line(line))]


def test_sse_data_lines_join_and_comments_pass_at_once() -> None:
    assert read("data: a", "data:b", "", ": skerry {}", "event: x", "", "data: c", "") == [
        Data("a\nb"),
        Comment("skerry {}"),
        Data("c"),
    ]


def fold(*events: Data | Comment) -> AnswerBuilder:
    builder = AnswerBuilder(sent=10.0)
    for now, event in enumerate(events, start=11):
        builder.take(event, float(now))
    return builder


ROLE = Data('{"choices": [{"delta": {"role": "assistant", "content": ""}}], "usage": null}')
HI = Data('{"choices": [{"delta": {"content": "Hi"}, "finish_reason": null}]}')
STOP = Data('{"choices": [{"delta": {}, "finish_reason": "stop"}]}')
USAGE = Data(
    '{"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12,'
    ' "prompt_tokens_details": {"cached_tokens": 8}}}'
)
TRACE = Comment('skerry {"edge": "ams", "region": "eu", "decode": "d", "kv_bytes": 5, "new": 1}')


def test_answer_holds_text_usage_times_and_trace() -> None:
    builder = fold(ROLE, HI, HI, STOP, USAGE, TRACE, Data("[DONE]"))
    answer = builder.answer(18.0)
    assert (answer.text, answer.finish) == ("HiHi", "stop")
    assert (answer.prompt_tokens, answer.cached_tokens, answer.completion_tokens) == (9, 8, 3)
    assert (answer.first_s, answer.total_s) == (2.0, 8.0)
    assert answer.tokens_per_s == pytest.approx(2 / 6)
    assert (answer.trace.edge, answer.trace.prefill, answer.trace.kv_bytes) == ("ams", None, 5)


def test_stream_without_its_end_is_a_failure() -> None:
    with pytest.raises(AskFailed, match="broke off without an end"):
        fold(ROLE, HI).answer(20.0)


def test_error_event_is_a_failure_with_its_message() -> None:
    with pytest.raises(AskFailed, match="broke off: node lost"):
        fold(HI, Data('{"error": {"message": "node lost", "code": "node_lost"}}'))


def test_refusal_tells_what_the_server_said() -> None:
    body = {"error": {"message": "no such model", "type": "x", "param": None, "code": "y"}}
    assert refusal(httpx.Response(404, json=body)) == "refused (404): no such model"
    assert refusal(httpx.Response(502, text="bad\ngateway")) == "refused (502): bad gateway"


def answered(handler: httpx.MockTransport) -> str:
    pieces: list[str] = []
    with httpx.Client(transport=handler) as client:
        ask(client, "http://e", model="m", turns=[Turn("user", "q")], show=pieces.append)
    return "".join(pieces)


def test_ask_shows_the_pieces() -> None:
    stream = "".join(f"data: {d.text}\n\n" for d in (HI, STOP, USAGE)) + "data: [DONE]\n\n"
    assert answered(httpx.MockTransport(lambda _: httpx.Response(200, text=stream))) == "Hi"


def test_ask_of_something_else_is_a_plain_failure() -> None:
    with pytest.raises(AskFailed, match="does not answer in OpenAI's form"):
        answered(httpx.MockTransport(lambda _: httpx.Response(200, text="data: hello\n\n")))


def test_ask_nobody_says_how_to_start(free_port: int) -> None:
    with (
        httpx.Client() as client,
        pytest.raises(AskFailed, match=f"nothing answers at http://127.0.0.1:{free_port}.*make up"),
    ):
        ask(client, f"http://127.0.0.1:{free_port}", model="m", turns=[], show=print)


def test_who_speaks_no_https_is_named_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"https://127.0.0.1:{listener.getsockname()[1]}"

        def answer() -> None:
            caller, _ = listener.accept()
            with caller:
                caller.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        other = threading.Thread(target=answer)
        other.start()
        with (
            edge_client(url) as client,
            pytest.raises(AskFailed, match=f"{url}: it does not speak https"),
        ):
            ask(client, url, model="m", turns=[], show=print)
        other.join()


@pytest.mark.parametrize(
    ("comment", "words"),
    [
        ("held, place 2 of 3", "every region is busy: place 2 of 3 in the edge's line"),
        ("waiting", "no word of an answer yet"),
        ('skerry {"edge": "ams"}', None),
        ("of a proxy", None),
    ],
)
def test_what_a_comment_says_is_waited_for(comment: str, words: str | None) -> None:
    said = waits_for(Comment(comment))
    assert said is None if words is None else said is not None and words in said


def test_comments_are_told_until_the_answer_begins() -> None:
    lines = (": held, place 1 of 2", "", ": waiting", "", f"data: {HI.text}", "", ": waiting", "",
             "data: [DONE]", "")  # fmt: skip
    body = "\n".join(lines).encode() + b"\n"
    transport = httpx.MockTransport(lambda _: httpx.Response(200, content=body))
    told: list[str] = []
    with httpx.Client(transport=transport) as client:
        ask(
            client, "http://e", model="m", turns=[Turn("user", "?")], show=told.append,
            wait=lambda text: told.append(text[:13]),
        )  # fmt: skip
    assert told == ["every region ", "no word of an", "Hi"]
