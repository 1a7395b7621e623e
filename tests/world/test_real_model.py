"""The bundled model in the default world: the same faults once more, with real weights."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from deploy.launcher import LocalWorld
from tests.world.faults import alive, forgotten, until
from tests.world.scripted import Answer, ask, lines_of, streaming, take

pytestmark = [pytest.mark.world, pytest.mark.model]

CHAT = "/v1/chat/completions"
HANDBOOK = " ".join(
    f"Rule {number}: a boat of the harbour carries at most {number} passengers and a cook."
    for number in range(60)
)


def chat(question: str, **more: object) -> dict[str, object]:
    """A streamed question about the handbook."""
    turns = [{"role": "system", "content": HANDBOOK}, {"role": "user", "content": question}]
    return {
        "model": "smollm2", "messages": turns, "stream": True, "temperature": 0,
        "max_tokens": 40, "stream_options": {"include_usage": True}, **more,
    }  # fmt: skip


def test_the_same_words_come_cold_split_cached_and_after_faults(real: LocalWorld) -> None:
    question = "How many passengers does a boat carry under rule 7?"
    cold = ask(real.edges["nyc"], chat(question), CHAT)
    assert cold.done, cold.error
    region = cold.headers["x-skerry-region"]
    assert cold.facts["prefill"] == f"{region}-prefill-1"
    assert cold.facts["kv_bytes"] > 0

    cached = ask(real.edges["ams"], chat(question), CHAT)
    assert cached.headers["x-skerry-region"] == region
    assert cached.usage is not None
    tokens = cached.usage["prompt_tokens"]
    assert cached.usage["prompt_tokens_details"]["cached_tokens"] >= tokens - 16
    assert cached.text == cold.text

    broken = _stream_and_kill(real, f"{region}-decode-1", chat(question, max_tokens=400))
    assert (broken.done, broken.finish) == (False, None)
    assert broken.error is not None
    assert broken.error["code"] == "node_lost"
    assert until(lambda: alive(real, region))

    real.kill(f"{region}-prefill-1", signal.SIGSTOP)  # frozen, not gone: nobody closes its sockets
    try:
        frozen = ask(real.edges["nyc"], chat(question), CHAT)
    finally:
        real.kill(f"{region}-prefill-1", signal.SIGCONT)
    assert frozen.done, frozen.error
    assert frozen.text == cold.text
    assert until(lambda: alive(real, region))
    assert until(lambda: forgotten(real, region), 2.0)


def test_a_client_that_leaves_frees_every_block(real: LocalWorld) -> None:
    body = chat("Tell a long story about the cook.", max_tokens=500)
    with streaming(real.edges["ams"], body, CHAT) as response:
        region = response.headers["x-skerry-region"]
        next(lines_of(response))
    assert until(lambda: forgotten(real, region), 2.0)


def test_four_at_once_answer_as_one_alone(real: LocalWorld) -> None:
    """Batched = one by one, with real weights through the whole path."""
    questions = [f"Which rule speaks of {number} passengers?" for number in (3, 9, 27, 54)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda q: ask(real.edges["nyc"], chat(q), CHAT).text, questions))
    alone = [ask(real.edges["nyc"], chat(q), CHAT).text for q in questions]
    assert together == alone


def _stream_and_kill(world: LocalWorld, node: str, body: dict[str, object]) -> Answer:
    killed = False
    with streaming(world.edges["nyc"], body, CHAT) as response:
        answer = Answer(response.status_code, response.headers)
        for line in lines_of(response):
            take(answer, line)
            if not killed and answer.text:
                world.kill(node)
                killed = True
    return answer


def test_metrics_tell_of_the_work(real: LocalWorld) -> None:
    page = httpx.get(real.edges["nyc"] + "/metrics", trust_env=False).text
    generated = [line for line in page.splitlines() if line.startswith("skerry_generated_tokens")]
    assert sum(float(line.split()[-1]) for line in generated) > 0


# ------------------------------------------------------------------ schemas and tools

WEATHER: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["C", "F"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}  # fmt: skip
LIST = {
    "type": "object",
    "properties": {
        "rule": {"type": "integer", "minimum": 1, "maximum": 60},
        "words": {"type": "array", "items": {"enum": ["boat", "cook", "é"]}, "minItems": 2,
                  "maxItems": 3},
    },
    "required": ["rule", "words"],
    "additionalProperties": False,
}  # fmt: skip


@pytest.fixture
def client(real: LocalWorld) -> Iterator[openai.OpenAI]:
    base = real.edges["ams"] + "/v1"
    with openai.OpenAI(base_url=base, api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_an_agent_asks_for_a_tool_gets_its_result_and_answers(
    client: openai.OpenAI, streamed: bool
) -> None:
    talk: list[ChatCompletionMessageParam] = [
        {"role": "user", "content": "What is the weather in Paris?"}
    ]

    def ask(limit: int, choice: Literal[required, none]) -> ParsedChatCompletion[None]:
        more: Any = {"tools": [WEATHER], "tool_choice": choice, "temperature": 0}
        if not streamed:
            return client.chat.completions.parse(
                model="smollm2", messages=talk, max_tokens=limit, **more
            )
        with client.chat.completions.stream(
            model="smollm2", messages=talk, max_tokens=limit, **more
        ) as stream:
            return stream.get_final_completion()

    asked = ask(80, "required").choices[0]
    assert asked.finish_reason == "tool_calls"
    (call,) = asked.message.tool_calls or []
    assert call.function.name == "get_weather"
    jsonschema.validate(json.loads(call.function.arguments), WEATHER["function"]["parameters"])
    assert not asked.message.content

    talk.append(cast("ChatCompletionMessageParam", asked.message.model_dump(exclude_none=True)))
    talk.append({"role": "tool", "tool_call_id": call.id, "content": "Sunny, 18 degrees"})
    answer = ask(400, "none").choices[0]
    assert answer.finish_reason == "stop"
    assert "18" in (answer.message.content or "")
    assert not answer.message.tool_calls


def test_a_schema_holds_split_cached_and_in_company(real: LocalWorld) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "list", "schema": LIST}}
    body = chat(
        "Which rule names the cook? As JSON.", response_format=form, seed=3, temperature=1.3
    )
    cold = ask(real.edges["nyc"], body, CHAT)
    assert cold.facts["kv_bytes"] > 0, "the prompt was read by another node"
    with ThreadPoolExecutor(6) as pool:
        others = [chat("Tell me of boats.", temperature=1.0, seed=n) for n in range(3)]
        more = [{**body, "seed": n} for n in range(2)]
        answers = list(pool.map(lambda b: ask(real.edges["ams"], b, CHAT), [body, *others, *more]))
    assert answers[0].text == cold.text
    for answer in (cold, answers[0], *answers[4:]):
        assert answer.finish == "stop", answer.error
        jsonschema.validate(json.loads(answer.text), LIST)


def test_a_schema_that_cannot_be_kept_is_refused_before_any_byte(real: LocalWorld) -> None:
    schema = {"type": "array", "uniqueItems": True}
    form = {"type": "json_schema", "json_schema": {"name": "list", "schema": schema}}
    refused = ask(real.edges["nyc"], chat("JSON, please.", response_format=form), CHAT)
    assert refused.status == 400
    assert refused.error is not None
    assert refused.error["param"] == "response_format.json_schema.schema"
    assert "'uniqueItems'" in refused.error["message"]
