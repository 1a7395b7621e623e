"""The process of a node front: build everything, serve until a signal or until a rank dies."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from core import log as logs
from core.config import Limits, Model, Node, Observe, Scripted, World
from core.engine.messages import RankConfig, ScriptedConfig
from core.errors import ConfigError, Draining, NodeLost
from core.kv.transports.ways import Tls, Ways, check
from core.models.numbers import check_plan
from core.models.source import resolve_source
from core.parallel import ONE_HOST, Hosts, refusal
from core.release import release
from core.telemetry import open_telemetry
from core.text.model import TextModel, load_text
from core.tls import Credentials, credentials_of, kept_fresh
from core.types import BLOCK_TOKENS
from regional.node.bandwidth import Bandwidth, MeasuredCarrier
from regional.node.front import Front
from regional.node.hosts import outpost
from regional.node.hosts.messages import Rank
from regional.node.hosts.outposts import Outposts, RemoteHost
from regional.node.hosts.rendezvous import hosts_of
from regional.node.identity import Identity
from regional.node.pool import Pool
from regional.node.rank_link import PATIENCE, RANK_COMMAND, Loaded, Patience, RankLink
from regional.node.ranks import Ranks, agree
from regional.node.receiving import OwnHost, Receiving
from regional.node.seams import Sending
from regional.node.sessions import RouterSessions
from regional.node.stopping import Stopping
from regional.node.tiers.node_tiers import NodeTiers
from regional.node.tiers.opening import NO_TIERS, TierSetup, open_tiers, tier_setup

log = logging.getLogger("skerry.node")

DRAIN_GRACE_S = 10.0
"""Running requests get this long after a stop signal; a second signal cuts it short."""
GOODBYE_S = 5.0
"""A router has so long to read the last words, among them the ends of answers."""
HURRIED_GOODBYE_S = 1.0
"""From a second signal on."""
EXIT_RANK_LOST = 1


@dataclass(frozen=True, slots=True)
class NodeSetup:
    """What a front is told: its part of the topology."""

    node: Node
    model: Model
    limits: Limits
    secret: bytes
    source: Path
    routers: tuple[str, ...]
    rank_command: Sequence[str] = RANK_COMMAND
    patience: Patience = PATIENCE
    hosts: Hosts = ONE_HOST
    tiers: TierSetup = NO_TIERS
    credentials: Credentials | None = None
    observe: Observe = field(default_factory=Observe)


def run_node(world: World, name: str) -> int:
    """Run the node `name` until it is stopped; returns the exit status. Raises ConfigError."""
    region, node = world.topology.node(name)
    logs.setup(f"node/{name}", form=world.topology.observe.log)
    setup = NodeSetup(
        node=node,
        model=world.topology.models[node.model],
        limits=world.topology.limits,
        secret=world.secret("region"),
        source=resolve_source(world.model_source(node.model)),
        routers=tuple(router.grpc for _, router in region.doors),
        hosts=hosts_of(
            node,
            os.environ,
            world.secret("region"),
            trusted=world.topology.routing.network_trusted,
        ),
        tiers=tier_setup(world, node),
        credentials=credentials_of(world, name),
        observe=world.topology.observe,
    )
    return asyncio.run(serve(setup))


async def serve(setup: NodeSetup) -> int:
    """The life of a front: start the ranks, join the router, serve, drain, leave. Raises
    ConfigError."""
    stop = Stopping()
    _check_plan(setup)
    loading = asyncio.create_task(asyncio.to_thread(load_text, setup.source))
    script = _script(setup.model, await loading) if setup.model.engine == "scripted" else None
    config = rank_config(setup, script)
    outposts = await Outposts.listen(setup.node.name, setup.hosts)
    ranks = await Ranks.start(
        config, setup.hosts, command=setup.rank_command, patience=setup.patience
    )
    try:
        if setup.hosts.index:
            return await outpost.run(
                setup.node.name,
                setup.hosts,
                ranks,
                stop,
                setup.node.transports,
                setup.credentials,
            )
        try:
            all_ = await stop.unless_stopped(_loaded(loading, ranks, outposts))
        except NodeLost as error:
            log.error("%s", error)
            return EXIT_RANK_LOST
        if all_ is None:
            return 0
        return await _serve(setup, *all_, ranks, outposts, stop)
    finally:
        await outposts.close()
        await ranks.close()


async def _loaded(
    loading: asyncio.Task[TextModel], ranks: Ranks, outposts: Outposts
) -> tuple[TextModel, Mapping[int, Loaded]]:
    """Text and weights, which load side by side; of this host's ranks."""
    text, loaded, _ = await asyncio.gather(loading, ranks.ready(), outposts.ready())
    own = dict(enumerate(loaded))
    agree([*(one.ready for one in loaded), *(one.ready for one in outposts.ranks)])
    return text, own


