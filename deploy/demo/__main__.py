"""`python -m deploy.demo`: start the default world, ask four times, judge, stop everything."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import httpx
from rich.console import Console

from core.errors import ConfigError
from core.status import NodeStatus
from deploy.access import own_key
from deploy.client import ask
from deploy.demo.rounds import EDITIONS, Result, Round, missed, rounds, stayed
from deploy.demo.table import results_table
from deploy.doctor import DEFAULT_TOPOLOGY
from deploy.hints import curl, indented
from deploy.launcher import LocalWorld, ended_by_signals, run_world
from deploy.ready import router_view
from deploy.screen import Screen
from deploy.state import FOLDER

MODEL = "smollm2"
MAX_TOKENS = 60
AS_QUICK = (
    "By its rates one node was as quick as two (split_does_not_pay): no KV moved.\n"
    "   It knows them better now; once more, with a new edition of the handbook."
)


def main() -> int:
    console, screen = Console(highlight=False), Screen(sys.stdout)
    logs = str(FOLDER)
    try:
        with ended_by_signals():
            console.print("Starting two edges and two regions on this machine")
            started = time.monotonic()
            with run_world(DEFAULT_TOPOLOGY, say=screen.say, draw=screen.draw) as world:
                screen.draw("")
                logs = str(world.logs)
                spent = time.monotonic() - started
                console.print(f"  ready in {spent:.1f} s, {world.resident_mb_total()} MB in all\n")
                faults = _show(console, world)
    except ConfigError as error:
        print(f"{error}\nthe logs are in {logs}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped; nothing is left running", file=sys.stderr)
        return 130
    return _close(console, faults, logs)


def _show(console: Console, world: LocalWorld) -> list[str]:
    with (
        own_key(world.world, world.edges) as headers,
        httpx.Client(trust_env=False, headers=headers) as client,
    ):
        first, *others = rounds()
        results = [_ask(console, client, world, first)]
        for edition in range(2, EDITIONS + 1):
            if not stayed(results[0].answer):
                break
            console.print(f"   {AS_QUICK}\n")
            first, *others = rounds(edition)
            results = [_ask(console, client, world, first)]
        results += [_ask(console, client, world, one) for one in others]
        views = [router_view(client, url) for url in world.routers.values()]
    nodes: Sequence[NodeStatus] = [node for view in views if view for node in view.nodes]
    console.print(results_table(results))
    return missed(results, nodes)


def _ask(console: Console, client: httpx.Client, world: LocalWorld, one: Round) -> Result:
    console.print(f"[bold]{one.number} {one.title}[/bold]")
    console.print(f"   [dim]{one.question}[/dim]")
    sys.stdout.write("   ")
    answer = ask(
        client,
        world.edges[one.edge],
        model=MODEL,
        turns=one.turns,
        show=_stream,
        max_tokens=MAX_TOKENS,
        temperature=0.0,
        stop=one.stop,
    )
    sys.stdout.write("\n\n")
    return Result(one, answer)


def _stream(piece: str) -> None:
    sys.stdout.write(piece.replace("\n", "\n   "))
    sys.stdout.flush()


def _close(console: Console, faults: Sequence[str], logs: str) -> int:
    if faults:
        for fault in faults:
            print(f"missed: {fault}", file=sys.stderr)
        print(f"the logs are in {logs}", file=sys.stderr)
        return 1
    console.print(
        "Two edges an ocean apart sent the same handbook to one region, which had read it already."
    )
    console.print(f"Everything is stopped. Logs: {logs}")
    print("Next: `make up` keeps this world running until Ctrl-C, and then")
    print(indented(curl("http://127.0.0.1:8787", MODEL)), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
