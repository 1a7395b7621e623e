"""What a deploy that was cut off leaves on a host, and what the next one makes of it."""

from __future__ import annotations

from typing import cast

import pytest

from core.errors import ConfigError
from core.orders import OrderAsk
from deploy.ssh.channel import Host, HostFailed
from deploy.ssh.undoing import kept_on, undo

PATH = "/srv/far/rollout-eu.json"
HOME = {"eu": OrderAsk(resting=False), "eu.2": OrderAsk(nodes={"eu-read": True})}


class Files:
    """Of a host. `lost`: nothing is removed any more."""

    name = "beta"

    def __init__(self) -> None:
        self.there: dict[str, bytes] = {}
        self.lost = False

    def write(self, path: str, data: bytes) -> None:
        self.there[path] = data

    def read(self, path: str) -> str | None:
        data = self.there.get(path)
        return None if data is None else data.decode()

    def remove(self, path: str) -> None:
        if self.lost:
            raise HostFailed("beta: the connection ended")
        self.there.pop(path, None)


@pytest.fixture
def files() -> Files:
    return Files()


@pytest.fixture
def host(files: Files) -> Host:
    return cast("Host", files)


def test_the_next_deploy_gives_the_orders_back_once(host: Host, files: Files) -> None:
    with pytest.raises(KeyboardInterrupt), kept_on(host, PATH, HOME):
        raise KeyboardInterrupt
    given: dict[str, OrderAsk] = {}
    said: list[str] = []
    undo(host, PATH, given.__setitem__, said.append)
    assert given == HOME
    assert len(said) == 2
    assert files.there == {}
    undo(host, PATH, given.__setitem__, said.append)
    assert len(said) == 2


def test_one_that_came_to_its_end_leaves_nothing(host: Host, files: Files) -> None:
    with kept_on(host, PATH, HOME):
        assert PATH in files.there
    assert files.there == {}
    with pytest.raises(ConfigError, match="taken back"), kept_on(host, PATH, HOME):
        raise ConfigError("taken back")
    assert files.there == {}
    with kept_on(host, PATH, {}):
        assert files.there == {}


def test_the_reason_of_a_failure_is_not_hidden_by_a_lost_host(host: Host, files: Files) -> None:
    files.lost = True
    with pytest.raises(ConfigError, match="no lamp oil"), kept_on(host, PATH, HOME):
        raise ConfigError("no lamp oil")


def test_a_router_that_takes_no_order_is_named(host: Host, files: Files) -> None:
    def give(router: str, ask: OrderAsk) -> None:
        if router == "eu":
            raise ConfigError("router eu is not reached")

    with pytest.raises(KeyboardInterrupt), kept_on(host, PATH, HOME):
        raise KeyboardInterrupt
    said: list[str] = []
    undo(host, PATH, give, said.append)
    assert "router eu may hold still: router eu is not reached" in said[0]
    assert "router eu.2 is undone" in said[1]


def test_a_damaged_file_is_said_and_stops_nobody(host: Host, files: Files) -> None:
    files.there[PATH] = b"{half"
    said: list[str] = []
    undo(host, PATH, lambda *_: pytest.fail("nothing is known"), said.append)
    assert "beta: /srv/far/rollout-eu.json is not read" in said[0]
    assert files.there == {}
