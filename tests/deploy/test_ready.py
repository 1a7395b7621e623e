"""Who is up, told from what routers and edges answer."""

from pathlib import Path

import httpx
import msgspec
import pytest

from core.config import parse
from core.status import NodeStatus, RegionStatus
from core.types import ModelName, NodeName, RegionName, Role
from deploy.ports import resolve
from deploy.ready import Probe, edge_urls, router_urls, router_view

LOCAL = Path(__file__).parents[2] / "deploy" / "topologies" / "local.toml"


class FakeWorld:
    """Answers as the processes of local.toml would: an address that is not in `answers` is dead."""

    def __init__(self) -> None:
        topology = parse(LOCAL.read_text(encoding="utf-8"))
        self.topology = resolve(topology).topology
        self.edge = edge_urls(self.topology)["here"]
        self.router = router_urls(self.topology)["home"]
        self.admin = f"http://{self.topology.edges[0].admin}"
        self.answers: dict[str, httpx.Response] = {}

    def client(self) -> httpx.Client:
        def handle(request: httpx.Request) -> httpx.Response:
            answer = self.answers.get(str(request.url))
            if answer is None:
                raise httpx.ConnectError("refused")
            return answer

        return httpx.Client(transport=httpx.MockTransport(handle))

    def status(self, *, alive: bool) -> httpx.Response:
        node = NodeStatus(
            name=NodeName("home-1"), role=Role.COMBINED, model=ModelName("m"), alive=alive
        )
        status = RegionStatus(region=RegionName("home"), epoch="e", sequence=1, nodes=(node,))
        return httpx.Response(200, content=msgspec.json.encode(status))


def test_processes_come_up_one_after_the_other() -> None:
    world = FakeWorld()
    ok, no = httpx.Response(200), httpx.Response(503)
    with world.client() as client:
        probe = Probe(client, world.topology)
        assert probe.poll() == []
        assert probe.missing == ["home", "home-1", "here"]

        world.answers |= {f"{world.router}/healthz": ok, f"{world.router}/readyz": no}
        world.answers[f"{world.edge}/readyz"] = no
        assert probe.poll() == ["home"]

        world.answers[f"{world.router}/status"] = world.status(alive=False)
        assert probe.poll() == []

        world.answers[f"{world.router}/status"] = world.status(alive=True)
        assert probe.poll() == ["home-1"]
        assert not probe.ready()

        world.answers[f"{world.edge}/readyz"] = ok
        assert probe.poll() == []  # its Workers are not there yet
        world.answers[f"{world.admin}/healthz"] = ok
        assert probe.poll() == ["here"]
        assert not probe.ready()  # the router has not said so yet

        world.answers[f"{world.router}/readyz"] = ok
        assert probe.ready()


@pytest.mark.parametrize("content", [b"", b"not json", b'{"nodes": 3}'])
def test_router_view_of_nonsense_is_none(content: bytes) -> None:
    world = FakeWorld()
    world.answers[f"{world.router}/status"] = httpx.Response(200, content=content)
    with world.client() as client:
        assert router_view(client, world.router) is None
