"""`/openapi.json` is true: what it describes is answered as it says, to generated bodies too."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import (
    content_type_conformance,
    negative_data_rejection,
    not_a_server_error,
    response_schema_conformance,
    status_code_conformance,
)

from core.keys import append_new, new_key
from tests.edge.fakes import MODEL, FakeRegion, running_edge, world_of

CHECKS = [
    not_a_server_error, status_code_conformance, content_type_conformance,
    response_schema_conformance,
]  # fmt: skip
EXAMPLES = 6
"""Of each operation, fitting and unfitting: the whole stays within seconds."""


@pytest.fixture(scope="module")
def edge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An edge on a thread of its own, whose region always says the same."""
    folder = tmp_path_factory.mktemp("edge")
    where: queue.Queue[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = queue.Queue()

    async def serve() -> None:
        async with FakeRegion("eu").serving() as eu, running_edge(world_of(folder, eu)) as running:
            over = asyncio.Event()
            where.put((running.url, asyncio.get_running_loop(), over))
            await over.wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    url, loop, over = where.get(timeout=60)
    yield url
    loop.call_soon_threadsafe(over.set)
    thread.join()


# Schemathesis itself draws from `random` while it makes a case.
@pytest.mark.filterwarnings("ignore::hypothesis.errors.HypothesisDeprecationWarning")
def test_everything_described_is_answered_as_described(edge: str) -> None:
    schema = schemathesis.openapi.from_url(f"{edge}/openapi.json")
    seen, statuses = 0, Counter[int]()
    found: Any
    for found in schema.get_all_operations():
        operation = found.ok()
        seen += 1
        _play(operation, GenerationMode.POSITIVE, statuses)
        if operation.method == "post":  # nothing sent to a page can be wrong
            _play(operation, GenerationMode.NEGATIVE, statuses)
    assert seen >= 8
    assert statuses[200] > 10
    assert statuses[400] > 10


def _aim(case: Any) -> None:
    """At a model that is there: a generated name hardly ever is one."""
    if isinstance(case.body, dict) and "model" in case.body:
        case.body["model"] = MODEL
    if isinstance(case.path_parameters, dict) and "model" in case.path_parameters:
        case.path_parameters["model"] = MODEL


def _play(operation: Any, mode: GenerationMode, statuses: Counter[int]) -> None:
    checks = [*CHECKS, negative_data_rejection] if mode is GenerationMode.NEGATIVE else CHECKS
    if operation.path == "/readyz":  # its 503 is an answer; a starved edge may not be ready
        checks = [check for check in checks if check is not not_a_server_error]

    @settings(
        max_examples=EXAMPLES, deadline=None, database=None, derandomize=True,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(case=operation.as_strategy(generation_mode=mode))
    def play(case: Any) -> None:
        if mode is GenerationMode.POSITIVE:
            _aim(case)
        response = case.call()
        statuses[response.status_code] += 1
        case.validate_response(response, checks=checks)

    play()


async def test_refusals_are_described_too(tmp_path: Path) -> None:
    """Of callers without a key, with a wrong one, and with bodies that cannot be read."""
    closed = 'anonymous = "never"\n[tenants.acme]'
    async with FakeRegion("eu").serving() as eu:
        world = world_of(tmp_path, eu, access=closed)
        key, record = new_key("acme", now=1)
        append_new(tmp_path / "keys.jsonl", [record])
        good = {"authorization": f"Bearer {key}"}
        packed = {**good, "content-encoding": "compress"}
        async with running_edge(world) as edge:
            document = (await edge.http.get("/openapi.json")).json()
            statuses = Counter[int]()
            for path, operations in document["paths"].items():
                url = path.replace("{account}", "a").replace("{model}", MODEL)
                for method, operation in operations.items():
                    for headers in ({}, {"authorization": f"Bearer {key}x"}, good, packed):
                        answer = await edge.http.request(
                            method, url, headers=headers, content=b"{" if method == "post" else None
                        )
                        assert str(answer.status_code) in operation["responses"], (path, headers)
                        statuses[answer.status_code] += 1
    assert set(statuses) == {200, 400, 401, 415}
