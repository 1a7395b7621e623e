"""The way into `skerry`. Loads the commands where Ctrl-C is a quiet end already, so that nobody
sees the traceback of a half-finished import."""

from __future__ import annotations

import sys

INTERRUPTED = 130


def main() -> None:
    try:
        from deploy.commands import run

        code = run()
    except KeyboardInterrupt:
        code = INTERRUPTED
    sys.exit(code)


if __name__ == "__main__":
    main()
