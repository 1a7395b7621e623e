"""What `skerry worker` does to a world, and how it tells it."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from core.config import World
from core.config_tenants import ANONYMOUS
from core.errors import ConfigError
from deploy.access import needs_key
from deploy.worker.build import Built, build
from deploy.worker.fleet import fleet_of
from deploy.worker.wrangler import Project, find, read
from edge.workers import tools
from edge.workers.admin_pages import EdgePage, Row
from edge.workers.bundle import Bundle, pack

_SECRET = re.compile(r"[A-Za-z_$][A-Za-z0-9_$]*")


def deploy(folder: Path, env: str | None, world: World, tenant: str) -> None:
    """Raises ConfigError, FleetError."""
    project = read(find(folder), env)
    owner = owner_of(world, tenant)
    built = prepared(project)
    data = pack(built.bundle)
    with fleet_of(world) as fleet:
        began = time.monotonic()
        name = built.bundle.settings.name
        version = fleet.deploy(name, data, tenant=owner)
        spent = time.monotonic() - began
        edges = fleet.edges()
    print(
        f"{name} {version} is served on {', '.join(one.edge for one in edges)}"
        f" ({len(data) / 1000:.1f} kB, {spent:.2f} s)"
    )
    for line in addresses(built.bundle, edges):
        print(f"  {line}")


def prepared(project: Project, *, name: str | None = None, dev: bool = False) -> Built:
    """A project's bundle, with what may surprise told. Raises ConfigError."""
    for note in project.notes:
        print(f"{project.file}: {note}", file=sys.stderr)
    if project.language == "javascript":
        tools.install(lambda line: print(line, file=sys.stderr))
    return build(project, name=name, dev=dev)


def owner_of(world: World, tenant: str) -> str:
    """Raises ConfigError where nobody is named and callers need a key."""
    if tenant:
        return tenant
    named = [name for name in world.topology.tenants if name != ANONYMOUS]
    if not needs_key(world):
        return ANONYMOUS
    if len(named) == 1:
        return named[0]
    raise ConfigError(f"say for whom the Worker acts: --tenant {' or '.join(named) or 'NAME'}")


def addresses(bundle: Bundle, edges: list[EdgePage]) -> Iterator[str]:
    settings = bundle.settings
    for edge in edges if settings.workers_dev else ():
        scheme, port = edge.url.partition(":")[0], edge.url.rpartition(":")[2]
        yield f"{edge.url}/w/{settings.name}/   {scheme}://{settings.name}.{edge.domain}:{port}/"
    yield from (f"route {pattern}" for pattern in settings.routes)
    yield from (f"timer {cron}" for cron in settings.crons)
    if not (settings.workers_dev or settings.routes):
        yield "no address: Workers that are bound to it ask it (workers_dev is false)"


def versions(name: str, world: World) -> None:
    with fleet_of(world) as fleet:
        pages = fleet.worker(name)
    first = pages[0][1]
    print(f"{'VERSION':<14}{'SERVED FROM':<22}HOW")
    for one in reversed(first.deployments):
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(one.at))
        print(f"{one.version:<14}{at:<22}{one.how}")
    for edge, page in pages:
        if page.worker.version != first.worker.version:
            print(f"the edge {edge!r} serves {page.worker.version}")
    kept = sorted(set(first.kept) - {one.version for one in first.deployments})
    if kept:
        print(f"kept, never served: {', '.join(kept)}")


def rollback(name: str, version: str | None, world: World) -> None:
    with fleet_of(world) as fleet:
        served = fleet.rollback(name, version)
        edges = ", ".join(one.edge for one in fleet.admins)
    print(f"{name} {served} is served again on {edges}")


def listing(world: World) -> None:
    with fleet_of(world) as fleet:
        rows = fleet.rows()
    found: dict[str, list[tuple[str, Row]]] = {}
    for edge, page in rows:
        for row in page.workers:
            found.setdefault(row.name, []).append((edge, row))
    print(f"{'NAME':<24}{'TENANT':<16}{'VERSION':<14}{'EDGES':<16}STARTS  ROUTES")
    for name, held in sorted(found.items()):
        row = held[0][1]
        edges = ", ".join(edge for edge, _ in held)
        starts = sum(one.starts for _, one in held)
        told = " ".join((*row.routes, *(f"[{cron}]" for cron in row.crons)))
        version = "dev" if row.open else row.version or "-"
        print(f"{name:<24}{row.tenant:<16}{version:<14}{edges:<16}{starts:>6}  {told}".rstrip())
        for edge, one in held:
            if one.rests_s > 0:
                print(f"  rests for {one.rests_s:.0f} s on {edge}: it {one.rests_for}")


def check(name: str, world: World) -> None:
    """Raises FleetError where no edge has a Worker of that name."""
    with fleet_of(world) as fleet:
        fleet.homes(name)


def delete(name: str, world: World) -> None:
    with fleet_of(world) as fleet:
        fleet.delete(name)
    print(f"{name} is gone")


def set_secret(name: str, key: str, value: str | None, world: World) -> None:
    if not _SECRET.fullmatch(key):
        raise ConfigError(f"{key!r} is no name that a script could use")
    with fleet_of(world) as fleet:
        fleet.secret(name, key, value)
    print(f"{name} {'has' if value is not None else 'no longer has'} the secret {key}")


def secrets(name: str, world: World) -> None:
    with fleet_of(world) as fleet:
        pages = fleet.worker(name)
    print("\n".join(pages[0][1].secrets) or "none")
