"""The host as an edge of several processes runs it: served by all, back after a kill, gone with
the edge."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from core.errors import ConfigError
from deploy.worker.fleet import Admin, Fleet
from edge.workers import tools
from edge.workers.bundle import pack
from tests.edge.fakes import FakeRegion, saying, world_of
from tests.edge.served import served
from tests.edge.workers.doubles import bundle_of

ROOT = Path(__file__).parents[3]
CODE = """
export default {
  async fetch(request, env) {
    const { response } = await env.AI.run("tiny", { prompt: "x" });
    return new Response(`WORD: ${response}`);
  },
};
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def edge(folder: Path, region: str, listen: int, admin: int) -> Iterator[subprocess.Popen[bytes]]:
    world = world_of(folder, FakeRegion("eu", address=region))
    (folder / "admin.secret").write_text("an-admin-secret-for-tests")
    name = 'name = "here"'
    more = f'{name}\nlisten = "127.0.0.1:{listen}"\nadmin = "127.0.0.1:{admin}"\nworkers = 2'
    world.path.write_text(world.path.read_text().replace(name, more))
    command = [sys.executable, "-m", "edge", "--topology", str(world.path), "--state", str(folder)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--name", "here"], stdout=log, stderr=log, cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def eventually(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.world
def test_a_host_beside_a_crew(tmp_path: Path) -> None:
    try:
        tools.install(lambda _: None)
    except ConfigError as error:
        pytest.skip(str(error))
    listen, admin = free_port(), free_port()
    headers = {"authorization": "Bearer an-admin-secret-for-tests"}
    with (
        served(FakeRegion("eu", script=saying("a", "b"))) as region,
        edge(tmp_path, region, listen, admin) as process,
        httpx.Client(trust_env=False, timeout=60, headers=headers) as client,
    ):

        def ask(url: str) -> tuple[int, str]:
            try:
                answer = httpx.get(
                    url, trust_env=False, timeout=60, verify=False
                )  # a connection each
            except httpx.HTTPError as error:
                return 0, str(error)
            return answer.status_code, answer.text

        base = f"http://127.0.0.1:{listen}"
        eventually(lambda: ask(f"http://127.0.0.1:{admin}/healthz")[0] == 200)
        eventually(lambda: ask(f"{base}/readyz")[0] == 200)
        fleet = Fleet([Admin("here", f"http://127.0.0.1:{admin}", client)])
        for word in ("one", "two"):
            bundle = bundle_of(CODE.replace("WORD", word), ai="AI")
            fleet.deploy("w", pack(bundle), tenant="anonymous")
            said = {ask(f"{base}/w/w/") for _ in range(12)}
            assert said == {(200, f"{word}: ab")}, "every process serves it, at once"
        family = psutil.Process(process.pid).children(recursive=True)
        hosts = [one for one in family if "edge.workers" in one.cmdline()]
        runtimes = [one for one in family if "workerd" in one.name()]
        assert (len(hosts), len(runtimes)) == (1, 1)
        hosts[0].kill()
        eventually(lambda: not runtimes[0].is_running())  # nothing of it is left behind
        eventually(lambda: ask(f"{base}/w/w/") == (200, "two: ab"))
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        eventually(lambda: not any(one.is_running() for one in family))
