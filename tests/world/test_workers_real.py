"""The TypeScript chat on the bundled model: what a newcomer deploys first."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from core.errors import ConfigError
from deploy.launcher import LocalWorld
from deploy.worker import act
from edge.workers import tools
from tests.world.scripted import streaming

pytestmark = [pytest.mark.world, pytest.mark.model]

EXAMPLE = Path(__file__).parents[2] / "examples" / "workers" / "chat-typescript"


def test_a_deployed_chat_streams_from_the_bundled_model(real: LocalWorld) -> None:
    if not tools.installed() and shutil.which("npm") is None:
        pytest.skip("npm is not installed, and workerd comes from it")
    try:
        act.deploy(EXAMPLE, None, real.world, "harbour")
    except ConfigError as error:
        pytest.skip(str(error))
    try:
        body: dict[str, object] = {
            "messages": [{"role": "user", "content": "Say the word harbour."}]
        }
        with streaming(real.edges["nyc"], body, "/w/chat/") as response:
            pieces = [piece for piece in response.iter_raw() if piece]
        events = b"".join(pieces).decode().split("\n\n")
        data = [json.loads(one[6:]) for one in events if one.startswith("data: {")]
        assert "".join(one["response"] for one in data).strip()
        assert data[-1]["usage"]["completion_tokens"] >= len(data) - 1
        assert len(pieces) > 1, "it came as it was made"
        assert "data: [DONE]" in events
    finally:
        act.delete("chat", real.world)
