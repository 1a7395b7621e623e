"""What the tests of Workers AI's face share: its paths, and how its answers are read."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.edge.fakes import FakeRegion, RunningEdge, running_edge, world_of

AI = "/client/v4/accounts/acc/ai"
RUN = f"{AI}/run/@cf/acme/tiny"
CHAT = f"{AI}/v1/chat/completions"
USAGE_OUT = {
    "prompt_tokens": 12,
    "completion_tokens": 3,
    "total_tokens": 15,
    "prompt_tokens_details": {"cached_tokens": 8},
}
HI = [{"role": "user", "content": "Hi"}]
WEATHER = {
    "name": "weather",
    "description": "of a city",
    "parameters": {"type": "object", "properties": {"zip": {}, "city": {"type": "string"}}},
}


@asynccontextmanager
async def here(tmp_path: Path, **more: Any) -> AsyncIterator[tuple[RunningEdge, FakeRegion]]:
    async with FakeRegion("eu", **more).serving() as eu, running_edge(world_of(tmp_path, eu)) as e:
        yield e, eu


def refused(answer: httpx.Response, status: int, code: int, *words: str) -> bool:
    """Whether it is; what is wrong with it is an AssertionError."""
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert set(body) == {"result", "success", "errors", "messages"}
    assert (body["result"], body["success"], body["messages"]) == (None, False, [])
    [error] = body["errors"]
    assert error["code"] == code, error
    for word in words:
        assert word in error["message"], error
    return True


def events_of(answer: httpx.Response) -> list[Any]:
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in answer.text.split("\n\n") if line and not line.startswith(":")]
    assert all(line.startswith("data: ") and "\n" not in line for line in lines)
    data = [line.removeprefix("data: ") for line in lines]
    return [one if one == "[DONE]" else json.loads(one) for one in data]
