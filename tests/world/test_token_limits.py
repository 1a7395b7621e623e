"""B19: limits hold for the whole answer, wherever its prompt was read, streamed or in one piece."""

from __future__ import annotations

import itertools
from typing import Any

import httpx
import pytest

from deploy.launcher import LocalWorld
from tests.world.scripted import Answer, ask, completion

pytestmark = pytest.mark.world

_numbers = itertools.count()
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def prompt() -> str:
    """One that nobody has read, and long enough to be split off."""
    return f"limits {next(_numbers)}: " + "a keeper counts the boats of the day. " * 20


def in_one_piece(edge: str, body: dict[str, object], path: str) -> tuple[str, str, dict[str, Any]]:
    rest = {name: value for name, value in body.items() if not name.startswith("stream")}
    page = httpx.post(edge + path, json=rest, timeout=60, trust_env=False).json()
    choice = page["choices"][0]
    text = choice["text"] if path == TEXT else choice["message"]["content"]
    return text or "", choice["finish_reason"], page["usage"]


CASES: dict[str, tuple[str, dict[str, object], int | None, str, bool]] = {
    # path, what is asked for, tokens of the answer if known, finish, whether KV is handed over
    "one token": (TEXT, {"max_tokens": 1}, 1, "length", False),
    "two tokens": (TEXT, {"max_tokens": 2}, 2, "length", True),
    "no limit": (CHAT, {"max_tokens": None}, None, "stop", True),
    "at least": (TEXT, {"min_tokens": 100, "max_tokens": 500}, 500, "length", True),
    "ends at once": (TEXT, {"stop": ["l"]}, 1, "stop", True),
    "the newer name": (CHAT, {"max_tokens": 50, "max_completion_tokens": 7}, 7, "length", True),
}


def asked(path: str, wanted: dict[str, object]) -> dict[str, object]:
    """All of them in one region."""
    body = completion(prompt(), prompt_cache_key="limits", **wanted)
    if path == CHAT:
        body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
    return body


@pytest.mark.parametrize("case", CASES)
def test_split_unsplit_streamed_and_whole_are_one(world: LocalWorld, case: str) -> None:
    path, wanted, tokens, finish, handed_over = CASES[case]
    edge = world.edges["ams"]
    body = asked(path, wanted)
    cold = ask(edge, body, path)
    tries = 1
    while handed_over and not cold.facts["kv_bytes"]:  # what was measured spoke against it
        assert (tries := tries + 1) < 9, "no prompt of eight is split off"
        body = asked(path, wanted)
        cold = ask(edge, body, path)
    assert (cold.status, cold.done, cold.error) == (200, True, None)
    assert (cold.facts["kv_bytes"] > 0) == handed_over, cold.facts
    again = ask(edge, body, path)
    whole = in_one_piece(edge, body, path)
    assert again.facts["kv_bytes"] == 0, "read where it is answered"
    assert (cold.text, cold.finish) == (again.text, again.finish) == whole[:2]
    assert cold.finish == finish
    for usage in (_usage(cold), _usage(again), whole[2]):
        assert usage["prompt_tokens"] == _usage(cold)["prompt_tokens"]
        assert usage["completion_tokens"] == (tokens or _usage(cold)["completion_tokens"]) > 0
    assert case != "ends at once" or cold.text == ""


def _usage(answer: Answer) -> dict[str, Any]:
    assert answer.usage is not None
    return answer.usage
