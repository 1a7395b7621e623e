"""Who is in the region now, and how much work the router has sent to each pool.

Membership follows sessions: a node is in from its Join until its stream ends or three heartbeats
are missed. A node that joins again replaces its old self, known by its epoch; another process with
the name of one that still beats is refused, or the two would evict each other for ever.

Work is counted at dispatch and given back when it ends, never read back from a heartbeat, which is
a moment old when it matters. Only what *other* routers have sent to a node is taken from its
heartbeats: it says that apart, so nothing counts twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from core.config import Region
from core.errors import InvalidRequest
from core.types import BLOCK_TOKENS, ModelName, NodeName, PoolId, Role
from regional.pb import node_pb2 as pb
from regional.rpc import NodeSession

MISSED_HEARTBEATS = 3
MOST_POOLS = 4096
"""Of one node; a count above it is nonsense."""
UNMEASURED_TOKENS_PER_S = 1000.0
"""Stands for a rate that a node has not measured."""
UNMEASURED_KV_BYTES_PER_S = 1e9
UNMEASURED_TIER_BYTES_PER_S = 5e8
HOST_TIER = "host"
"""As nodes name it in their heartbeats."""
SLOW_START_S = 20.0
"""A node takes its whole share after so long."""
HEAD_START_S = 2.0
"""Its first share is that of a node that has served for so long."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A model that a node serves."""

    model: ModelName
    fingerprint: bytes
    context: int
    blocks: int
    block_bytes: int = 0
    """Of one block's KV, over all layers, groups and ranks."""


@dataclass(frozen=True, slots=True)
class NodeView:
    """One pool of a node at one moment: a node has one for each data-parallel rank, and most have
    one. `serial` names the node's session; `changes` counts up whenever the pool may have become
    able to take what it refused before."""

    name: NodeName
    serial: int
    role: Role
    offers: tuple[Offer, ...]
    max_sequences: int
    max_step_tokens: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    dp_rank: int = 0
    draining: bool = False
    prefills: int = 0
    """Prompts that it was given and that are not read yet."""
    prefill_tokens: int = 0
    """Tokens of those prompts that it has to compute."""
    sequences: int = 0
    answer_tokens: int = 0
    """Expected and not generated yet, over its sequences."""
    changes: int = 0
    share: float = 1.0
    """The part of its full work that it should have by now: see `share_of`."""
    kv_bytes_per_s: float = UNMEASURED_KV_BYTES_PER_S
    """At which it sends KV to other nodes."""
    tier_bytes_per_s: float = UNMEASURED_TIER_BYTES_PER_S
    """At which blocks come back from the tiers below its memory."""
    saves: bool = False
    """It keeps in host memory what its answers lose."""
    sends: bool = True
    """It can be asked for what it holds."""

    @property
    def pool(self) -> PoolId:
        return PoolId(self.name, self.dp_rank)

    @property
    def key(self) -> tuple[int, int]:
        """Names this pool in this session."""
        return self.serial, self.dp_rank

    def offer(self, model: ModelName) -> Offer | None:
        return next((offer for offer in self.offers if offer.model == model), None)


@dataclass(frozen=True, slots=True)
class ClusterView:
    """The pools of all nodes at one moment: what placement decides on."""

    nodes: tuple[NodeView, ...] = ()
    startable: frozenset[ModelName] = frozenset()
    """Models of which a node that can answer is started when one is needed."""

    def readers(self) -> list[NodeView]:
        """The nodes that read prompts as their task; decode nodes only where there are no others.
        None that drains."""
        up = [node for node in self.nodes if not node.draining]
        return [node for node in up if node.role is not Role.DECODE] or up

    def decoders(self) -> list[NodeView]:
        return [n for n in self.nodes if not n.draining and n.role is not Role.PREFILL]

    def answering(self, model: ModelName) -> Iterator[NodeView]:
        """Those of `decoders` that serve it; where there is none the model is cold."""
        return (node for node in self.decoders() if node.offer(model))


_NO_WORK = pb.PoolWork()


