"""`POST …/ai/run/{model}?queueRequest=true`: hand in a batch, or ask how far one is.

A request is parsed and bound to its caller here and now, and kept by a region until it had room;
what it said comes back rendered as its own answer would have been. The day's quota is charged when
a batch is handed in, with the most that it may take, and gets back what was not used; minutes and
streams do not count, since the queue runs where there is room. Usage goes into the ledger of the
edge where the batch was handed in, whether anybody polls or not (`edge.collector`); who polls there
is told no usage that the ledger lacks.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
from litestar.types import Receive, Scope, Send

from core.batches import (
    NONCE_BYTES,
    QUEUE_PRIORITY,
    BatchState,
    ItemAnswer,
    QueuedItem,
    Submission,
    batch_id,
    region_of,
)
from core.config import Topology
from core.errors import (
    Cancelled,
    InternalError,
    NoCapacity,
    NotFound,
    RegionUnavailable,
    RequestError,
    from_fault,
)
from core.events import Delta, Done, Event, Fault, Finish, event_decoder
from core.types import GenerateRequest, ModelName, RegionName, RequestId, Usage
from edge.api.body import decode
from edge.api.exchange import Desk, refusal_headers
from edge.api.openai_render import usage_out
from edge.api.upload import drain_body, lingers
from edge.api.wire import Wire
from edge.api.workers_ai import RunIntake, check_headers
from edge.api.workers_ai_errors import CloudflareErrors, enveloped, error_out
from edge.api.workers_ai_render import RunRenderer
from edge.api.workers_ai_types import BatchAnswerOut, BatchOut, PollBody, QueuedOut
from edge.collector import DIALECT, Account, Collector
from edge.queue_client import QueueClient, idlest
from edge.routing.regions import Regions
from edge.tenants.door import Caller

_log = logging.getLogger("skerry.batch")


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """What an edge has to remember of a queued request."""

    reference: str
    json_mode: bool


@dataclass(frozen=True, slots=True)
class BatchDesk:
    """What all batches of an edge share. `clients`: the queue of every region."""

    desk: Desk
    topology: Topology
    intake: RunIntake
    regions: Regions
    clients: Mapping[RegionName, QueueClient]
    collector: Collector
    fleet_key: bytes


class BatchExchange:
    """One request to the queue as an ASGI app. `model`: as the path names it."""

    def __init__(self, batches: BatchDesk, model: str) -> None:
        self._batches = batches
        self._desk = batches.desk
        self._model = model
        self._errors = CloudflareErrors()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        wire = Wire(send)
        headers = dict(scope["headers"])
        request_id = RequestId(secrets.token_hex(12))
        told = [(b"x-request-id", request_id.encode())]
        outcome = "ok"
        try:
            caller = self._desk.door.authenticate(headers)
            raw = await self._desk.uploads.read(receive, headers)
            check_headers(headers)
            with self._desk.admission.permit():
                body = await self._answer(raw, request_id, caller)
            await wire.whole(200, body, told)
        except Cancelled as error:
            outcome = error.code
        except RequestError as error:
            outcome = error.code
            await self._refuse(error, wire, told)
            if lingers(error, headers):
                await drain_body(receive)
        except asyncio.CancelledError:
            outcome = Cancelled.code
            raise
        except Exception as error:  # noqa: BLE001 - the last boundary: a bug answers in our form
            outcome = InternalError.code
            _log.exception("bug id=%s kind=%s", request_id, type(error).__name__)
            await self._refuse(InternalError("the edge failed"), wire, told)
        finally:
            self._desk.metrics.requests.labels(DIALECT, outcome).inc()
            _log.info("answered id=%s dialect=%s outcome=%s", request_id, DIALECT, outcome)
        await wire.end()

    async def _answer(self, raw: bytes, request_id: RequestId, caller: Caller) -> bytes:
        asked = decode(dict[str, msgspec.Raw], raw)
        if "request_id" in asked:
            return await self._poll(decode(PollBody, raw).request_id, caller)
        return await self._submit(raw, request_id, caller)

    async def _submit(self, raw: bytes, request_id: RequestId, caller: Caller) -> bytes:
        parsed = self._batches.intake.queued(self._model, raw, request_id)
        requests = [_bound(caller, one.request) for one, _ in parsed]
        charge = await self._desk.budgets.charge_day(caller, request_id, requests)
        items = [
            QueuedItem(
                request=request,
                note=msgspec.msgpack.encode(
                    Note(reference=reference, json_mode=request.response_format is not None)
                ),
                account=msgspec.msgpack.encode(
                    Account(
                        tenant=caller.name,
                        key=caller.key_id,
                        day=charge.day,
                        charged=tokens,
                        worker=caller.worker,
                    )
                ),
            )
            for request, (_, reference), tokens in zip(requests, parsed, charge.tokens, strict=True)
        ]
        model = requests[0].model
        nonce = secrets.token_bytes(NONCE_BYTES)
        try:
            name = await self._hand_in(model, caller.namespace, nonce, items)
        except (RegionUnavailable, NoCapacity):  # no region has it, for certain
            self._desk.budgets.pool.correct_day(caller.name, charge.day, -sum(charge.tokens))
            raise
        return _queued("queued", name, self._model)

    async def _hand_in(
        self, model: ModelName, namespace: str, nonce: bytes, items: Sequence[QueuedItem]
    ) -> str:
        """To the idlest region that takes it; the batch's id."""
        batches = self._batches
        allowed = batches.topology.residency_of(namespace, model)
        failure: RequestError = RegionUnavailable(f"no region has {model!r} now")
        for region in idlest(batches.regions.view(), model, allowed):
            name = batch_id(region, nonce, fleet_key=batches.fleet_key, namespace=namespace)
            batch = Submission(
                id=name,
                namespace=namespace,
                model=model,
                items=tuple(items),
                collector=self._desk.budgets.ledger,
            )
            try:
                await batches.clients[region].submit(batch)
            except (RegionUnavailable, NoCapacity) as error:
                failure = error
                _log.warning("batch not taken region=%s code=%s", region, error.code)
            else:
                _log.info("batch taken region=%s items=%d", region, len(items))
                return name
        raise failure

    async def _poll(self, name: str, caller: Caller) -> bytes:
        namespace = caller.namespace
        key = self._batches.fleet_key
        region = region_of(name, fleet_key=key, namespace=namespace)
        client = self._batches.clients.get(region) if region is not None else None
        if region is None or client is None:
            raise _no_batch()
        try:
            state = await client.state(name, namespace)
        except NotFound as error:
            raise _no_batch() from error
        if state.model != self._batches.topology.canonical_model(self._model):
            raise _no_batch()
        if state.status != "done":
            return _queued(state.status, name, self._model)
        if not state.told:
            await self._batches.collector.collect(region)
        answers = [_read(one) for one in state.answers]
        return enveloped(_batch_out(state, answers))

    async def _refuse(
        self, error: RequestError, wire: Wire, told: list[tuple[bytes, bytes]]
    ) -> None:
        if not wire.started:
            headers = [*told, *refusal_headers(error)]
            await wire.whole(self._errors.status(error), self._errors.body(error), headers)


