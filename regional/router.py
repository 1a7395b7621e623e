"""The router's decisions brought to life: nodes come in through sessions, requests through `serve`.

Every request ends with `Done` or `Fault` unless its client is gone, and whatever ends it, each
node that was told of it is told to forget it and its share of their work is given back.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable

from core.config import Limits, Region
from core.errors import (
    Cancelled,
    DeadlineExceeded,
    Draining,
    IncompleteStream,
    InternalError,
    InvalidRequest,
    RequestError,
    from_fault,
    to_fault,
)  # fmt: skip
from core.events import Done, encode_frame
from core.metrics import RouterMetrics
from core.naps import nap
from core.telemetry import SILENT, Telemetry
from core.types import GenerateRequest, ModelName, PoolId, RequestId
from regional.cluster import Cluster, Member, pools_of
from regional.demand import Demand
from regional.dispatch import Dispatcher, Placed
from regional.hits import Hits
from regional.kv_index import KvIndex
from regional.life import Body, Life, Write
from regional.pb import node_pb2 as pb
from regional.prefixes import Prefixes, request_ids, standing_blocks
from regional.purging import Purges
from regional.reading import Reader, Reading
from regional.record import Record
from regional.rpc import NodeSession

log = logging.getLogger("skerry.router")

LAST_WORD_S = 5.0
"""How long a client that does not read may hold up its own Fault."""


class Router:
    """One region's router; a `rpc.SessionOwner`. `changed` is called whenever its state moved."""

    def __init__(
        self,
        region: Region,
        limits: Limits,
        *,
        reader: Reader,
        metrics: RouterMetrics,
        prefixes: Prefixes,
        changed: Callable[[], None],
        cold: Callable[[ModelName], None] = lambda _: None,
        telemetry: Telemetry = SILENT,
    ) -> None:
        """`cold`: see `dispatch.Dispatcher`."""
        self._region = region.name
        self._telemetry = telemetry
        self.cluster = Cluster(region, heartbeat_s=limits.heartbeat_s)
        self.index = KvIndex()
        self.dispatcher = Dispatcher(
            self.cluster,
            self.index,
            limit=limits.queue,
            split_min_tokens=region.split_min_tokens,
            changed=changed,
            cold=cold,
        )
        self.demand = Demand(time.monotonic)
        self.hits = Hits(metrics)
        self.purges = Purges(lambda: (member.session for member in self.cluster.members()))
        self.draining = False
        self._limits = limits
        self._reader = reader
        self._metrics = metrics
        self._counted: frozenset[str] = frozenset()
        self._count(region)
        self._prefixes = prefixes
        self._changed = changed
        self._lives: set[Life] = set()
        self._by_id: dict[RequestId, Life] = {}
        self._attempts: dict[str, Life] = {}
        self._ages = itertools.count(1)
        self._numbers = itertools.count(1)
        self._idle = asyncio.Event()
        self._idle.set()

    # ------------------------------------------------------------------ requests

    @property
    def active(self) -> int:
        return len(self._lives)

    async def serve(self, request: GenerateRequest, write: Write) -> None:
        """Write the request's whole stream. Cancelled when the client is gone, or raises the
        ConnectionError with which `write` says so."""
        life = self._open(request, write)
        outcome = Cancelled.code
        try:
            error = await self._played(life)
            if error is not None:
                async with asyncio.timeout(LAST_WORD_S):
                    await write(encode_frame(to_fault(error)))
            outcome = _outcome(life, error)
        except TimeoutError:
            raise ConnectionError("the client does not read") from None
        finally:
            self._close(life, outcome)

    def cancel(self, request_id: RequestId) -> None:
        """Idempotent; an unknown id is nothing."""
        if (life := self._by_id.get(request_id)) is not None:
            life.stop(Cancelled("the request was cancelled"))

    def stop_namespace(self, namespace: str) -> int:
        """End all that runs for it: how many requests that were."""
        lives = [one for one in self._lives if one.request.namespace == namespace]
        for life in lives:
            life.stop(Cancelled("what is kept of this namespace is purged"))
        return len(lives)

    async def drain(self, grace_s: float) -> None:
        """Refuse what is new, let what runs end, stop the rest after `grace_s`."""
        self.draining = True
        self._changed()
        try:
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        except TimeoutError:
            log.warning("%d requests did not end in %g s", self.active, grace_s)
            self.break_off()
            await self._idle.wait()

    def break_off(self) -> None:
        """End all that runs now; its callers are told why."""
        for life in tuple(self._lives):
            life.stop(Draining("the router stops"))

    async def _played(self, life: Life) -> RequestError | None:
        """The error that is still to be told, None when the stream has its end."""
        request_id = life.request.id
        try:
            if self.draining:
                raise Draining("this router is shutting down")
            await life.run()
        except RequestError as error:
            why = f": {error.message}" if error.told else ""  # ours, and nothing of the prompt
            log.info("request %s ends with %s%s", request_id, error.code, why)
            return error
        except TimeoutError:
            log.info("request %s passed its deadline", request_id)
            return DeadlineExceeded("the request's time is over")
        except ConnectionError:
            raise
        except Exception as error:  # noqa: BLE001 - a stream must end with a name, whatever failed
            # No message and no traceback: they may quote the prompt.
            where = _innermost(error)
            log.error("request %s: %s at %s", request_id, type(error).__name__, where)
            return InternalError("the router failed on this request")
        return None

    def _open(self, request: GenerateRequest, write: Write) -> Life:
        earlier = self._by_id.get(request.id)
        if earlier is not None:
            earlier.stop(Cancelled("the same request came again"))
        life = Life(
            request,
            write,
            age=next(self._ages),
            deadline_s=min(request.deadline_s, self._limits.deadline_s),
            reader=self._reader,
            dispatcher=self.dispatcher,
            attempts=self._attempts,
            number=self._numbers.__next__,
            metrics=self._metrics,
            record=Record(request, self._region, self._telemetry),
            read=self._prompt_read,
        )
        self._prefixes.asked(request_ids(request), time.monotonic())
        self._lives.add(life)
        self.demand.came(request.model)
        self._by_id[request.id] = life
        self._idle.clear()
        self._changed()
        return life

    def _close(self, life: Life, outcome: str) -> None:
        self._lives.discard(life)
        self.demand.went(life.request.model)
        if self._by_id.get(life.request.id) is life:
            del self._by_id[life.request.id]
        if not self._lives:
            self._idle.set()
        self._metrics.requests.labels(outcome).inc()
        done = life.closing if isinstance(life.closing, Done) else None
        life.record.close(outcome, done)
        if done is not None:
            self._observe(done)
            self.demand.answered(life.request.model, done.timings)
            if life.placed is not None:
                self.hits.answered(life.placed, done)
        self._changed()

    def _prompt_read(self, request: GenerateRequest, reading: Reading, placed: Placed) -> None:
        member = self.cluster.find(placed.placement.decode.node)
        offer = member.view().offer(reading.request.model) if member is not None else None
        if offer is None:
            return  # the node left while it read: nothing of it is held
        hashes = reading.hashes(offer.fingerprint)
        stands = standing_blocks(request, hashes, len(reading.token_ids))
        self._prefixes.read(request_ids(request), stands)

    def _observe(self, done: Done) -> None:
        usage, timings, metrics = done.usage, done.timings, self._metrics
        metrics.prefill_seconds.observe(timings.prefill_s)
        if usage.completion_tokens > 1:
            metrics.token_seconds.observe(timings.decode_s / (usage.completion_tokens - 1))
        metrics.kv_bytes.inc(timings.kv_bytes)

    # ------------------------------------------------------------------ nodes

    async def watch(self) -> None:
        """Lose the nodes that fall silent. Runs until cancelled."""
        suspects: set[NodeSession] = set()
        while True:
            if not await nap(self._limits.heartbeat_s / 2):
                continue  # what they said meanwhile is still to be read
            silent = set(self.cluster.silent())
            for session in silent & suspects:
                self._lose(session, "three heartbeats were missed")
            # Whoever was kept from reading for a moment sees silence as well, once.
            suspects = silent - suspects

    def take(self, region: Region) -> None:
        """Go on with what a changed topology says of the region."""
        self.cluster.take(region)
        self.dispatcher.split_min_tokens = region.split_min_tokens
        self._count(region)
        self.dispatcher.poke()

    def joined(self, session: NodeSession) -> None:
        before = self.cluster.find(session.name)
        try:
            replaced = self.cluster.join(session)
        except InvalidRequest as error:
            log.warning("a node is refused: %s", error)
            raise
        if replaced is not None:
            self._count_lost(before)
            self._forget(replaced, "the node joined again")
            for pool in _pools(replaced):
                self.index.leave(pool)
        pools = _pools(session)
        for pool in pools:
            models = session.join.models
            below = sum(one.tier_blocks for one in models)
            self.index.join(pool, limit=sum(one.blocks for one in models), below=below)
        log.info("node %s joined as %s, pid %d", session.name, session.join.role, session.join.pid)
        self.dispatcher.poke()

    def received(self, session: NodeSession, message: pb.NodeMessage) -> None:
        kind = message.WhichOneof("body")
        beat = message.heartbeat if kind == "heartbeat" else None
        if not self.cluster.heard(session, beat):
            return
        match kind:
            case "step_output":
                for output in message.step_output.sequences:
                    self._tell(session, output)
            case "reserved":
                self._tell(session, message.reserved)
            case "prefill_done":
                self._tell(session, message.prefill_done)
            case "pulling":
                self._tell(session, message.pulling)
            case "sent":
                self._tell(session, message.sent)
            case "failed":
                if message.failed.code == Draining.code:
                    self.cluster.leaving(session)  # its heartbeat may say so only after this
                self._tell(session, message.failed)
            case "purged":
                self.purges.heard(session, message.purged)
            case "preempted":
                self._tell(session, message.preempted)
            case "cache_events":
                self._cache_events(session, message.cache_events)
            case "heartbeat":
                self.dispatcher.poke()
            case "leaving":
                log.info("node %s is leaving: %s", session.name, message.leaving.reason)
                self.cluster.leaving(session)
                self.dispatcher.poke()
            case "join":
                self._lose(session, "it said Join twice")

    def ended(self, session: NodeSession) -> None:
        self._lose(session, session.end_reason or "")

    def _lose(self, session: NodeSession, reason: str) -> None:
        member = self.cluster.find(session.name)
        if self.cluster.remove(session):
            self._count_lost(member)
            for pool in _pools(session):
                self.index.leave(pool)
            log.warning("node %s is lost: %s", session.name, reason)
            self._forget(session, reason)
            self.dispatcher.poke()

    def _count(self, region: Region) -> None:
        """The losses of its nodes: a series from the start, so that the first one counts; none for
        who is not among them any more."""
        names = frozenset(node.name for node in region.nodes)
        for gone in self._counted - names:
            self._metrics.lost_nodes.remove(gone)
        for name in names:
            self._metrics.lost_nodes.labels(name)
        self._counted = names

    def _count_lost(self, member: Member | None) -> None:
        if member is not None and not member.leaving:
            self._metrics.lost_nodes.labels(member.session.name).inc()

    def _forget(self, session: NodeSession, reason: str) -> None:
        session.end(reason)
        for life in tuple(self._attempts.values()):
            life.lost(session)

    def _tell(self, session: NodeSession, body: Body) -> None:
        """Late words about an attempt that is over reach nobody."""
        life = self._attempts.get(body.attempt_id)
        if life is not None:
            life.hear(session, body)

    def _cache_events(self, session: NodeSession, events: pb.CacheEvents) -> None:
        pool = PoolId(session.name, events.pool)
        was_known = self.index.known(pool, events.tier)
        known = self.index.apply(
            pool,
            sequence=events.sequence,
            snapshot=events.snapshot,
            stored=events.stored,
            evicted=events.evicted,
            tier=events.tier,
        )
        if was_known and not known:
            log.warning("node %s: cache events do not add up; it shall tell anew", session.name)
            session.send(pb.RouterMessage(recount=pb.Recount()))


def _pools(session: NodeSession) -> list[PoolId]:
    return [PoolId(session.name, dp_rank) for dp_rank in range(pools_of(session.join))]


def _outcome(life: Life, error: RequestError | None) -> str:
    if error is not None:
        return error.code
    if life.closing is None:
        return IncompleteStream.code
    return "ok" if isinstance(life.closing, Done) else from_fault(life.closing).code


def _innermost(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return "?"
    code = trace.tb_frame.f_code
    return f"{code.co_filename}:{trace.tb_lineno}"