class Work:
    """What one pool was sent and has not ended. Only `Charge` changes it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.prefills = self.prefill_tokens = self.sequences = self.answer_tokens = 0
        self.changes = 0
        self.clock = clock
        self.changed_at = clock()
        """When something was given back last."""

    def gave_back(self) -> None:
        self.changes += 1
        self.changed_at = self.clock()

    def charge(
        self,
        *,
        prefill_tokens: int | None = None,
        answer_tokens: int | None = None,
        choices: int = 1,
    ) -> Charge:
        """Count a prompt to read, an answer to decode (a sequence for each of its `choices`), or
        both; None is neither."""
        return Charge(self, prefill_tokens, answer_tokens, choices)


class Charge:
    """One attempt's share of a pool's work; each part is given back exactly once."""

    def __init__(
        self, work: Work, prefill_tokens: int | None, answer_tokens: int | None, choices: int
    ) -> None:
        self._work = work
        self._choices = choices
        self._prefill, self._answer = prefill_tokens, answer_tokens
        if prefill_tokens is not None:
            work.prefills += 1
            work.prefill_tokens += prefill_tokens
        if answer_tokens is not None:
            work.sequences += choices
            work.answer_tokens += answer_tokens

    @property
    def changes(self) -> int:
        """The pool's count of changes now."""
        return self._work.changes

    def generated(self) -> None:
        """A step gave this sequence a token."""
        if self._answer:
            self._answer -= 1
            self._work.answer_tokens -= 1

    def prompt_read(self) -> None:
        if self._prefill is not None:
            self._work.prefills -= 1
            self._work.prefill_tokens -= self._prefill
            self._work.gave_back()
            self._prefill = None

    def release(self) -> None:
        self.prompt_read()
        if self._answer is not None:
            self._work.sequences -= self._choices
            self._work.answer_tokens -= self._answer
            self._work.gave_back()
            self._answer = None


class Member:
    """A joined node."""

    def __init__(
        self,
        session: NodeSession,
        role: Role,
        offers: tuple[Offer, ...],
        clock: Callable[[], float],
    ) -> None:
        self.session = session
        self.role = role
        self.offers = offers
        self.beat = pb.Heartbeat()
        self.last_heard = clock()
        self._clock = clock
        self._began_at = self.last_heard - session.join.age_s
        self.leaving = False
        self.pools = tuple(Work(clock) for _ in range(pools_of(session.join)))

    @property
    def age_s(self) -> float:
        """How long the node has served."""
        return self._clock() - self._began_at

    @property
    def placed(self) -> int:
        """Prompts that it reads and sequences that it decodes, also those that other routers sent
        it, as far as its heartbeats tell."""
        works = (*self.pools, *self.beat.others)
        return sum(max(work.prefills, work.sequences) for work in works)

    @property
    def idle_s(self) -> float:
        """Since the last of this router's ended, or since it came; 0 while there is any."""
        changed_at = max(work.changed_at for work in self.pools)
        return 0.0 if self.placed else max(0.0, self._clock() - changed_at)

    def views(self, eldest_s: float = 0.0) -> Iterator[NodeView]:
        """Of its pools. `eldest_s`: how long the region's oldest node has served."""
        share = share_of(self.age_s, eldest_s)
        return (self.view(dp_rank, share) for dp_rank in range(len(self.pools)))

    def view(self, dp_rank: int = 0, share: float = 1.0) -> NodeView:
        join, beat, work = self.session.join, self.beat, self.pools[dp_rank]
        first = join.models[0]
        others = beat.others[dp_rank] if dp_rank < len(beat.others) else _NO_WORK
        return NodeView(
            name=self.session.name,
            serial=self.session.serial,
            dp_rank=dp_rank,
            role=self.role,
            offers=self.offers,
            max_sequences=max(1, join.max_sequences),
            max_step_tokens=max(1, join.max_step_tokens),
            prefill_tokens_per_s=_rate(beat.prefill_tokens_per_s, first.prefill_tokens_per_s),
            decode_tokens_per_s=_rate(beat.decode_tokens_per_s, first.decode_tokens_per_s),
            draining=self.leaving or beat.draining,
            prefills=work.prefills + others.prefills,
            prefill_tokens=work.prefill_tokens + others.prefill_tokens,
            sequences=work.sequences + others.sequences,
            answer_tokens=work.answer_tokens + others.answer_tokens,
            changes=work.changes,
            share=share,
            kv_bytes_per_s=beat.kv_bytes_per_s or UNMEASURED_KV_BYTES_PER_S,
            tier_bytes_per_s=beat.tier_bytes_per_s or UNMEASURED_TIER_BYTES_PER_S,
            sends=not join.scattered,
            saves=any(tier.kind == HOST_TIER and not tier.off for tier in beat.tiers),
        )


