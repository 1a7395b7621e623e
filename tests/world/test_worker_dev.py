"""`skerry worker dev`: what is saved is served, what is wrong is said, Ctrl-C ends it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from deploy.launcher import LocalWorld
from deploy.process import with_sources
from tests.world.test_workers import programs, project

pytestmark = [pytest.mark.world]
__all__ = ["programs"]


def says(word: str) -> str:
    return f"export default {{ fetch: (r, env) => new Response(`{word} ${{env.KEY}}`) }}\n"


def test_a_change_is_served_when_it_is_saved(
    world: LocalWorld, programs: None, tmp_path: Path
) -> None:
    folder = project(tmp_path / "d", says("one"), name="d", routes=["d.localhost/*"])
    (folder / ".dev.vars").write_text("KEY=secret\n")
    command = [sys.executable, "-m", "deploy.cli", "worker", "dev", "--cwd", str(folder)]
    log = tmp_path / "log"
    with log.open("wb") as said:
        process = subprocess.Popen(
            [*command, "--state", str(world.world.state)], stdout=said, stderr=said,
            env={**with_sources(), "PYTHONUNBUFFERED": "1"}, cwd=tmp_path,
        )  # fmt: skip
    url = f"{world.edges['ams']}/w/d-dev/"

    def heard() -> str:
        return httpx.get(url, trust_env=False, timeout=60).text

    def eventually(holds: Callable[[], bool]) -> None:
        end = time.monotonic() + 60
        while not holds():
            assert time.monotonic() < end, log.read_text()
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)

    try:
        eventually(lambda: "is served until Ctrl-C" in log.read_text())
        assert heard() == "one secret"
        project(folder, says("two"), name="d")
        eventually(lambda: heard() == "two secret")
        project(folder, "export default {", name="d")
        eventually(lambda: "does not build" in log.read_text())
        assert heard() == "two secret"
        project(folder, "export default { fetch() { throw new Error('mine') } }", name="d")
        eventually(lambda: "threw Error: mine" in heard())
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
    assert "d-dev is gone" in log.read_text()
    assert httpx.get(url, trust_env=False, timeout=60).status_code == 404
