"""Waiting for what processes say of themselves, where one is slow to say it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from core.config import World
from core.errors import ConfigError
from deploy.rollout import attending
from deploy.rollout.asking import Asking
from deploy.rollout.attending import Attending, Patience
from deploy.rollout.steps import Idle, Kind
from tests.deploy.rollout.test_plan import TWO

Waits = Callable[[Callable[[httpx.Request], httpx.Response], float], list[str]]


@pytest.fixture
def idle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Waits:
    """Waits until region eu is idle, with routers that answer so; what is said."""
    monkeypatch.setattr(attending, "HEARD_S", 0.0)

    def wait(router: Callable[[httpx.Request], httpx.Response], idle_s: float) -> list[str]:
        world, said = World(TWO, tmp_path / "topology.toml", tmp_path), list[str]()
        with httpx.Client(transport=httpx.MockTransport(router)) as client:
            asking = Asking(client, world, lambda _: False)
            Attending(
                client=client, world=world, asking=asking, patience=Patience(idle_s=idle_s),
                pause=lambda _: False, say=said.append,
            ).take(Idle(Kind.REGION, "eu"))  # fmt: skip
        return said

    return wait


def test_a_router_that_misses_a_question_is_asked_again(idle: Waits) -> None:
    """What it has would be broken off, or the whole rollout taken back, for one slow answer."""
    left = iter([2, None, None, 1, None, 0, 0])

    def router(request: httpx.Request) -> httpx.Response:
        if request.url.path != "/status":
            return httpx.Response(404)
        active = next(left, 0)
        if active is None:
            raise httpx.ReadTimeout("slow")
        return httpx.Response(200, json={"active": active})

    assert idle(router, 20.0) == ["  2 under way", "  1 under way"]


def test_a_router_that_never_answers_is_named(idle: Waits, monkeypatch: pytest.MonkeyPatch) -> None:
    def router(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with pytest.raises(ConfigError, match="router eu does not answer"):
        idle(router, 0.05)
    monkeypatch.setattr(attending, "UNHEARD_S", 0.05)
    with pytest.raises(ConfigError, match="router eu does not answer"):
        idle(router, 20.0)