class Cluster:
    """Membership of one region. `clock` gives monotonic seconds."""

    def __init__(
        self, region: Region, *, heartbeat_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._patience_s = heartbeat_s * MISSED_HEARTBEATS
        self._clock = clock
        self._members: dict[NodeName, Member] = {}
        self.resting: frozenset[str] = frozenset()
        """Nodes that are to get nothing new, by order of the operator."""
        self.take(region)

    def take(self, region: Region) -> None:
        """Who may join from now on; who has joined stays."""
        self._region = region.name
        self._expected = {node.name: node for node in region.nodes}
        self._started = {
            node.name: ModelName(node.model)
            for node in region.nodes
            if node.model in region.scale and node.role is not Role.PREFILL
        }

    def join(self, session: NodeSession) -> NodeSession | None:
        """Take a node in; gives the session that it replaces. Raises InvalidRequest."""
        join = session.join
        expected = self._expected.get(join.name)
        if expected is None:
            raise InvalidRequest(f"region {self._region!r} has no node {join.name!r}")
        if join.role != expected.role:
            raise InvalidRequest(
                f"node {join.name!r} came as {join.role!r}; the topology says {expected.role!r}"
            )
        offers = tuple(
            Offer(
                ModelName(m.name),
                m.fingerprint,
                m.context,
                m.blocks,
                m.kv_bytes_per_token * BLOCK_TOKENS,
            )
            for m in join.models
        )
        if [offer.model for offer in offers] != [expected.model]:
            raise InvalidRequest(f"node {join.name!r} must offer exactly {expected.model!r}")
        replaced = self._members.get(session.name)
        if replaced is not None and self._holds_name(replaced, join):
            raise InvalidRequest(
                f"the name {join.name!r} is in use by pid {replaced.session.join.pid}, which beats;"
                f" pid {join.pid} may have it when that is gone"
            )
        member = Member(session, expected.role, offers, self._clock)
        self._members[session.name] = member
        return replaced.session if replaced else None

    def heard(self, session: NodeSession, beat: pb.Heartbeat | None = None) -> bool:
        """Anything that a node says shows that it lives. False: it is no member any more."""
        member = self._current(session)
        if member is None:
            return False
        member.last_heard = self._clock()
        if beat is not None:
            member.beat = beat
            for work in member.pools:
                work.changes += 1
        return True

    def leaving(self, session: NodeSession) -> None:
        """The node closes on purpose: nothing new goes there."""
        member = self._current(session)
        if member is not None:
            member.leaving = True

    def remove(self, session: NodeSession) -> bool:
        """False when the session was replaced or removed before."""
        if self._current(session) is None:
            return False
        del self._members[session.name]
        return True

    def silent(self) -> list[NodeSession]:
        """Sessions that have said nothing for three heartbeats."""
        limit = self._clock() - self._patience_s
        return [m.session for m in self._members.values() if m.last_heard < limit]

    def find(self, name: NodeName) -> Member | None:
        return self._members.get(name)

    def members(self) -> Iterable[Member]:
        return self._members.values()

    def view(self) -> ClusterView:
        members = self._members.values()
        eldest_s = max((member.age_s for member in members), default=0.0)
        views = (view for member in members for view in member.views(eldest_s))
        startable = (model for name, model in self._started.items() if name not in self.resting)
        return ClusterView(tuple(map(self._rested, views)), frozenset(startable))

    def _rested(self, view: NodeView) -> NodeView:
        return replace(view, draining=True) if view.name in self.resting else view

    def _holds_name(self, member: Member, newcomer: pb.Join) -> bool:
        """Does it live, and is it somebody else? A process that dials again is the same one."""
        beats = self._clock() - member.last_heard <= self._patience_s
        return beats and not member.session.ended and member.session.join.epoch != newcomer.epoch

    def _current(self, session: NodeSession) -> Member | None:
        member = self._members.get(session.name)
        return member if member is not None and member.session is session else None


def share_of(age_s: float, eldest_s: float) -> float:
    """The part of its full work that a node of this age should have, beside one that has served for
    `eldest_s`. A fresh node has nothing cached and would, being empty, draw everything at once;
    where all are fresh, all are equal."""
    grown_s = min(SLOW_START_S, eldest_s)
    return min(1.0, (age_s + HEAD_START_S) / (grown_s + HEAD_START_S))


def pools_of(join: pb.Join) -> int:
    """A release that knows of one pool only says nothing of them."""
    return min(max(1, join.pools), MOST_POOLS)


def _rate(measured: float, offered: float) -> float:
    return measured if measured > 0 else offered if offered > 0 else UNMEASURED_TOKENS_PER_S
