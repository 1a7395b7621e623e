"""`python -m regional router|node --topology FILE --state FOLDER --name NAME`: one process of a
region. Imports only what the chosen role needs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from core.config import World, load
from core.errors import ConfigError


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m regional", description=__doc__)
    parser.add_argument("role", choices=("router", "node"))
    parser.add_argument("--topology", type=Path, required=True)
    parser.add_argument("--state", type=Path, required=True, help="folder of secrets and logs")
    parser.add_argument("--name", required=True, help="the region's or the node's name")
    options = parser.parse_args()
    try:
        return _run(options.role, load(options.topology, state=options.state), options.name)
    except ConfigError as error:
        sys.stderr.write(f"{options.role} {options.name}: {error}\n")
        return 2


def _run(role: str, world: World, name: str) -> int:
    if role == "router":
        from regional.app import run_router

        return run_router(world, name)
    from regional.node.app import run_node

    return run_node(world, name)


if __name__ == "__main__":
    sys.exit(main())
