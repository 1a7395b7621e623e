"""The id of a batch leads to its region, and only for whom it was made; what edge and region say of
batches is written and read as ever."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from core.batches import (
    NONCE_BYTES,
    BatchState,
    ItemAnswer,
    Owed,
    OwedPage,
    QueuedItem,
    QueueReply,
    Submission,
    Written,
    batch_id,
    region_of,
)
from core.events import Fault
from core.types import GenerateRequest, ModelName, RegionName, RequestId, Usage

KEY = b"fleet"
NONCE = bytes(range(NONCE_BYTES))
EU = RegionName("eu-west-1")


def _made(namespace: str = "acme") -> str:
    return batch_id(EU, NONCE, fleet_key=KEY, namespace=namespace)


def test_there_and_back() -> None:
    assert region_of(_made(), fleet_key=KEY, namespace="acme") == EU
    assert _made() == _made()
    assert _made() != batch_id(EU, bytes(NONCE_BYTES), fleet_key=KEY, namespace="acme")


@pytest.mark.parametrize(
    ("key", "namespace"), [(b"another", "acme"), (KEY, ""), (KEY, "acm"), (KEY, "acme2")]
)
def test_of_another_fleet_or_tenant(key: bytes, namespace: str) -> None:
    assert region_of(_made(), fleet_key=key, namespace=namespace) is None


def test_nobody_can_aim_at_another_region() -> None:
    """Every single change of an id makes it lead nowhere."""
    made = _made()
    assert region_of(made.replace("eu", "us"), fleet_key=KEY, namespace="acme") is None
    for at in range(len(made)):
        for other in "0fz.":
            changed = made[:at] + other + made[at + 1 :]
            if changed != made:
                assert region_of(changed, fleet_key=KEY, namespace="acme") is None, changed


@pytest.mark.parametrize("text", ["", "eu", "eu.00.00", "é" * 70, "a" * 10_000, "..", "\0" * 90])
def test_what_is_no_id(text: str) -> None:
    assert region_of(text, fleet_key=KEY, namespace="acme") is None


GOLDEN = Path(__file__).parent / "golden" / "queue"
"""As in test_events: written once, never again."""
WIRE: dict[str, Submission | QueueReply] = {
    "submission": Submission(
        id="eu.00.00",
        namespace="acme",
        model=ModelName("m"),
        items=(
            QueuedItem(
                request=GenerateRequest(
                    id=RequestId("r1"), model=ModelName("m"), prompt="Hi", seed=1, rendered_at=2
                ),
                note=b"n",
                account=b"a",
            ),
        ),
        collector="l1",
    ),
    "batch-queued": BatchState(status="queued", model=ModelName("m")),
    "batch-done": BatchState(
        status="done",
        model=ModelName("m"),
        answers=(ItemAnswer(request_id="r1", note=b"n", events=b"frames"),),
        told=True,
    ),
    "owed": OwedPage(
        items=(
            Owed(
                request_id="r1",
                account=b"a",
                model=ModelName("m"),
                outcome="ok",
                usage=Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=1),
            ),
        )
    ),
    "written": Written(request_ids=("r1", "r2")),
    "fault": Fault(code="not_found", message="no such batch"),
}


def _golden(name: str) -> bytes:
    return (GOLDEN / f"{name}.msgpack").read_bytes()


def _read(name: str, data: bytes) -> Submission | QueueReply:
    kind: Any = Submission if name == "submission" else QueueReply
    read: Submission | QueueReply = msgspec.msgpack.decode(data, type=kind)
    return read


def test_every_golden_file_has_a_test() -> None:
    assert {path.stem for path in GOLDEN.glob("*.msgpack")} == set(WIRE)


@pytest.mark.parametrize("name", WIRE)
def test_written_and_read_as_ever(name: str) -> None:
    # as maps: the width of a map's head may grow with the number of its fields
    written = msgspec.msgpack.decode(msgspec.msgpack.encode(WIRE[name]))
    assert written == msgspec.msgpack.decode(_golden(name))
    assert _read(name, _golden(name)) == WIRE[name]


@pytest.mark.parametrize("name", WIRE)
def test_a_newer_peer_says_more(name: str) -> None:
    newer = msgspec.msgpack.decode(_golden(name)) | {"from_the_future": [1]}
    assert _read(name, msgspec.msgpack.encode(newer)) == WIRE[name]
