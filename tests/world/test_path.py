"""The way of a prompt through a whole world, and the refusals on the way."""

import json
import re

import httpx
import openai
import pytest

from deploy.launcher import LocalWorld
from tests.world.faults import frames_of, until
from tests.world.scripted import CONTEXT, MODEL, ask, completion, region_status

pytestmark = pytest.mark.world

LONG = "".join(f"{number} lighthouse keepers count their boats. " for number in range(16))


def test_answer_comes_out_of_kv_that_crossed_between_nodes(world: LocalWorld) -> None:
    for number in range(8):  # what was measured of a busy machine may speak against a split
        prompt = f"crossing {number}: " + LONG
        answer = ask(world.edges["ams"], completion(prompt))
        if "x-skerry-prefill" in answer.headers:
            break
    else:
        pytest.fail("no prompt was read by another node")
    assert (answer.text, answer.finish, answer.done) == (prompt, "stop", True)
    region = answer.headers["x-skerry-region"]
    assert answer.headers["x-skerry-prefill"] == f"{region}-prefill"
    assert answer.headers["x-skerry-decode"] == f"{region}-decode"
    assert answer.facts["kv_bytes"] > 0

    def sent() -> int:
        nodes = region_status(world, region)["nodes"]
        return int(
            next(n.get("kv_bytes_sent", 0) for n in nodes if n["name"] == f"{region}-prefill")
        )

    assert until(lambda: sent() >= answer.facts["kv_bytes"])


def test_two_edges_agree_on_the_region_and_the_second_finds_the_prefix_read(
    world: LocalWorld,
) -> None:
    shared = "agreeing: " + LONG
    first = ask(world.edges["ams"], completion(shared + "Which boats?", max_tokens=5))
    region = first.headers["x-skerry-region"]
    # The other edge may go to a nearer region until it has heard who holds the prompt: the frame
    # after the one that may be on its way.
    heard = frames_of(world.edges["nyc"], region)
    assert until(lambda: frames_of(world.edges["nyc"], region) >= heard + 2)
    second = ask(world.edges["nyc"], completion(shared + "And whose?", max_tokens=5))

    assert first.headers["x-skerry-region"] == second.headers["x-skerry-region"]
    assert second.text == shared[: len(second.text)] != ""
    assert first.usage is not None
    assert second.usage is not None
    assert first.usage["prompt_tokens_details"]["cached_tokens"] == 0
    cached = second.usage["prompt_tokens_details"]["cached_tokens"]
    assert cached > 0.9 * second.usage["prompt_tokens"]


@pytest.mark.parametrize(("edge", "near"), [("ams", "eu"), ("nyc", "us")])
def test_short_prompt_is_answered_near_its_caller(world: LocalWorld, edge: str, near: str) -> None:
    def is_near() -> bool:  # while neither region is the busier one
        answer = ask(world.edges[edge], completion("short"))
        assert answer.text == "short"
        assert answer.headers["x-skerry-route"] == "nearest_short"
        return answer.headers["x-skerry-region"] == near

    assert until(is_near)


def test_text_survives_the_whole_way_unbroken(world: LocalWorld) -> None:
    prompt = "ďábel 👩‍👩‍👧‍👦 天气 🦙 é " * 3
    answer = ask(world.edges["ams"], completion(prompt))
    assert answer.text == prompt


def test_official_client_works_unmodified(world: LocalWorld) -> None:
    client = openai.OpenAI(base_url=world.edges["ams"] + "/v1", api_key="none", max_retries=0)
    with client:
        whole = client.completions.create(model="tiny-alias", prompt="one, two", temperature=0)
        said = whole.choices[0].text
        pieces = [
            chunk.choices[0].delta.content or ""
            for chunk in client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": "three"}],
                stream=True,
                max_tokens=500,
            )
            if chunk.choices
        ]
        names = [model.id for model in client.models.list()]
    assert (said, whole.model) == ("one, two", "tiny-alias")
    assert "three" in "".join(pieces)
    assert MODEL in names


def test_prompt_over_the_context_is_refused_before_any_byte(world: LocalWorld) -> None:
    ids = [97] * (CONTEXT + 5)
    answer = ask(world.edges["ams"], {"model": MODEL, "prompt": ids, "stream": True})
    assert answer.status == 400
    assert answer.error is not None
    assert answer.error["code"] == "context_length_exceeded"
    assert re.search(
        rf"{CONTEXT}\b.*{CONTEXT + 5}|{CONTEXT + 5}\b.*{CONTEXT}", answer.error["message"]
    )


TURNS = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("body", "status", "word"),
    [
        ("{", 400, "JSON"),
        ("[]", 400, ""),
        ("", 400, ""),
        ({"model": MODEL}, 400, "messages"),
        ({"model": MODEL, "messages": []}, 400, "messages"),
        ({"model": MODEL, "messages": "hi"}, 400, "messages"),
        ({"model": 3, "messages": TURNS}, 400, "model"),
        ({"model": "tinny", "messages": TURNS}, 404, MODEL),
        ({"model": MODEL, "messages": TURNS, "n": 70}, 400, "n"),
    ],
    ids=["cut", "array", "empty", "no-messages", "no-turns", "text", "model-type", "unknown", "n"],
)
def test_a_callers_mistake_is_named_and_never_ours(
    world: LocalWorld, body: object, status: int, word: str
) -> None:
    response = httpx.post(
        world.edges["nyc"] + "/v1/chat/completions",
        content=body if isinstance(body, str) else json.dumps(body),
        headers={"content-type": "application/json"},
        timeout=60,
        trust_env=False,
    )
    error = response.json()["error"]
    assert response.status_code == status
    assert word in f"{error['message']} {error['param']}"
