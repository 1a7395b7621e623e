"""`skerry purge`: nothing of a tenant's prompts and answers is left in a world.

The routers of a running world are asked, and each asks its nodes; then whatever lies in the state
folder and nobody has open is done by a process of its own. What tenants used is billed: the ledger
and the keys stay.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
import msgspec

from core.config import World, load
from core.config_tenants import ANONYMOUS
from core.errors import ConfigError
from core.headers import SECRET_HEADER
from core.nearest import did_you_mean
from core.purge import PURGE_PATH, FilesPurged, NodePurged, PurgeAsk, RegionPurged
from deploy.inside import client, door_urls
from deploy.process import with_sources
from deploy.state import current_of

TIMEOUT = httpx.Timeout(90.0, connect=5.0)
"""A node gives its steps a minute to end."""
FILES_S = 300.0


def purge(world: World, tenant: str, *, shared: bool) -> int:
    """Purge and tell; the exit status, 1 when something may be left. Raises ConfigError."""
    namespace = namespace_of(world, tenant, shared=shared)
    left: list[str] = []
    routers = doors(world)
    for name, url in routers.items():
        try:
            told = ask(world, url, namespace)
        except ConfigError as error:
            left.append(f"region {name}: {error}")
            continue
        print("\n".join(region_lines(name, told)))
        left += [f"node {one.node}: {one.error}" for one in told.nodes if one.error]
        if lost := missing(world, name, told):
            left.append(f"region {name}: not joined, so not asked: {', '.join(lost)}")
    files = in_folder(world, namespace, queues=not routers)
    print("\n".join(file_lines(world, files)))
    left += [f"{one.path}: {one.error}" for one in files.slabs if one.error]
    for line in left:
        print(f"left: {line}", file=sys.stderr)
    return 1 if left else 0


def namespace_of(world: World, tenant: str, *, shared: bool) -> str:
    """Raises ConfigError for a tenant that is not known, and for a namespace of several where that
    has not been asked for."""
    topology = world.topology
    if tenant != ANONYMOUS and tenant not in topology.tenants:
        hint = did_you_mean(tenant, topology.tenants, f"it has: {', '.join(topology.tenants)}")
        raise ConfigError(f"{world.path} has no tenant {tenant!r}; {hint}")
    namespace = topology.namespace_of(tenant)
    others = [
        other for other in topology.tenants
        if other != tenant and topology.namespace_of(other) == namespace
    ]  # fmt: skip
    if others and not shared:
        raise ConfigError(
            f"{tenant} shares its namespace with {', '.join(others)}, and what is kept of one "
            "cannot be told from the others': purge all of it with --shared"
        )
    return namespace


def doors(world: World) -> Mapping[str, str]:
    """The URL of each router by name, where the world runs: on this state folder, or at the fixed
    addresses of its topology, when one of them answers. Nothing where it does not."""
    current = current_of(world.state)
    if current is not None and current.topology:  # that has the ports which were found
        topology = load(Path(current.topology), state=world.state).topology
        return door_urls(topology, topology.regions)
    routers = door_urls(world.topology, world.topology.regions)
    fixed = {name: url for name, url in routers.items() if not url.endswith(":0")}
    if any(_answers(world, url) for url in fixed.values()):
        return fixed
    if fixed:
        print(f"no router of {world.path} answers: what runs elsewhere is left", file=sys.stderr)
    return {}


def _answers(world: World, url: str) -> bool:
    try:
        with client(world, timeout=TIMEOUT) as http:
            return http.get(f"{url}/healthz").is_success
    except httpx.TransportError:
        return False


def ask(world: World, url: str, namespace: str) -> RegionPurged:
    """Raises ConfigError."""
    body = msgspec.json.encode(PurgeAsk(namespace))
    headers = {SECRET_HEADER: world.secret("region").decode()}
    try:
        with client(world, timeout=TIMEOUT) as http:
            said = http.post(f"{url}{PURGE_PATH}", content=body, headers=headers)
    except httpx.TransportError as error:
        raise ConfigError(f"{url}: {str(error) or type(error).__name__}") from error
    if not said.is_success:
        raise ConfigError(f"{url}: {said.status_code} {said.text[:200]}")
    return msgspec.json.decode(said.content, type=RegionPurged)


def missing(world: World, router: str, told: RegionPurged) -> list[str]:
    """The nodes of its region that the router did not have."""
    region, _ = world.topology.router(router)
    there = {one.node for one in told.nodes}
    return [node.name for node in region.nodes if node.name not in there]


def in_folder(world: World, namespace: str, *, queues: bool) -> FilesPurged:
    """Raises ConfigError."""
    command = [
        sys.executable, "-m", "regional", "purge", "--topology", str(world.path),
        "--state", str(world.state), "--name", namespace, *(["--queues"] if queues else []),
    ]  # fmt: skip
    try:
        done = subprocess.run(
            command, env=with_sources(), capture_output=True, check=True, timeout=FILES_S
        )
    except subprocess.CalledProcessError as error:
        raise ConfigError(error.stderr.decode(errors="replace").strip()) from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"what lies in {world.state} was not purged: {error}") from error
    return msgspec.json.decode(done.stdout, type=FilesPurged)


def region_lines(name: str, told: RegionPurged) -> Iterator[str]:
    yield f"region {name}: {told.batches} batches deleted, {told.requests} requests ended"
    for node in told.nodes:
        yield f"  node {node.node}: {', '.join(_counts(node))}"


def _counts(node: NodePurged) -> Iterator[str]:
    yield f"{node.cached_blocks} cached blocks forgotten"
    yield f"{node.scrubbed_blocks} blocks of memory overwritten"
    yield f"{node.host_blocks} of the host tier"
    yield f"{node.disk_blocks} of the disk tier"


def file_lines(world: World, files: FilesPurged) -> Iterator[str]:
    yield (
        f"{world.state}: {files.batches} batches deleted; {len(files.slabs)} disk tiers without "
        f"their nodes, {files.in_use} open and done by theirs"
    )
    for slab in files.slabs:
        if slab.blocks:
            yield f"  {slab.path}: {slab.blocks} blocks, and the key of all that was there"
