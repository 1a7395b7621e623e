"""The official npm client against the default world: plain, streamed, tools, schemas."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import jsonschema
import pytest

from deploy.launcher import LocalWorld
from tests.world.test_agent import PARAMETERS

pytestmark = [pytest.mark.world, pytest.mark.model, pytest.mark.timeout(400)]

PACKAGE = "openai@7.59.0"
SCRIPT = Path(__file__).with_name("openai_client.mjs")


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The script beside an installed client."""
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.skip("node and npm are not installed")
    folder = tmp_path_factory.mktemp("npm")
    install = [npm, "install", "--no-audit", "--no-fund", "--ignore-scripts", "--silent", PACKAGE]
    done = subprocess.run(install, cwd=folder, capture_output=True, timeout=100, check=False)
    if done.returncode:
        pytest.skip(f"npm could not install {PACKAGE}: {done.stderr.decode()[-200:]}")
    return Path(shutil.copy(SCRIPT, folder / SCRIPT.name))


def test_the_npm_client_runs_its_calls(real: LocalWorld, script: Path) -> None:
    done = subprocess.run(
        ["node", str(script), real.edges["ams"]], capture_output=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    said = json.loads(done.stdout)
    assert said["whole"]
    assert said["streamed"] == said["whole"]
    assert said["tokens"] > 0
    assert said["forced"]["name"] == "get_weather"
    jsonschema.validate(json.loads(said["forced"]["arguments"]), PARAMETERS)
    assert {k: said["joined"][k] for k in ("name", "arguments")} == said["forced"]
    jsonschema.validate(said["called"], PARAMETERS)
    assert said["roles"] == ["user", "assistant", "tool"]
    assert said["document"]["kind"] in ("boat", "é")
    status, code, message = said["refused"]
    assert (status, code) == (400, "unsupported_field")
    assert "'not'" in message
    assert "smollm2" in said["models"] or "smollm2-135m-instruct" in said["models"]
