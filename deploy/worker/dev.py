"""`skerry worker dev`: the project on the first edge of a running world, again with each change.

It is served beside what is deployed, under a name of its own, and goes with this command. What it
says is shown as it comes, and callers are told what it throws.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from core.config import World
from core.errors import ConfigError
from deploy.launcher import ended_by_signals
from deploy.worker.act import addresses, owner_of, prepared
from deploy.worker.build import Built
from deploy.worker.fleet import Fleet, FleetError, fleet_of
from deploy.worker.tail import Said, shown, start
from deploy.worker.wrangler import SECRETS_FILE, find, read, read_secrets
from edge.workers.bundle import NAME, Bundle, pack
from edge.workers.register import bindings_of

LOOK_S = 0.3
SUFFIX = "-dev"
Stamp = tuple[tuple[str, int, int], ...]


def dev(folder: Path, env: str | None, world: World, tenant: str) -> None:
    """Until Ctrl-C. Raises ConfigError, FleetError."""
    owner = owner_of(world, tenant)
    file = find(folder)
    with fleet_of(world) as fleet:
        one = Fleet(fleet.admins[:1])
        edges = one.edges()
        name, built = _built(file, env)
        said: queue.SimpleQueue[Said] = queue.SimpleQueue()
        one.deploy(name, pack(_secret(built, folder)), tenant=owner, open_=True)
        try:
            start(one.admins[0], name, said.put, lines=0, follow=True)
            print(f"{name} is served until Ctrl-C, again with each change:")
            for line in addresses(built.bundle, edges):
                print(f"  {line}")
            with ended_by_signals():
                _follow(one, name, owner, file, env, built, said)
        except KeyboardInterrupt:
            print(f"\n{name} is gone")
        finally:
            one.delete(name)


def _follow(
    fleet: Fleet,
    name: str,
    owner: str,
    file: Path,
    env: str | None,
    built: Built,
    said: queue.SimpleQueue[Said],
) -> None:
    sources = _watched(built.sources, file)
    stamp = stamp_of(sources)
    while True:
        _show(said)
        fresh = stamp_of(sources)
        if fresh == stamp:
            continue
        stamp = fresh
        began = time.monotonic()
        try:
            _, built = _built(file, env)
            sources = _watched(built.sources, file)
            stamp = stamp_of(sources)
            data = pack(_secret(built, file.parent))
            version = fleet.deploy(name, data, tenant=owner, open_=True)
        except (ConfigError, FleetError) as error:
            print(f"{error}\nthe version before is served still")
        else:
            print(f"changed: {version} is served ({time.monotonic() - began:.2f} s)")


def stamp_of(paths: Iterable[Path]) -> Stamp:
    """What tells a state of files from another one; a file that is gone has none."""
    found = []
    for path in paths:
        try:
            stat = path.stat()
        except OSError:
            continue
        found.append((str(path), stat.st_mtime_ns, stat.st_size))
    return tuple(found)


def _built(file: Path, env: str | None) -> tuple[str, Built]:
    project = read(file, env)
    name = f"{project.config.name[: 63 - len(SUFFIX)]}{SUFFIX}"
    assert NAME.fullmatch(name), "a name with a suffix is a name"
    return name, prepared(project, name=name, dev=True)


def _secret(built: Built, folder: Path) -> Bundle:
    """With the secrets of `.dev.vars` as variables, which is how scripts see them. Raises
    ConfigError."""
    bundle = built.bundle
    mine = read_secrets(folder)
    bound = bindings_of(bundle)
    for key in mine:
        if key in bound:
            raise ConfigError(
                f"{folder / SECRETS_FILE}: {key!r} would name two things: a secret and"
                f" {bound[key]}; rename one"
            )
    kept = [(key, text) for key, text in bundle.settings.vars if key not in mine]
    own = [(key, msgspec.json.encode(value).decode()) for key, value in mine.items()]
    settings = msgspec.structs.replace(bundle.settings, vars=tuple(sorted((*kept, *own))))
    return msgspec.structs.replace(bundle, settings=settings)


def _watched(sources: Iterable[Path], file: Path) -> tuple[Path, ...]:
    return (*sources, file, file.parent / SECRETS_FILE)


def _show(said: queue.SimpleQueue[Said]) -> None:
    """What has been said, for as long as nothing is to be looked at."""
    end = time.monotonic() + LOOK_S
    while (left := end - time.monotonic()) > 0:
        try:
            _, line = said.get(timeout=left)
        except queue.Empty:
            return
        if isinstance(line, str):
            raise FleetError(f"the edge is gone: {line}")
        print("\n".join(shown(line, "")), flush=True)
