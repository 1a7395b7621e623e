"""The bundled model in the default world: the same faults once more, with real weights."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from deploy.launcher import LocalWorld
from tests.world.faults import alive, blocks_used, forgotten, frames_of, split, until
from tests.world.scripted import Answer, ask, lines_of, streaming, take

pytestmark = [pytest.mark.world, pytest.mark.model]

CHAT = "/v1/chat/completions"
UNENDING: dict[str, object] = {"max_tokens": 400, "ignore_eos": True}
"""An answer that is still being written when it is looked at."""
HANDBOOK = " ".join(
    f"Rule {number}: a boat of the harbour carries at most {number} passengers and a cook."
    for number in range(60)
)


def chat(question: str, crew: str = "", **more: object) -> dict[str, object]:
    """A streamed question about the handbook, or about that of a crew."""
    handbook = f"For {crew}. {HANDBOOK}" if crew else HANDBOOK
    turns = [{"role": "system", "content": handbook}, {"role": "user", "content": question}]
    return {
        "model": "smollm2", "messages": turns, "stream": True, "temperature": 0,
        "max_tokens": 40, "stream_options": {"include_usage": True}, **more,
    }  # fmt: skip


def test_the_same_words_come_cold_split_cached_and_after_faults(real: LocalWorld) -> None:
    def body_of(number: int) -> dict[str, object]:
        return chat("How many passengers does a boat carry under rule 7?", f"pier {number}")

    cold, number = split(lambda number: ask(real.edges["nyc"], body_of(number), CHAT))
    body = body_of(number)
    region = cold.headers["x-skerry-region"]
    assert cold.facts["prefill"] == f"{region}-prefill-1"

    heard = frames_of(real.edges["ams"], region)
    assert until(lambda: frames_of(real.edges["ams"], region) >= heard + 2)
    cached = ask(real.edges["ams"], body, CHAT)
    assert cached.headers["x-skerry-region"] == region
    assert cached.usage is not None
    tokens = cached.usage["prompt_tokens"]
    assert cached.usage["prompt_tokens_details"]["cached_tokens"] >= tokens - 16
    assert cached.text == cold.text

    broken = _stream_and_kill(real, f"{region}-decode-1", body | UNENDING)
    assert (broken.done, broken.finish) == (False, None)
    assert broken.error is not None
    assert broken.error["code"] == "node_lost"
    assert until(lambda: alive(real, region))

    real.kill(f"{region}-prefill-1", signal.SIGSTOP)  # frozen, not gone: nobody closes its sockets
    try:
        frozen = ask(real.edges["nyc"], body, CHAT)
    finally:
        real.kill(f"{region}-prefill-1", signal.SIGCONT)
    assert frozen.done, frozen.error
    assert frozen.text == cold.text
    assert until(lambda: alive(real, region))
    assert until(lambda: forgotten(real, region))


def test_a_client_that_leaves_frees_every_block(real: LocalWorld) -> None:
    body = chat("Tell a long story about the cook.") | UNENDING
    with streaming(real.edges["ams"], body, CHAT) as response:
        region = response.headers["x-skerry-region"]
        lines = lines_of(response)  # held: to drop them is to leave
        next(lines)
        assert until(lambda: blocks_used(real, region) > 0)
    assert until(lambda: forgotten(real, region))


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
    assert ask(real.edges["nyc"], chat("Who is the cook?", max_tokens=4), CHAT).done
    page = httpx.get(real.edges["nyc"] + "/metrics", timeout=60, trust_env=False).text
    generated = [line for line in page.splitlines() if line.startswith("skerry_generated_tokens")]
    assert sum(float(line.split()[-1]) for line in generated) > 0
