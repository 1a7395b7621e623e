"""Golden bytes of the node session: what this release writes, and what it must still read.

`golden/wire-1.txt` has one line a message: its name and its bytes in hex. A change that breaks
this test breaks sessions between nodes and routers of different releases: add a field, never
change one.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from regional.pb import node_pb2 as pb
from regional.rpc import (
    decode_node_message,
    decode_router_message,
    encode_node_message,
    encode_router_message,
)  # fmt: skip

GOLDEN = dict(
    line.split() for line in (Path(__file__).parent / "golden/wire-1.txt").read_text().splitlines()
)
UNKNOWN_FIELD = bytes([0xFA, 0x3F, 0x03]) + b"new"  # field 1023, of a release to come

WORK = pb.Work(request=b"\x80", token_ids=[1, 300, 70000], deadline_s=29.5)
TICKET = pb.Ticket(
    id="ticket",
    generation=7,
    lease_s=30.0,
    endpoints=[
        pb.Endpoint(
            rank=1, address="127.0.0.1:9", group=2, first_layer=3, layers=4, first_head=5, heads=6,
            dtype="bfloat16", block_bytes=4096, blocks=[0, 2, 200],
        )
    ],
)  # fmt: skip

FROM_NODE = {
    "join": pb.NodeMessage(
        join=pb.Join(
            wire=1, name="n", epoch="e", role="decode", secret="s", release="0.1.0",
            max_sequences=32, max_step_tokens=512, pid=99,
            models=[
                pb.ModelOffer(
                    name="m", fingerprint=b"\x01\x02", context=8192, kv_bytes_per_token=23040,
                    blocks=1024, prefill_tokens_per_s=1000.5, decode_tokens_per_s=60.25,
                )
            ],
        )
    ),
    "heartbeat": pb.NodeMessage(
        heartbeat=pb.Heartbeat(
            sequence=1, running=2, waiting=3, blocks_used=4, blocks_cached=5,
            prefill_backlog_tokens=6, prefill_tokens_per_s=7.5, decode_tokens_per_s=8.5,
            generated_tokens=9, computed_prompt_tokens=10, cached_prompt_tokens=11, preemptions=12,
            kv_bytes_sent=13, kv_bytes_received=14, draining=True,
        )
    ),
    "reserved": pb.NodeMessage(
        reserved=pb.Reserved(attempt_id="r.1", ticket=TICKET, cached_tokens=16)
    ),
    "failed": pb.NodeMessage(
        failed=pb.Failed(
            attempt_id="r.1", stage="transfer", code="transfer_failed", message="m", retryable=True
        )
    ),
    "prefill_done": pb.NodeMessage(
        prefill_done=pb.PrefillDone(
            attempt_id="r.1", computed_tokens=1, cached_tokens=2, kv_bytes=3, seconds=0.5
        )
    ),
    "step_output": pb.NodeMessage(
        step_output=pb.StepOutput(
            sequences=[
                pb.SequenceOutput(attempt_id="r.1", frames=b"frames", delta=True, last=True)
            ]
        )
    ),
    "cache_events": pb.NodeMessage(
        cache_events=pb.CacheEvents(
            sequence=5, snapshot=True, stored=b"s" * 16, evicted=b"e" * 16
        )
    ),
    "pulling": pb.NodeMessage(
        pulling=pb.Pulling(attempt_id="r.1", ticket=TICKET, cached_tokens=16)
    ),
    "sent": pb.NodeMessage(
        sent=pb.Sent(
            attempt_id="r.1", tokens=32, lacking_tokens=16, kv_bytes=3, seconds=0.5
        )
    ),
    "purged": pb.NodeMessage(
        purged=pb.Purged(
            id="1", error="e", requests=1, cached_blocks=2, scrubbed_blocks=3, host_blocks=4,
            disk_blocks=5,
        )
    ),
    "preempted": pb.NodeMessage(
        preempted=pb.Preempted(
            attempt_id="r.1", token_ids=[1, 300], chars_sent=4,
            spent=pb.Spent(
                prompt_read=True, computed_tokens=5, prefill_s=0.5, decode_s=1.5,
                transfer_s=0.25, kv_bytes=6,
            ),
        )
    ),
    "leaving": pb.NodeMessage(leaving=pb.Leaving(reason="drained")),
}  # fmt: skip

FROM_ROUTER = {
    "welcome": pb.RouterMessage(welcome=pb.Welcome(wire=1, heartbeat_s=1.0)),
    "rejected": pb.RouterMessage(rejected=pb.Rejected(code="version_skew", message="m")),
    "reserve": pb.RouterMessage(reserve=pb.Reserve(attempt_id="r.1", work=WORK)),
    "prefill": pb.RouterMessage(prefill=pb.Prefill(attempt_id="r.1", work=WORK, ticket=TICKET)),
    "start": pb.RouterMessage(start=pb.Start(attempt_id="r.1", work=WORK, queued_s=0.25)),
    "abort": pb.RouterMessage(abort=pb.Abort(attempt_id="r.1", reason="client_gone")),
    "send": pb.RouterMessage(
        send=pb.Send(attempt_id="r.1", work=WORK, ticket=TICKET, pool=1, tokens=48)
    ),
    "recount": pb.RouterMessage(recount=pb.Recount()),
    "proceed": pb.RouterMessage(proceed=pb.Proceed(attempt_id="r.1")),
    "purge": pb.RouterMessage(purge=pb.Purge(id="1", namespace="n")),
    "drain": pb.RouterMessage(drain=pb.Drain(grace_s=10.0)),
}


def test_every_kind_of_message_has_its_bytes() -> None:
    kinds = {
        field.name
        for message in (pb.NodeMessage, pb.RouterMessage)
        for field in message.DESCRIPTOR.oneofs_by_name["body"].fields
    }
    assert kinds == FROM_NODE.keys() | FROM_ROUTER.keys() == GOLDEN.keys()


@pytest.mark.parametrize("kind", FROM_NODE)
def test_from_nodes(kind: str) -> None:
    golden = bytes.fromhex(GOLDEN[kind])
    assert encode_node_message(FROM_NODE[kind]).hex() == golden.hex()
    assert decode_node_message(golden) == FROM_NODE[kind]
    assert decode_node_message(golden + UNKNOWN_FIELD).WhichOneof("body") == kind


@pytest.mark.parametrize("kind", FROM_ROUTER)
def test_from_routers(kind: str) -> None:
    golden = bytes.fromhex(GOLDEN[kind])
    assert encode_router_message(FROM_ROUTER[kind]).hex() == golden.hex()
    assert decode_router_message(golden) == FROM_ROUTER[kind]
    assert decode_router_message(golden + UNKNOWN_FIELD).WhichOneof("body") == kind


def test_a_message_of_an_unknown_kind_is_none_of_ours() -> None:
    assert decode_node_message(UNKNOWN_FIELD).WhichOneof("body") is None
