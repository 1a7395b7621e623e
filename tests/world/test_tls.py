"""A world whose processes speak TLS with each other: the whole path, a rotation under streams."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator

import httpx
import msgspec
import pytest

from core.config import Tls, World, load
from core.tls import EVERY_S
from deploy import certs, toml_write
from deploy.inside import client
from deploy.launcher import LocalWorld, run_world
from deploy.process import Pauses
from tests.tiny_text import write_tiny_folder
from tests.world.faults import split
from tests.world.scripted import CONTEXT, Answer, ask, completion, topology

pytestmark = pytest.mark.world

LONG = "".join(f"{number} sealed letters cross the strait. " for number in range(16))
STREAMS = 8


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalWorld]:
    folder = tmp_path_factory.mktemp("sealed")
    source = write_tiny_folder(folder / "tiny", context=CONTEXT)
    described = topology(source, step_ms=2.0, prefill_tokens_per_s=8000.0)
    eu = [msgspec.structs.replace(one, routers=()) for one in described.regions if one.name == "eu"]
    edges = [msgspec.structs.replace(one, admin=None, round_trip_ms={}) for one in described.edges]
    described = msgspec.structs.replace(
        described, regions=tuple(eu), edges=tuple(edges[:1]), tls=Tls(inside=True)
    )
    file = folder / "sealed.toml"
    file.write_text(toml_write.dump(described), encoding="utf-8")
    state = folder / "state"
    certs.init(load(file, state=state), 30, lambda _: None)
    with run_world(file, say=lambda _: None, state=state, pauses=Pauses(0.1, 0.5, 5.0)) as running:
        yield running


def test_an_answer_crosses_it_and_its_kv_too(sealed: LocalWorld) -> None:
    edge = next(iter(sealed.edges.values()))
    answer, _ = split(lambda number: ask(edge, completion(f"sealed {number}: {LONG}")))
    assert re.fullmatch(rf"sealed \d: {LONG}", answer.text)
    assert answer.headers["x-skerry-prefill"] == "eu-prefill"


def test_without_a_certificate_nothing_inside_answers(sealed: LocalWorld) -> None:
    url = sealed.routers["eu"]
    assert url.startswith("https://")
    for base in (url, url.replace("https", "http")):
        with pytest.raises(httpx.TransportError), httpx.Client(verify=False) as nobody:
            nobody.get(f"{base}/status")
    with client(sealed.world) as operator:
        assert operator.get(f"{url}/status").is_success


def test_a_rotation_under_streams_fails_nothing(sealed: LocalWorld) -> None:
    edge = next(iter(sealed.edges.values()))
    answers: list[Answer] = []
    over = threading.Event()

    def stream(number: int) -> None:
        turn = 0
        while not over.is_set():
            answers.append(ask(edge, completion(f"{number}/{turn}: {LONG}", max_tokens=200)))
            turn += 1

    streams = [threading.Thread(target=stream, args=(number,)) for number in range(STREAMS)]
    for thread in streams:
        thread.start()
    world: World = sealed.world
    certs.rotate(world, 30, lambda _: None, authority=True)
    certs.rotate(world, 60, lambda _: None, authority=False)
    time.sleep(EVERY_S + 1.5)  # the processes have looked at the files once meanwhile
    over.set()
    for thread in streams:
        thread.join(60)
    assert len(answers) >= STREAMS
    failed = [answer for answer in answers if not answer.done or answer.error is not None]
    assert not failed
