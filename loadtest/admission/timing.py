"""What the guard adds to one request, in the process that serves it, with a ledger that other
processes use at the same time: before work (key, tenant, reservation), and until the last event
(the prompt's true count, usage record, settlement).

`python -m loadtest.admission.timing FOLDER REQUESTS` is one of those processes; it prints the
milliseconds of both for each request as one line of JSON.
"""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from core.config import parse
from core.config_tenants import Budgets as Settings
from core.events import Delta, Done, Finish
from core.keys import KeyBook, new_key
from core.types import FinishReason, GenerateRequest, ModelName, RegionName, RequestId, Usage
from core.usage import UsageWriter
from edge.gateway import Batch, Place
from edge.routing.placement import Reason
from edge.tenants.budget import Budgets
from edge.tenants.door import Door
from edge.tenants.ledger import Ledger
from edge.tenants.pool import Pool

PACE_S = 0.004
"""Between two requests of a process: with two, 500 a second."""
_WORLD = """
version = 1
[tenants.acme]
requests_per_minute = 1_000_000_000
tokens_per_minute = 1_000_000_000
tokens_per_day = 1_000_000_000
concurrent_streams = 1_000
[models.tiny]
source = "tiny.gguf"
[[edges]]
name = "here"
[[regions]]
name = "eu"
[[regions.nodes]]
name = "eu-1"
role = "combined"
model = "tiny"
"""
_DONE = Done(usage=Usage(prompt_tokens=16, completion_tokens=1))
_BATCH = Batch(
    Place(RegionName("eu"), Reason.PREFIX_HOME, prompt_tokens=20),
    (Delta(token_ids=(1,), text="a"), Finish(reason=FinishReason.STOP), _DONE),
)


class Taken(msgspec.Struct, frozen=True, array_like=True):
    """Milliseconds of one request."""

    before_ms: float
    after_ms: float


def measure(folder: Path, *, processes: int, requests: int) -> list[Taken]:
    """Of each of `requests` in each of `processes`."""
    command = [sys.executable, "-m", "loadtest.admission.timing", str(folder), str(requests)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) for _ in range(processes)
    ]
    taken: list[Taken] = []
    for process in running:
        said, _ = process.communicate()
        taken += msgspec.json.decode(said, type=list[Taken])
    return taken


async def one_process(folder: Path, requests: int) -> list[Taken]:
    topology = parse(_WORLD)
    key, record = new_key("acme", now=0)
    book = KeyBook([record, *(new_key("acme", now=0)[1] for _ in range(1000))])
    headers = {b"authorization": f"Bearer {key}".encode()}
    door = Door(topology, lambda: book)
    me = str(os.getpid())
    ledger = Ledger(folder / "budgets.counts")
    usage = UsageWriter(folder / "usage", me)
    taken: list[Taken] = []
    async with asyncio.TaskGroup() as tasks:
        pool = Pool(ledger, None, when_lost="refuse", tasks=tasks, clock=time.time)
        gc.collect()
        gc.freeze()  # as an edge does
        budgets = Budgets(pool=pool, settings=Settings(), usage=usage, edge="here")
        for i in range(requests):
            request = GenerateRequest(
                id=RequestId(f"{me}-{i}"), model=ModelName("tiny"), prompt=tuple(range(16)),
                seed=1, rendered_at=1,
            )  # fmt: skip
            began = time.perf_counter()
            caller = door.authenticate(headers)
            async with budgets.tab(caller, caller.bind(request), "chat") as tab:
                tab.headers()
                let_in = time.perf_counter()
                tab.see(_BATCH)
                tab.finish(_DONE)
            ended = time.perf_counter()
            taken.append(Taken((let_in - began) * 1000, (ended - let_in) * 1000))
            await asyncio.sleep(PACE_S)
    ledger.close()
    usage.close()
    return taken


def main() -> int:
    folder, requests = Path(sys.argv[1]), int(sys.argv[2])
    sys.stdout.write(msgspec.json.encode(asyncio.run(one_process(folder, requests))).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
