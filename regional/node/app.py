"""The process of a node front: build everything, serve until a signal or until the rank dies."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from core import log as logs
from core.config import Limits, Model, Node, Scripted, World
from core.engine.messages import RankConfig, ScriptedConfig
from core.errors import ConfigError, NodeLost
from core.kv.ticket import model_digest
from core.kv.transports.base import BlockMemory
from core.kv.transports.tcp import TcpLanding
from core.kv.transports.tcp_send import TcpCarrier
from core.models.source import resolve_source
from core.release import release
from core.text.model import TextModel, load_text
from core.types import BLOCK_TOKENS
from regional.node.front import Front
from regional.node.identity import Identity
from regional.node.prefill import Sending
from regional.node.rank_link import PATIENCE, RANK_COMMAND, Loaded, Patience, RankLink
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
    """The life of a front: start the rank, join the router, serve, drain, leave."""
    stop = _Stop()
    loading = asyncio.create_task(asyncio.to_thread(load_text, setup.source))
    script = _script(setup.model, await loading) if setup.model.engine == "scripted" else None
    config = rank_config(setup, script)
    link = await RankLink.start(config, command=setup.rank_command, patience=setup.patience)
    try:
        try:
            both = await stop.unless_stopped(_both(loading, link))
        except NodeLost as error:
            log.error("%s", error)
            return EXIT_RANK_LOST
        if both is None:
            return 0
        return await _serve(setup, *both, link, stop)
    finally:
        await link.close()


async def _both(loading: asyncio.Task[TextModel], link: RankLink) -> tuple[TextModel, Loaded]:
    """Text and weights, which load side by side."""
    text, loaded = await asyncio.gather(loading, link.ready())
    return text, loaded


async def _serve(
    setup: NodeSetup, text: TextModel, loaded: Loaded, link: RankLink, stop: _Stop
) -> int:
    ready = loaded.ready
    memory = BlockMemory(ready.geometry, loaded.memory)
    model = model_digest(ready.fingerprint)
    try:
        landing = TcpLanding.listen(setup.node.host, time.monotonic)
    except OSError as error:
        raise ConfigError(f"host {setup.node.host!r}: cannot listen: {error}") from error
    try:
        async with asyncio.TaskGroup() as tasks:
            front = Front(
                context=min(ready.context, text.context),
                vocab_size=min(ready.vocab_size, text.vocab_size),
                text=text,
                rank=link,
                sending=Sending(link, memory, TcpCarrier(), model, time.monotonic),
                receiving=Receiving(memory, landing, model, setup.limits.lease_s, time.monotonic),
                tasks=tasks,
            )
            link.attach(front.rank_said)
            identity = Identity(setup.node, setup.secret, ready, release=release())
            session = RouterSession(
                setup.router,
                front,
                join=identity.join,
                heartbeat=lambda: identity.heartbeat(front),
            )
            running = tasks.create_task(session.run(), name="session")
            status = await _until_the_end(front, session, link, stop)
            running.cancel()
    finally:
        landing.close()
    return status


async def _until_the_end(front: Front, session: RouterSession, link: RankLink, stop: _Stop) -> int:
    """Wait for a stop signal or the end of the rank, and take leave accordingly."""
    lost = asyncio.create_task(link.lost())
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
            await session.leave("the rank died", timeout_s=GOODBYE_S)
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


def rank_config(setup: NodeSetup, script: ScriptedConfig | None) -> RankConfig:
    """What the rank is started with; the socket's descriptor is filled in by `RankLink.start`."""
    node, model = setup.node, setup.model
    return RankConfig(
        node=node.name,
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
    )