def _bound(caller: Caller, request: GenerateRequest) -> GenerateRequest:
    request = msgspec.structs.replace(request, priority=QUEUE_PRIORITY)
    return caller.bind(request)


def _no_batch() -> NotFound:
    return NotFound("there is no such batch, or its results were kept long enough")


def _queued(status: str, name: str, model: str) -> bytes:
    return enveloped(QueuedOut(status=status, request_id=name, model=model))


def _read(answer: ItemAnswer) -> list[Event]:
    events = list(event_decoder().feed(answer.events))
    if not events:
        raise InternalError("the region kept no answer")
    return events


def _usage(events: Sequence[Event]) -> Usage:
    end = events[-1]
    return end.usage if isinstance(end, Done) else Usage(prompt_tokens=0, completion_tokens=0)


def _batch_out(state: BatchState, answers: Sequence[Sequence[Event]]) -> BatchOut:
    usages = [_usage(events) for events in answers]
    total = Usage(
        prompt_tokens=sum(one.prompt_tokens for one in usages),
        completion_tokens=sum(one.completion_tokens for one in usages),
        cached_tokens=sum(one.cached_tokens for one in usages),
    )
    outs = [
        _answer_out(number, one, events)
        for number, (one, events) in enumerate(zip(state.answers, answers, strict=True))
    ]
    return BatchOut(responses=outs, usage=usage_out(total))


def _answer_out(number: int, answer: ItemAnswer, events: Sequence[Event]) -> BatchAnswerOut:
    note = msgspec.msgpack.decode(answer.note, type=Note)
    reference = note.reference or None
    end = events[-1]
    try:
        if isinstance(end, Fault):
            raise from_fault(end)
        renderer = RunRenderer(json_mode=note.json_mode)
        renderer.take([event for event in events if isinstance(event, Delta | Finish | Done)])
        result = renderer.result(_usage(events))
    except RequestError as error:
        return BatchAnswerOut(
            id=number,
            result=None,
            success=False,
            errors=[error_out(error)],
            external_reference=reference,
        )
    return BatchAnswerOut(id=number, result=result, success=True, external_reference=reference)
