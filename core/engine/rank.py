"""`python -m core.engine.rank`: one rank of a node, a process without asyncio.

Its configuration is JSON in SKERRY_RANK; it speaks `messages` over the inherited socket and lives
as long as the front holds the other end. Exit status: 0 the front closed or asked for it, 2 the
configuration is unusable, 3 the model did not load, 4 the engine or the protocol failed, for which
one line on stderr says why; 5 another rank of the node has gone, of which the front tells.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from core import log
from core.engine.drafter import PromptLookup
from core.engine.engine import Engine
from core.engine.follow import follow
from core.engine.link import Bell, Link
from core.engine.messages import EXIT_PEER, LoadFailed, Loading, Pulse, RankConfig, Ready
from core.engine.plan import LoadedModel, Runner
from core.errors import ConfigError, InternalError, NodeLost, SkerryError

_log = logging.getLogger("skerry.rank")

_PROGRESS_STEP = 0.01
STUCK_S = 600.0
"""A step that takes longer than this will not end any more."""

EXIT_CONFIG = 2
EXIT_LOAD = 3
EXIT_ENGINE = 4


def main(makers: Makers | None = None) -> int:
    """`makers` of None: those below."""
    try:
        config = msgspec.json.decode(os.environ.get("SKERRY_RANK", ""), type=RankConfig)
        sock = socket.socket(fileno=config.socket_fd)
    except (msgspec.MsgspecError, OSError) as error:
        print(f"skerry rank: SKERRY_RANK does not describe a rank: {error}", file=sys.stderr)  # noqa: T201 — there is no log before there is a configuration
        return EXIT_CONFIG
    log.setup(f"rank/{config.node}.{config.rank}", form=config.log)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the front, which drains first
    status = serve(config, sock, makers)
    if config.plan.ranks > 1:  # a thread may wait for another rank, for ever
        logging.shutdown()
        os._exit(status)
    return status


def serve(config: RankConfig, sock: socket.socket, makers: Makers | None = None) -> int:
    """Load, report, run until the front goes; the exit status. Closes `sock`."""
    makers = makers or Makers(make_runner, make_follower)
    link = Link(sock)
    bell = Bell()
    try:
        place = config.plan.place(config.rank)
        if config.plan.leader(place.dp_rank) == config.rank:
            return _lead(config, link, bell, makers.runner)
        return _follow(config, link, bell, makers.follower)
    except NodeLost as error:
        _log.debug("%s", error)
        return EXIT_PEER
    except ConfigError as error:
        return _load_failed(link, str(error))
    except SkerryError as error:
        _log.error("rank stopped: %s", error)
        return EXIT_ENGINE
    finally:
        link.close()
        bell.close()


def _lead(config: RankConfig, link: Link, bell: Bell, make: Callable[[RankConfig], Runner]) -> int:
    """The life of a rank that schedules."""
    runner = make(config)
    try:
        loaded = _load(runner, link)
        return EXIT_LOAD if loaded is None else _run(config, link, bell, runner, loaded)
    finally:
        runner.close()


def _follow(
    config: RankConfig, link: Link, bell: Bell, make: Callable[[RankConfig], Follower]
) -> int:
    """The life of a rank that computes what another one says."""
    follower = make(config)
    try:
        loaded = _load(follower, link)
        if loaded is None:
            return EXIT_LOAD
        link.send_with_descriptor(_ready(config, loaded, loaded.context), loaded.memory_fd)
        return follow(link, bell, follower.compute, pulse_s=config.pulse_s)
    finally:
        follower.close()


class Follower(Protocol):
    """What a rank is that does not schedule."""

    def load(self, progress: Callable[[str, float], None]) -> LoadedModel: ...

    def compute(self) -> None:
        """Compute what the leader says; returns never. Raises NodeLost when it has gone."""
        ...

    def close(self) -> None:
        """Called while `compute` still waits on another thread."""
        ...


@dataclass(frozen=True, slots=True)
class Makers:
    """Of what computes: `make_runner` and `make_follower`, or what stands in for them."""

    runner: Callable[[RankConfig], Runner]
    follower: Callable[[RankConfig], Follower]


def make_follower(config: RankConfig) -> Follower:
    """What a rank is that does not lead. Raises ConfigError."""
    if config.engine == "scripted":
        from core.engine.scripted_ranks import ScriptedFollower

        return ScriptedFollower(config)
    if config.engine == "torch" and config.device == "cuda":
        from core.engine.gpu.wiring import gpu_follower

        return gpu_follower(config)
    if config.engine == "torch":
        from core.engine.runner_split import FollowingRank

        return FollowingRank(config)
    raise ConfigError(f"engine {config.engine!r} cannot be split over ranks")


def make_runner(config: RankConfig) -> Runner:
    """The runner that `config.engine` names. Raises ConfigError."""
    if config.engine == "scripted":
        from core.engine.scripted import ScriptedRunner  # each rank imports its own runner only
        from core.engine.scripted_ranks import ScriptedLeader

        return ScriptedLeader(config) if config.plan.ranks > 1 else ScriptedRunner(config)
    if config.engine == "torch" and config.device == "cuda":
        from core.engine.gpu.wiring import gpu_runner

        return gpu_runner(config)
    if config.engine == "torch" and config.plan.ranks > 1:
        from core.engine.runner_split import LeadingRunner

        return LeadingRunner(config)
    if config.engine == "torch":
        from core.engine.runner_torch import TorchRunner  # torch takes seconds to import

        return TorchRunner(config, native=config.native)
    raise ConfigError(f"engine {config.engine!r} is neither torch nor scripted")


def _load(runner: Runner | Follower, link: Link) -> LoadedModel | None:
    told: tuple[str, float] = ("", 0.0)

    def progress(stage: str, fraction: float) -> None:
        nonlocal told
        if stage != told[0] or fraction - told[1] >= _PROGRESS_STEP or fraction >= 1:
            told = (stage, fraction)
            link.send(Loading(stage, fraction))

    try:
        return runner.load(progress)
    except NodeLost:
        raise
    except Exception as error:  # noqa: BLE001 — whatever stops a load is the operator's to know
        known = isinstance(error, SkerryError)
        _log.debug("load failed", exc_info=error)
        _load_failed(link, str(error) if known else f"{type(error).__name__}: {error}")
        return None


def _load_failed(link: Link, message: str) -> int:
    _log.error("the model did not load: %s", message)
    link.send(LoadFailed(message))
    return EXIT_LOAD


def _run(config: RankConfig, link: Link, bell: Bell, runner: Runner, loaded: LoadedModel) -> int:
    engine = Engine(
        loaded,
        runner,
        max_sequences=config.max_sequences,
        max_step_tokens=config.max_step_tokens,
        depth=config.depth,
        mixed_step_s=config.mixed_step_s,
        stages=config.plan.pp,
        drafter=PromptLookup if config.speculate else None,
        landed=bell.ring,
    )
    ready = _ready(config, loaded, engine.scheduler.context)
    link.send_with_descriptor(ready, loaded.memory_fd)
    rehearsal = config.engine == "scripted"
    while not engine.stopping:
        quiet_s = time.monotonic() - link.sent_at
        wait_s = max(0.0, config.pulse_s - quiet_s)
        if (expires_s := engine.scheduler.expires_in) is not None:
            wait_s = min(wait_s, expires_s)
        for command in link.receive(wait=True, bell=bell, at_most_s=wait_s):
            engine.handle(command)
        if link.closed:
            return 0
        for _ in range(bell.rung()):
            engine.collect()
        engine.scheduler.expire()
        engine.fill()  # first, so that what follows happens while the next step is computed
        link.send(*engine.messages())
        if engine.stepping_s > STUCK_S:
            raise InternalError(f"a step has not ended in {STUCK_S:g} s")
        if time.monotonic() - link.sent_at >= config.pulse_s:
            link.send(Pulse())
        if rehearsal and not engine.busy:
            engine.scheduler.roster.check_integrity()
    return 0


def _ready(config: RankConfig, loaded: LoadedModel, context: int) -> Ready:
    return Ready(
        fingerprint=loaded.fingerprint,
        context=context,
        vocab_size=loaded.vocab_size,
        geometry=loaded.geometry,
        max_sequences=config.max_sequences,
        max_step_tokens=config.max_step_tokens,
        prefill_tokens_per_s=loaded.prefill_tokens_per_s,
        decode_tokens_per_s=loaded.decode_tokens_per_s,
    )


if __name__ == "__main__":
    ended = main()
    # Taking torch apart module by module takes as long as half a second, in which nobody else can
    # have the memory; the system does it at once.
    logging.shutdown()
    os._exit(ended)
