"""`python -m edge --topology FILE --state FOLDER --name NAME`: one edge process."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from core.config import load
from core.errors import ConfigError
from edge.app import run_edge


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m edge", description=__doc__)
    parser.add_argument("--topology", type=Path, required=True)
    parser.add_argument("--state", type=Path, required=True, help="folder of secrets and logs")
    parser.add_argument("--name", required=True, help="the edge's name")
    options = parser.parse_args()
    try:
        return run_edge(load(options.topology, state=options.state), options.name)
    except ConfigError as error:
        sys.stderr.write(f"edge {options.name}: {error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
