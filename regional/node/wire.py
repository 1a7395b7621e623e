"""Between the protobuf messages of `node.proto` and the types that the front works with."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

import msgspec

from core.errors import InvalidRequest, RequestError
from core.kv.ticket import Endpoint, Offer, Ticket
from core.types import GenerateRequest
from regional.node.answer import Left, Spent
from regional.pb import node_pb2 as pb

_request = msgspec.msgpack.Decoder(GenerateRequest)
_SPENT = tuple(one.name for one in fields(Spent))
"""Named alike here and there."""


@dataclass(frozen=True, slots=True)
class Work:
    """A request as a node sees it: without its text, with its tokens."""

    request: GenerateRequest
    token_ids: tuple[int, ...]
    deadline_s: float
    move_min_tokens: int
    spent: Spent
    pull_tokens: int
    pull_s: float


def work(message: pb.Work) -> Work:
    """Raises InvalidRequest."""
    try:
        request = _request.decode(message.request)
    except msgspec.MsgspecError as error:
        raise InvalidRequest(f"the request does not decode: {error}") from error
    return Work(
        request=request,
        token_ids=tuple(message.token_ids),
        deadline_s=message.deadline_s,
        move_min_tokens=message.move_min_tokens,
        pull_tokens=message.pull_tokens,
        pull_s=message.pull_s,
        spent=Spent(**{name: getattr(message.spent, name) for name in _SPENT}),
    )


def ticket(message: pb.Ticket) -> Ticket:
    return Ticket(
        id=message.id,
        generation=message.generation,
        lease_s=message.lease_s,
        endpoints=tuple(
            Endpoint(
                rank=one.rank,
                address=one.address,
                group=one.group,
                first_layer=one.first_layer,
                layers=one.layers,
                first_head=one.first_head,
                heads=one.heads,
                dtype=one.dtype,
                block_bytes=one.block_bytes,
                blocks=tuple(one.blocks),
                offers=tuple(Offer(o.kind, o.address, o.host) for o in one.offers),
            )
            for one in message.endpoints
        ),
    )


def ticket_message(value: Ticket) -> pb.Ticket:
    return pb.Ticket(
        id=value.id,
        generation=value.generation,
        lease_s=value.lease_s,
        endpoints=[
            pb.Endpoint(
                rank=one.rank,
                address=one.address,
                group=one.group,
                first_layer=one.first_layer,
                layers=one.layers,
                first_head=one.first_head,
                heads=one.heads,
                dtype=one.dtype,
                block_bytes=one.block_bytes,
                blocks=one.blocks,
                offers=[pb.Offer(kind=o.kind, address=o.address, host=o.host) for o in one.offers],
            )
            for one in value.endpoints
        ],
    )


def reserved(attempt_id: str, ticket: pb.Ticket, cached_tokens: int) -> pb.NodeMessage:
    return pb.NodeMessage(
        reserved=pb.Reserved(attempt_id=attempt_id, ticket=ticket, cached_tokens=cached_tokens)
    )


def pulling(attempt_id: str, ticket: pb.Ticket, cached_tokens: int) -> pb.NodeMessage:
    return pb.NodeMessage(
        pulling=pb.Pulling(attempt_id=attempt_id, ticket=ticket, cached_tokens=cached_tokens)
    )


def failed(attempt_id: str, stage: str, error: RequestError) -> pb.NodeMessage:
    return pb.NodeMessage(
        failed=pb.Failed(
            attempt_id=attempt_id,
            stage=stage,
            code=error.code,
            message=error.message,
            retryable=error.retryable,
        )
    )


def preempted(attempt_id: str, left: Left) -> pb.NodeMessage:
    return pb.NodeMessage(
        preempted=pb.Preempted(
            attempt_id=attempt_id,
            token_ids=left.token_ids,
            chars_sent=left.chars_sent,
            spent=pb.Spent(**asdict(left.spent)),
        )
    )
