"""`skerry worker tail`: what a Worker says on all edges, as one stream of lines."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable

import httpx
import msgspec

from core.config import World
from deploy.worker.fleet import Admin, FleetError, fleet_of
from edge.workers.admin_pages import BASE
from edge.workers.logs import Line
from edge.workers.runtime import Run

Said = tuple[str, Line | str]
"""(edge, a line of it or why there are no more)."""
_decode = msgspec.json.Decoder(Line).decode


def tail(world: World, name: str, *, lines: int, follow: bool, as_json: bool) -> None:
    """Until Ctrl-C, or the end of all edges' lines. Raises FleetError where it is unknown."""
    with fleet_of(world) as fleet:
        fleet.worker(name)
        said: queue.SimpleQueue[Said] = queue.SimpleQueue()
        for admin in fleet.admins:
            start(admin, name, said.put, lines=lines, follow=follow)
        left = len(fleet.admins)
        several = left > 1
        while left:
            edge, line = said.get()
            if isinstance(line, str):
                left -= 1
                if line:
                    print(f"{edge}: {line}", file=sys.stderr)
                continue
            if as_json:
                sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
            else:
                print("\n".join(shown(line, edge if several else "")))
            sys.stdout.flush()


def start(
    admin: Admin, name: str, say: Callable[[Said], None], *, lines: int, follow: bool
) -> None:
    """Read one edge's lines in a thread of its own; it ends with the process, or with the edge."""
    thread = threading.Thread(
        target=_read, args=(admin, name, say, lines, follow), name=f"tail-{admin.edge}", daemon=True
    )
    thread.start()


def shown(line: Line, edge: str) -> list[str]:
    """A line for people."""
    clock = time.strftime("%H:%M:%S", time.localtime(line.at))
    head = f"{clock} {edge + ' ' if edge else ''}"
    if line.run is not None:
        return [f"{head}{_run(line.run)}", *_thrown(line.run)]
    level = "" if line.level == "log" else f"({line.level}) "
    first, *rest = line.message.splitlines() or [""]
    return [f"{head}{level}{first}", *(f"    {one}" for one in rest)]


def _run(run: Run) -> str:
    what = f"timer {run.cron}" if run.cron else f"{run.method or '-'} {run.url or '-'}"
    status = f" {run.status}" if run.status is not None else ""
    return f"{what} -{status} {run.outcome}"


def _thrown(run: Run) -> list[str]:
    found: list[str] = []
    for one in run.exceptions:
        found.append(f"    {one.name}: {one.message}")
        found += [f"    {line}" for line in one.stack.splitlines()]
    return found


def _read(admin: Admin, name: str, say: Callable[[Said], None], lines: int, follow: bool) -> None:
    url = f"{admin.base}{BASE}/workers/{name}/tail"
    params = {"lines": str(lines), "follow": "1" if follow else "0"}
    try:
        with admin.client.stream(
            "GET", url, params=params, timeout=httpx.Timeout(None, connect=3.0)
        ) as answer:
            if not answer.is_success:
                raise FleetError(f"refused with {answer.status_code}")
            for text in answer.iter_lines():
                say((admin.edge, _decode(text)))
    except (httpx.HTTPError, RuntimeError, msgspec.MsgspecError, FleetError) as error:
        say((admin.edge, str(error) or type(error).__name__))
    else:
        say((admin.edge, ""))
