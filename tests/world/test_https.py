"""A world whose callers speak https: its edges are replaced and their certificates renewed under
streams, and our own commands find their way all the while."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
import msgspec
import pytest

from core.config import EdgeTls, load
from core.errors import ConfigError
from core.pins import certificates_in
from deploy import certs, toml_write
from deploy.calling import edge_client
from deploy.client import AskFailed
from deploy.launcher import LocalWorld, run_world
from deploy.orders import drain
from deploy.process import Pauses
from deploy.rollout.messages import Deploy
from deploy.rollout.running import asked
from deploy.state import current_of
from deploy.status import edge_view
from tests.tiny_text import write_tiny_folder
from tests.world.faults import until
from tests.world.scripted import CONTEXT, Answer, ask, completion, lines_of, topology

pytestmark = pytest.mark.world

HOSTS = ("api.example.org", "127.0.0.1")
WORDS = "".join(f"{number} sealed envelopes lie in the hold. " for number in range(6))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalWorld]:
    """Edge `ams` of one process, `nyc` of two; each has a certificate of its own."""
    folder = tmp_path_factory.mktemp("https")
    source = write_tiny_folder(folder / "tiny", context=CONTEXT)
    described = topology(source, step_ms=4.0, prefill_tokens_per_s=8000.0)
    edges = (
        msgspec.structs.replace(
            edge, admin=None, round_trip_ms={}, workers=1 + (edge.name == "nyc"),
            tls=EdgeTls(f"public/{edge.name}.crt", f"public/{edge.name}.key"),
        )
        for edge in described.edges
    )  # fmt: skip
    described = msgspec.structs.replace(
        described, edges=tuple(edges), regions=described.regions[:1]
    )
    file, state = folder / "https.toml", folder / "state"
    file.write_text(toml_write.dump(described), encoding="utf-8")
    for edge in ("ams", "nyc"):
        certs.public(load(file, state=state), edge, HOSTS[:1], 30, lambda _: None)
    with run_world(file, say=lambda _: None, state=state, pauses=Pauses(0.1, 0.5, 5.0)) as running:
        yield running


def file_of(world: LocalWorld, edge: str, kind: str = "crt") -> Path:
    return world.world.state / "public" / f"{edge}.{kind}"


def shown(world: LocalWorld, edge: str) -> str:
    """By the process that a new connection comes to."""
    port = int(world.edges[edge].rpartition(":")[2])
    return certificates_in(ssl.get_server_certificate(("127.0.0.1", port)).encode())[0]


class Callers:
    """Two of each edge ask on and on; of these one keeps its connection, one comes anew. They are
    given certificates as callers are, and compare names."""

    def __init__(self, edges: Mapping[str, str], certificates: str) -> None:
        self.answers: list[Answer] = []
        self.failures: list[BaseException] = []
        self._verify = ssl.create_default_context(cadata=certificates)
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, args=(url, keeps))
            for url in edges.values()
            for keeps in (True, False)
        ]

    def __enter__(self) -> Callers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(60)

    def _ask(self, url: str, keeps: bool) -> None:
        while not self._over.is_set():
            with httpx.Client(
                base_url=url, verify=self._verify, timeout=60, trust_env=False
            ) as client:
                while not self._over.is_set():
                    turn = len(self.answers)
                    try:
                        body = completion(f"{url} {turn}: {WORDS}", max_tokens=60)
                        self.answers.append(ask(url, body, client=client))
                    except httpx.HTTPError as error:
                        self.failures.append(error)
                        return
                    if not keeps:
                        break


def test_commands_know_an_edge_by_its_certificate(world: LocalWorld) -> None:
    current = current_of(world.world.state)
    assert current is not None
    assert set(current.edges) == {"ams", "nyc"}
    for name, url in current.edges.items():
        assert url.startswith("https://127.0.0.1:")
        view = edge_view(url)
        assert view.edge == name
        assert view.certificate_left_s == pytest.approx(30 * 86400, abs=600)
        with edge_client(url, timeout=60.0) as client:
            body = completion("ahoy", max_tokens=2)
            answer = ask(url, body, f"{url}/v1/completions", client)
        assert answer.done
        assert answer.error is None
        port = url.rpartition(":")[2]
        with pytest.raises(AskFailed, match="certificate is not believed here: self-signed"):
            edge_view(f"https://localhost:{port}")  # nobody knows whose that is
        with pytest.raises(AskFailed, match="400 Bad Request"):
            edge_view(f"http://127.0.0.1:{port}")
    said: list[str] = []
    drain(world.world, "nyc", resting=True, say=said.append, wait_s=30)
    drain(world.world, "nyc", resting=False, say=said.append, wait_s=0)
    assert said[-1] == "edge nyc takes new work again"


def test_rollouts_and_renewals_under_streams_fail_nothing(world: LocalWorld) -> None:
    old = {edge: file_of(world, edge).read_text() for edge in world.edges}
    fresh = {edge: certs.self_signed(HOSTS, 60) for edge in world.edges}
    new = {edge: certificate.decode() for edge, (certificate, _) in fresh.items()}
    known = "".join([*old.values(), *new.values()])
    with Callers(world.edges, known) as callers:
        assert until(lambda: len(callers.answers) > 8)
        for edge, (certificate, key) in fresh.items():
            file_of(world, edge, "key").write_bytes(key)
            file_of(world, edge).write_bytes(certificate)
            # The new processes show the new one at once, those before them the old one for a while.
            list(asked(Deploy(unit=edge, again=True, idle_s=60, ready_s=60), world.world.state))
        own = {edge: certificates_in(pem.encode())[0] for edge, pem in new.items()}
        assert until(lambda: {edge: shown(world, edge) for edge in world.edges} == own)
        before = len(callers.answers)
        assert until(lambda: len(callers.answers) > before + 8)
    assert callers.failures == []
    assert [one.error for one in callers.answers if not one.done] == []
    assert edge_view(world.edges["ams"]).certificate_left_s == pytest.approx(60 * 86400, abs=600)


def test_a_rollout_does_not_change_between_http_and_https(
    world: LocalWorld, tmp_path: Path
) -> None:
    plain = (msgspec.structs.replace(edge, tls=None) for edge in world.world.topology.edges)
    topology = msgspec.structs.replace(world.world.topology, edges=tuple(plain))
    file = tmp_path / "plain.toml"
    file.write_text(toml_write.dump(topology), encoding="utf-8")
    with pytest.raises(ConfigError, match="'ams' cannot change between http and https"):
        list(asked(Deploy(unit="ams", topology=str(file)), world.world.state))


def test_an_edge_of_two_processes_leaves_with_its_last_answer(
    world: LocalWorld, tmp_path: Path
) -> None:
    gone = world.edges["nyc"]
    left = msgspec.structs.replace(world.world.topology, edges=world.world.topology.edges[:1])
    file = tmp_path / "left.toml"
    file.write_text(toml_write.dump(left), encoding="utf-8")
    known = "".join(file_of(world, edge).read_text() for edge in world.edges)
    what = Deploy(unit="nyc", topology=str(file), idle_s=60, ready_s=60)
    with edge_client(gone, timeout=60.0) as client, client.stream(
        "POST", f"{gone}/v1/completions", json=completion(WORDS, max_tokens=200)
    ) as response:  # fmt: skip
        lines = lines_of(response)
        last = [next(lines)]
        said = threading.Thread(target=lambda: list(asked(what, world.world.state)))
        said.start()
        last += lines
    said.join(100)
    assert last[-1] == "data: [DONE]"
    assert world.edges.keys() == {"ams"}
    with pytest.raises(AskFailed):
        edge_view(gone)
    with Callers(world.edges, known) as callers:
        assert until(lambda: len(callers.answers) > 2)
    assert callers.failures == []
