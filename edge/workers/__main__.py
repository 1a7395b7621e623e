"""`python -m edge.workers`: the host of one edge's Workers. Started by that edge, ends with it."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import logging
import os
import signal
import sqlite3
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from aiohttp import web

from core import log
from core.address import split_address
from core.config import World, load
from core.config_tenants import ANONYMOUS
from core.errors import ConfigError
from core.release import release
from edge.crew.place import private_folder
from edge.workers.admin import admin_app
from edge.workers.admin_pages import EdgePage
from edge.workers.crons import Timers
from edge.workers.host import Host
from edge.workers.hosted import Place
from edge.workers.kv_http import store_app
from edge.workers.kv_store import KvStore
from edge.workers.pacer import Pacer
from edge.workers.python.egress import open_egress
from edge.workers.python.runtime import PythonRuntime
from edge.workers.register import Register
from edge.workers.runtime import Runtime
from edge.workers.shelf import Shelf
from edge.workers.table import table_path
from edge.workers.workerd import Workerd

_log = logging.getLogger("skerry.workers")

CONFIG_EXIT = 2
SWEEP_S = 60.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m edge.workers", description=__doc__)
    parser.add_argument("--topology", type=Path, required=True)
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--name", required=True, help="the edge's name")
    parser.add_argument("--edge", required=True, help="HOST:PORT where that edge accepts ours")
    parser.add_argument("--url", required=True, help="where it accepts callers'")
    parser.add_argument("--lifeline", type=int, required=True)
    options = parser.parse_args()
    code = 0
    try:
        world = load(options.topology, state=options.state)
        log.setup(f"workers/{options.name}", form=world.topology.observe.log)
        with _alone(table_path(world.state, options.name).parent):
            asyncio.run(_serve(world, options.name, options))
    except* ConfigError as errors:  # alone, or out of a task group
        why = "; ".join(map(str, errors.exceptions))
        sys.stderr.write(f"workers of {options.name}: {why}\n")
        code = CONFIG_EXIT
    return code


async def _serve(world: World, name: str, options: argparse.Namespace) -> None:
    lifeline: int = options.lifeline
    topology = world.topology
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)

    def orphaned() -> None:
        loop.remove_reader(lifeline)
        stopping.set()

    loop.add_reader(lifeline, orphaned)  # nothing is ever written: the edge is gone
    table = table_path(world.state, name)
    async with contextlib.AsyncExitStack() as stack:
        root = stack.enter_context(private_folder())
        store = stack.enter_context(_store(world.state))
        egress = await stack.enter_async_context(open_egress())
        runtimes: dict[str, Runtime] = {
            "javascript": Workerd(),
            "python": PythonRuntime(egress, trusted=topology.workers.trusted),
        }
        pacer = Pacer()
        host = Host(
            place=Place(root=root, edge=options.edge, store=root / "store"),
            register=Register(root, table, topology.workers),
            limits=topology.workers,
            shelf=Shelf(table.parent),
            runtimes=runtimes,
            pacer=pacer,
        )
        tenants = {*topology.tenants}
        if topology.access.anonymous != "never":
            tenants.add(ANONYMOUS)
        page = EdgePage(
            edge=name,
            url=options.url,
            version=release(),
            domain=topology.workers.domain,
            languages=tuple(runtimes),
        )
        admin = topology.edge(name).admin
        if admin is None:
            raise ConfigError(f"the edge {name!r} has no admin address")
        app = admin_app(host, page, frozenset(tenants), world.secret("admin"))
        async with asyncio.TaskGroup() as tasks, _listening(store_app(store, host), root / "store"):
            helpers = [tasks.create_task(_sweeping(store)), tasks.create_task(pacer.run())]
            await host.open()
            try:
                if topology.edges[0].name == name:
                    helpers.append(tasks.create_task(Timers(host).run()))
                async with _listening(app, admin):
                    _log.info("workers ready admin=%s count=%d", admin, len(host.rows()))
                    await stopping.wait()
            finally:
                await host.close()
                for helper in helpers:
                    helper.cancel()
    _log.info("workers stopped")


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Waits while the host of an edge's process that is being replaced still serves: until then the
    new process sends its requests to that one's Workers, which it finds in the table."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (folder / "host.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _store(state: Path) -> Iterator[KvStore]:
    folder = state / "workers"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        store = KvStore(folder / "kv.sqlite")
    except sqlite3.Error as error:
        raise ConfigError(f"{folder / 'kv.sqlite'} cannot be opened: {error}") from error
    try:
        yield store
    finally:
        store.close()


@contextlib.asynccontextmanager
async def _listening(app: web.Application, where: str | Path) -> AsyncIterator[None]:
    """Raises ConfigError."""
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.5)
    await runner.setup()
    try:
        try:
            if isinstance(where, Path):
                await web.UnixSite(runner, str(where)).start()
            else:
                host, port = split_address(where)
                await web.TCPSite(runner, host, port).start()
        except OSError as error:
            why = os.strerror(error.errno or 0)
            raise ConfigError(f"{where} cannot be listened on: {why}") from error
        yield
    finally:
        await runner.cleanup()


async def _sweeping(store: KvStore) -> None:
    while True:
        await asyncio.sleep(SWEEP_S)
        store.sweep()


if __name__ == "__main__":
    sys.exit(main())