async def _serve(
    setup: NodeSetup,
    text: TextModel,
    loaded: Mapping[int, Loaded],
    ranks: Ranks,
    outposts: Outposts,
    stop: Stopping,
) -> int:
    plan = ranks.plan
    everyone = [
        *(Rank(rank, ranks.links[rank].pid, one.ready) for rank, one in loaded.items()),
        *outposts.ranks,
    ]
    ready = [one.ready for one in everyone]
    mine = setup.credentials
    ways = Ways(setup.node.host, setup.node.transports, clock=time.monotonic, tls=Tls.of(mine))
    own = outpost.own_hosts(plan, loaded, ways.landing)
    tiers: NodeTiers | None = None
    try:
        async with (
            open_telemetry(setup.observe.otlp, "node", setup.node.name) as telemetry,
            kept_fresh(mine),
            asyncio.TaskGroup() as tasks,
        ):
            bandwidth = Bandwidth()
            pools = [
                _pool(number, setup, ranks.links[plan.leader(number)], own[number],
                      outposts.of_pool(plan, number), ways, bandwidth)
                for number in range(plan.dp_attention)
            ]  # fmt: skip
            fingerprint = ready[0].fingerprint
            tiers = await open_tiers(setup.tiers, pools, fingerprint, lambda one: front.tell(one))
            front = Front(
                context=min(text.context_limit, *(one.context for one in ready)),
                vocab_size=min(text.vocab_size, *(one.vocab_size for one in ready)),
                text=text,
                pools=pools,
                clock=time.monotonic,
                tasks=tasks,
                tiers=tiers,
                name=setup.node.name,
                telemetry=telemetry,
            )
            for number in range(plan.dp_attention):
                leader = ranks.links[plan.leader(number)]
                leader.attach(partial(front.rank_said, number))
            identity = Identity(
                setup.node,
                setup.secret,
                plan,
                everyone,
                tiers=tiers,
                release=release(),
                scattered=bool(outposts.ranks),
            )
            sessions = RouterSessions(
                setup.routers,
                front,
                pools=plan.dp_attention,
                join=identity.join,
                heartbeat=lambda: identity.heartbeat(front, bandwidth.bytes_per_s),
                credentials=mine,
            )
            running = tasks.create_task(sessions.run(), name="sessions")
            keeping = tasks.create_task(tiers.run(), name="tiers")
            status = await until_the_end(
                front, sessions, _first(ranks, outposts), stop, setup.limits.deadline_s
            )
            running.cancel()
            keeping.cancel()
    finally:
        ways.close()
        if tiers is not None:
            await tiers.close()
    return status


async def _first(ranks: Ranks, outposts: Outposts) -> NodeLost:
    """The first of all that goes."""
    ends = [asyncio.create_task(ranks.lost()), asyncio.create_task(outposts.lost())]
    try:
        done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        for end in ends:
            end.cancel()


def _pool(
    number: int,
    setup: NodeSetup,
    leader: RankLink,
    own: OwnHost,
    others: Sequence[RemoteHost],
    ways: Ways,
    bandwidth: Bandwidth,
) -> Pool:
    """One data-parallel rank's pool, spread over its ranks."""
    carrier = MeasuredCarrier(ways.carrier(own.memory), bandwidth, time.monotonic)
    return Pool(
        number,
        leader,
        Sending(leader, own.memory, carrier, own.model, time.monotonic),
        Receiving([own, *others], setup.limits.lease_s),
    )


