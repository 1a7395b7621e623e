"""Runs an edge's host beside the edge: started with it, started again when it ends, ended with it.

Held by the edge's process, or by the supervisor where an edge has several.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from core.address import split_address
from core.config import World
from core.pauses import PAUSES, Pauses

_log = logging.getLogger("skerry.workers")

CONFIG_EXIT = 2
GRACE_S = 3.0


@asynccontextmanager
async def hosting(
    world: World,
    name: str,
    address: str,
    *,
    near: str,
    when: bool = True,
    pauses: Pauses = PAUSES,
) -> AsyncIterator[None]:
    """The host of the edge `name`, which accepts callers at `address` and the host itself at
    `near`, until the block ends; none unless `when`, or where the edge has no admin address."""
    admin = world.topology.edge(name).admin
    if admin is not None and split_address(admin)[1] == 0:
        _log.warning("no Workers: an admin address without a fixed port is found by nobody")
        admin = None
    if not when or admin is None:
        yield
        return
    ours, held = os.pipe()
    task = asyncio.create_task(_keep(_command(world, name, address, near, ours), ours, pauses))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})
        os.close(ours)
        os.close(held)


async def _keep(command: list[str], lifeline: int, pauses: Pauses) -> None:
    """Until cancelled, or until it refuses its configuration."""
    pause_s = 0.0
    while True:
        started = time.monotonic()
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, pass_fds=(lifeline,)
        )
        try:
            code = await process.wait()
        finally:
            if process.returncode is None:
                await _end(process)
        if code == CONFIG_EXIT:
            _log.error("the host of Workers refused to start: this edge serves none")
            return
        pause_s = pauses.after(pause_s, time.monotonic() - started)
        _log.warning("the host of Workers ended code=%d again_s=%.1f", code, pause_s)
        await asyncio.sleep(pause_s)


async def _end(process: asyncio.subprocess.Process) -> None:
    process.send_signal(signal.SIGTERM)
    with suppress(TimeoutError):
        async with asyncio.timeout(GRACE_S):
            await process.wait()
            return
    process.kill()
    await process.wait()


def _command(world: World, name: str, address: str, near: str, lifeline: int) -> list[str]:
    scheme = "http" if world.topology.edge(name).tls is None else "https"
    return [
        *(sys.executable, "-m", "edge.workers"),
        *("--topology", str(world.path), "--state", str(world.state), "--name", name),
        *("--edge", _dialled(near), "--url", f"{scheme}://{_dialled(address)}"),
        *("--lifeline", str(lifeline)),
    ]


def _dialled(address: str) -> str:
    """From this machine."""
    host, port = split_address(address)
    near = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{near}]:{port}" if ":" in near else f"{near}:{port}"
