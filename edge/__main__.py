"""`python -m edge --topology FILE --state FOLDER --name NAME`: one edge, by one process or several.

With `workers` above one in the topology this process becomes their supervisor, which starts it
again with `--worker` for each.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from core.config import World, load
from core.errors import ConfigError


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m edge", description=__doc__)
    parser.add_argument("--topology", type=Path, required=True)
    parser.add_argument("--state", type=Path, required=True, help="folder of secrets and logs")
    parser.add_argument("--name", required=True, help="the edge's name")
    inside = parser.add_argument_group("given by a supervisor")
    inside.add_argument("--worker", type=int)
    inside.add_argument("--address")
    inside.add_argument("--folder", type=Path)
    inside.add_argument("--lifeline", type=int)
    inside.add_argument("--beside", action="store_true", help="a crew of this edge runs still")
    inside.add_argument("--listen-fd", type=int, nargs="+", default=())
    inside.add_argument("--plain-fd", type=int, nargs="+", default=())
    inside.add_argument("--plain-address")
    options = parser.parse_args()
    try:
        return run(load(options.topology, state=options.state), options)
    except ConfigError as error:
        sys.stderr.write(f"edge {options.name}: {error}\n")
        return 2


def run(world: World, options: argparse.Namespace) -> int:
    """What each kind of process imports is its own: a supervisor stays small."""
    workers = world.topology.edge(options.name).workers
    if workers > 1 and options.worker is None:
        from edge.crew.supervisor import run_crew

        return run_crew(world, options.name, beside=options.beside)
    from edge.crew.seat import Seat
    from edge.serving import run_edge

    if options.worker is None:
        listeners, plain = tuple(options.listen_fd), tuple(options.plain_fd)
        return run_edge(world, options.name, Seat(listeners=listeners, plain=plain))
    seat = Seat(
        number=options.worker,
        of=workers,
        address=options.address,
        folder=options.folder,
        lifeline=options.lifeline,
        plain_address=options.plain_address,
    )
    return run_edge(world, options.name, seat)


if __name__ == "__main__":
    sys.exit(main())
