"""The process of a node front: build everything, serve until a signal or until a rank dies."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from core import log as logs
from core.config import Limits, Model, Node, Scripted, World
from core.engine.messages import RankConfig, ScriptedConfig
from core.errors import ConfigError, NodeLost
from core.kv.shards import PoolMemory
from core.kv.ticket import model_digest
from core.kv.transports.base import BlockMemory
from core.kv.transports.fan import FanCarrier
from core.kv.transports.tcp import TcpLanding
from core.kv.transports.tcp_send import TcpCarrier
from core.models.numbers import check_plan
from core.models.source import resolve_source
from core.parallel import ONE_HOST, Hosts, refusal
from core.release import release
from core.text.model import TextModel, load_text
from core.types import BLOCK_TOKENS
from regional.node.front import Front
from regional.node.identity import Identity
from regional.node.pool import Pool
from regional.node.prefill import Sending
from regional.node.rank_link import PATIENCE, RANK_COMMAND, Loaded, Patience
from regional.node.ranks import Ranks
from regional.node.receiving import Receiving
from regional.node.session import RouterSession

log = logging.getLogger("skerry.node")

DRAIN_GRACE_S = 10.0
"""Running requests get this long after a stop signal; a second signal cuts it short."""
GOODBYE_S = 1.0
EXIT_RANK_LOST = 1

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class NodeSetup:
    """What a front is told: its part of the topology."""

    node: Node
    model: Model
    limits: Limits
    secret: bytes
    source: Path
    router: str
    rank_command: Sequence[str] = RANK_COMMAND
    patience: Patience = PATIENCE
    hosts: Hosts = ONE_HOST


def run_node(world: World, name: str) -> int:
    """Run the node `name` until it is stopped; returns the exit status. Raises ConfigError."""
    region, node = world.topology.node(name)
    logs.setup(f"node/{name}")
    setup = NodeSetup(
        node=node,
        model=world.topology.models[node.model],
        limits=world.topology.limits,
        secret=world.secret("region"),
        source=resolve_source(world.model_source(node.model)),
        router=region.grpc,
    )
    return asyncio.run(serve(setup))


async def serve(setup: NodeSetup) -> int:
    """The life of a front: start the ranks, join the router, serve, drain, leave. Raises
    ConfigError."""
    stop = _Stop()
    _check_plan(setup)
    loading = asyncio.create_task(asyncio.to_thread(load_text, setup.source))
    script = _script(setup.model, await loading) if setup.model.engine == "scripted" else None
    config = rank_config(setup, script)
    ranks = await Ranks.start(
        config, setup.hosts, command=setup.rank_command, patience=setup.patience
    )
    try:
        try:
            both = await stop.unless_stopped(_both(loading, ranks))
        except NodeLost as error:
            log.error("%s", error)
            return EXIT_RANK_LOST
        if both is None:
            return 0
        return await _serve(setup, *both, ranks, stop)
    finally:
        await ranks.close()


async def _both(
    loading: asyncio.Task[TextModel], ranks: Ranks
) -> tuple[TextModel, tuple[Loaded, ...]]:
    """Text and weights, which load side by side."""
    text, loaded = await asyncio.gather(loading, ranks.ready())
    return text, loaded


async def _serve(
    setup: NodeSetup, text: TextModel, loaded: Sequence[Loaded], ranks: Ranks, stop: _Stop
) -> int:
    plan = ranks.plan
    ready = [one.ready for one in loaded]
    try:
        landing = TcpLanding.listen(setup.node.host, time.monotonic)
    except OSError as error:
        raise ConfigError(f"host {setup.node.host!r}: cannot listen: {error}") from error
    try:
        async with asyncio.TaskGroup() as tasks:
            pools = [
                _pool(number, setup, ranks, loaded, landing) for number in range(plan.dp_attention)
            ]
            front = Front(
                context=min(text.context, *(one.context for one in ready)),
                vocab_size=min(text.vocab_size, *(one.vocab_size for one in ready)),
                text=text,
                pools=pools,
                clock=time.monotonic,
                tasks=tasks,
            )
            for number in range(plan.dp_attention):
                leader = ranks.links[plan.leader(number)]
                leader.attach(partial(front.rank_said, number))
            identity = Identity(setup.node, setup.secret, ranks, ready, release=release())
            session = RouterSession(
                setup.router,
                front,
                join=identity.join,
                heartbeat=lambda: identity.heartbeat(front),
            )
            running = tasks.create_task(session.run(), name="session")
            status = await _until_the_end(front, session, ranks, stop)
            running.cancel()
    finally:
        landing.close()
    return status


def _pool(
    number: int, setup: NodeSetup, ranks: Ranks, loaded: Sequence[Loaded], landing: TcpLanding
) -> Pool:
    """One data-parallel rank's pool, spread over its ranks."""
    leader = ranks.links[ranks.plan.leader(number)]
    model = model_digest(loaded[0].ready.fingerprint)
    memory = PoolMemory(
        {
            rank: BlockMemory(loaded[rank].ready.geometry, loaded[rank].memory)
            for rank in ranks.plan.members(number)
        }
    )
    return Pool(
        number,
        leader,
        Sending(leader, memory, FanCarrier(TcpCarrier()), model, time.monotonic),
        Receiving(memory, landing, model, setup.limits.lease_s, time.monotonic),
    )


async def _until_the_end(front: Front, session: RouterSession, ranks: Ranks, stop: _Stop) -> int:
    """Wait for a stop signal or the end of a rank, and take leave accordingly."""
    lost = asyncio.create_task(ranks.lost())
    asked = asyncio.create_task(stop.asked.wait())
    hurried = asyncio.create_task(stop.hurried.wait())
    idle: asyncio.Task[bool] | None = None
    try:
        await asyncio.wait({lost, asked}, return_when=asyncio.FIRST_COMPLETED)
        if not lost.done():
            front.drain(DRAIN_GRACE_S)
            session.beat()
            idle = asyncio.create_task(front.idle.wait())
            await asyncio.wait(
                {lost, hurried, idle},
                timeout=DRAIN_GRACE_S + GOODBYE_S,
                return_when=asyncio.FIRST_COMPLETED,
            )
        if lost.done():
            error = lost.result()
            log.error("%s", error)
            front.fail_all(error)
            await session.leave("a rank died", timeout_s=GOODBYE_S)
            return EXIT_RANK_LOST
        await session.leave("stopped", timeout_s=GOODBYE_S)
        return 0
    finally:
        for task in (lost, asked, hurried, idle):
            if task is not None:
                task.cancel()


class _Stop:
    """SIGTERM and SIGINT: the first asks to stop, the second not to wait any longer."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.hurried = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled)

    def _signalled(self) -> None:
        if self.asked.is_set():
            self.hurried.set()
        self.asked.set()

    async def unless_stopped(self, coroutine: Coroutine[Any, Any, _T]) -> _T | None:
        """What `coroutine` gives; None when a stop signal comes first."""
        work = asyncio.create_task(coroutine)
        asked = asyncio.create_task(self.asked.wait())
        try:
            await asyncio.wait({work, asked}, return_when=asyncio.FIRST_COMPLETED)
            return await work if work.done() else None
        finally:
            work.cancel()
            asked.cancel()


def _check_plan(setup: NodeSetup) -> None:
    """Before a weight is read. Raises ConfigError."""
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
        threads=node.threads,
        kv_blocks=-(-node.kv_tokens // BLOCK_TOKENS),
        max_sequences=node.max_sequences,
        max_step_tokens=node.max_step_tokens,
        speculate=node.speculate,
        scripted=script,
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
