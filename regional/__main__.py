"""`python -m regional router|node --topology FILE --state FOLDER --name NAME`: one process of a
region. Imports only what the chosen role needs.

`python -m regional purge … --name NAMESPACE` lets a namespace leave what lies in the state folder
and is not in use, and says as JSON what that was; the queues too with `--queues`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from core.config import World, load
from core.errors import ConfigError


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m regional", description=__doc__)
    parser.add_argument("role", choices=("router", "node", "purge"))
    parser.add_argument("--topology", type=Path, required=True)
    parser.add_argument("--state", type=Path, required=True, help="folder of secrets and logs")
    parser.add_argument("--name", required=True, help="the region's or the node's name")
    parser.add_argument("--queues", action="store_true", help="purge: no router runs")
    options = parser.parse_args()
    try:
        world = load(options.topology, state=options.state)
        if options.role == "purge":
            return _purge(world, options.name, queues=options.queues)
        return _run(options.role, world, options.name)
    except ConfigError as error:
        sys.stderr.write(f"{options.role} {options.name}: {error}\n")
        return 2


def _run(role: str, world: World, name: str) -> int:
    if role == "router":
        from regional.app import run_router

        return run_router(world, name)
    from regional.node.app import run_node

    return run_node(world, name)


def _purge(world: World, namespace: str, *, queues: bool) -> int:
    import msgspec

    from regional.purge_files import purge_files

    done = purge_files(world, namespace, queues=queues)
    sys.stdout.write(msgspec.json.encode(done).decode() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