async def until_the_end(
    front: Front,
    sessions: RouterSessions,
    ends: Coroutine[Any, Any, NodeLost],
    stop: Stopping,
    longest_s: float,
) -> int:
    """Wait for a signal or the end of a rank, and take leave accordingly. `longest_s`: no answer
    lasts longer than this."""
    lost = asyncio.create_task(ends)
    asked = asyncio.create_task(stop.asked.wait())
    hurried = asyncio.create_task(stop.hurried.wait())
    retired = asyncio.create_task(stop.retired.wait())
    idle: asyncio.Task[bool] | None = None
    try:
        await asyncio.wait({lost, asked, retired}, return_when=asyncio.FIRST_COMPLETED)
        if retired.done() and not lost.done():
            front.close()
            sessions.beat()
            idle = asyncio.create_task(front.idle.wait())
            await asyncio.wait(
                {lost, asked, idle}, timeout=longest_s, return_when=asyncio.FIRST_COMPLETED
            )
        if not lost.done():
            front.drain(DRAIN_GRACE_S)
            sessions.beat()
            idle = idle or asyncio.create_task(front.idle.wait())
            await asyncio.wait(
                {lost, hurried, idle},
                timeout=DRAIN_GRACE_S + GOODBYE_S,
                return_when=asyncio.FIRST_COMPLETED,
            )
        if lost.done():
            error = lost.result()
            log.error("%s", error)
            front.fail_all(error)
            await _take_leave(sessions, "a rank died", hurried)
            return EXIT_RANK_LOST
        front.give_up(Draining("the node stops"))
        await _take_leave(sessions, "stopped", hurried)
        return 0
    finally:
        for task in (lost, asked, hurried, retired, idle):
            if task is not None:
                task.cancel()


async def _take_leave(sessions: RouterSessions, reason: str, hurried: asyncio.Task[bool]) -> None:
    leaving = asyncio.create_task(sessions.leave(reason, timeout_s=GOODBYE_S))
    try:
        await asyncio.wait({leaving, hurried}, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait({leaving}, timeout=HURRIED_GOODBYE_S)
        if leaving.done():
            leaving.result()
    finally:
        leaving.cancel()


def _check_plan(setup: NodeSetup) -> None:
    """Before a weight is read. Raises ConfigError."""
    check(setup.node.transports)
    plan, model = setup.node.parallel, setup.model
    if model.engine == "scripted":
        why = refusal(plan, (model.scripted or Scripted()).numbers)
        if why is not None:
            raise ConfigError(f"node {setup.node.name!r}: {why}")
    else:
        check_plan(plan, setup.source)


def rank_config(setup: NodeSetup, script: ScriptedConfig | None) -> RankConfig:
    """What the ranks are started with; what differs among them is filled in by `Ranks.start`."""
    node, model = setup.node, setup.model
    return RankConfig(
        node=node.name,
        plan=node.parallel,
        socket_fd=-1,
        engine=model.engine,
        source=str(setup.source),
        context=model.context,
        dtype=node.dtype,
        device=node.device,
        gpus=node.gpus,
        depth=2 if node.device == "cuda" else 1,  # a GPU is to have its next step already
        threads=node.threads,
        kv_blocks=-(-node.kv_tokens // BLOCK_TOKENS),
        max_sequences=node.max_sequences,
        max_step_tokens=node.max_step_tokens,
        speculate=node.speculate,
        scripted=script,
        log=setup.observe.log,
    )


def _script(model: Model, text: TextModel) -> ScriptedConfig:
    """A scripted rank has no tokenizer: which ids it must not play, and which one ends, we say."""
    pace = model.scripted or Scripted()
    return ScriptedConfig(
        step_s=pace.step_ms / 1000,
        prefill_tokens_per_s=pace.prefill_tokens_per_s,
        repeat=pace.repeat,
        skip_ids=tuple(sorted(text.control_ids)),
        end_id=min(text.end_ids),
        block_bytes=pace.block_bytes,
        layers=pace.layers,
        kv_heads=pace.kv_heads,
    )
