"""`skerry up` with real processes and scripted ranks: two worlds side by side, a failed start."""

import os
import re
import subprocess
import sys
from pathlib import Path

import httpx
import msgspec
import psutil
import pytest

from core import config
from core.config_tenants import Access, Tenant
from core.types import Role
from deploy import toml_write
from deploy.launcher import run_world
from deploy.state import running
from deploy.up import expected, key_line, sleeping, stopping
from tests.conftest import Spawn
from tests.deploy.waiting import is_gone, until
from tests.tiny_text import write_tiny_folder

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.world


@pytest.fixture
def topology_file(tmp_path: Path, free_port: int) -> Path:
    """One edge at a fixed port, one region with one node that plays prompts back."""
    source = write_tiny_folder(tmp_path / "tiny", context=1024)
    model = config.Model(source=source.name, engine="scripted")  # beside the file
    node = config.Node(name="eu-1", role=Role.COMBINED, model="tiny")
    topology = config.Topology(
        version=config.VERSION,
        name="small",
        access=Access(anonymous="until-keys"),
        models={"tiny": model},
        edges=(config.Edge(name="ams", listen=f"127.0.0.1:{free_port}"),),
        regions=(config.Region(name="eu", nodes=(node,)),),
    )
    path = tmp_path / "small.toml"
    path.write_text(toml_write.dump(topology), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("shipped", "told"),
    [
        ("five-regions", "5 routers, 5 nodes, 3 edge processes: about 3.1 GB"),
        ("on-demand", "1 routers, 0 nodes, 1 edge processes: about 0.2 GB"),
        ("pool", "1 routers, 0 nodes, 1 edge processes: about 0.2 GB"),
        ("sharded", "1 routers, 2 nodes of 5 ranks, 1 edge processes: about 2.1 GB"),
    ],
)
def test_the_memory_of_a_world_is_told_before_it_starts(shipped: str, told: str) -> None:
    path = ROOT / "deploy" / "topologies" / f"{shipped}.toml"
    described = config.load(path, state=ROOT).topology
    assert expected(described) == f"  {told} of memory with the bundled model"


def test_who_shares_a_place_is_told() -> None:
    path = ROOT / "deploy" / "topologies" / "pool.toml"
    assert list(sleeping(config.load(path, state=ROOT).topology)) == [
        "smollm2-135m-instruct, smollm2-once-more share pool only in home: one node at a time",
        "smollm2-135m-instruct is off in home: the first request starts a node",
        "smollm2-once-more is off in home: the first request starts a node",
    ]


def test_the_line_for_a_key_can_be_copied(topology_file: Path) -> None:
    described = config.load(topology_file, state=ROOT).topology
    assert "add [tenants.NAME]" in key_line(described, "")
    owned = msgspec.structs.replace(described, tenants={"quay": Tenant()})
    assert key_line(owned, " -t local") == (
        "Callers need a key: "
        "export SKERRY_KEY=$(.venv/bin/skerry keys create --tenant quay -t local)"
    )


@pytest.mark.parametrize(
    ("active", "said"),
    [
        ((0, 0), "stopping"),
        ((1, None), "stopping, 1 answer under way; Ctrl-C again breaks off"),
        ((1, 2), "stopping, 3 answers under way; Ctrl-C again breaks off"),
    ],
)
def test_what_is_under_way_is_told_at_the_end(active: tuple[int | None, ...], said: str) -> None:
    counts = {f"r{place}": count for place, count in enumerate(active)}

    def answer(request: httpx.Request) -> httpx.Response:
        count = counts[request.url.host]
        return httpx.Response(503) if count is None else httpx.Response(200, json={"active": count})

    with httpx.Client(transport=httpx.MockTransport(answer)) as client:
        assert stopping(client, {name: f"http://{name}" for name in counts}) == said


def start_up(spawn: Spawn, path: Path) -> "subprocess.Popen[str]":
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from deploy.cli import main; main()"
    return spawn([sys.executable, "-c", code, "up", "--topology", str(path)], cwd=path.parent)


def read_until(process: "subprocess.Popen[str]", words: str) -> str:
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if words in line:
            return seen
    raise AssertionError(f"ended before it said {words!r}:\n{seen}")


def test_two_worlds_run_beside_each_other_and_end_alone(spawn: Spawn, topology_file: Path) -> None:
    first = start_up(spawn, topology_file)
    one = read_until(first, "Ctrl-C")
    second = start_up(spawn, topology_file)
    two = read_until(second, "Ctrl-C")

    port = config.parse(topology_file.read_text()).edges[0].listen
    assert f"http://{port}  edge ams" in one
    assert "another small runs already" in two
    assert "skerry chat 'What" in one
    assert re.search(r"skerry chat --edge http://127.0.0.1:\d+ 'What", two)
    assert f"edge ams: {port} is in use, taking 127.0.0.1:" in two
    for output in (one, two):
        up = re.findall(r"^ +[\d.]+ s +(\w+) +(\S+) +\d+ MB$", output, re.MULTILINE)
        assert sorted(up) == [("edge", "ams"), ("node", "eu-1"), ("router", "eu")]

    worlds = {world.pid: world for world in running(topology_file.parent / ".skerry")}
    assert set(worlds) == {first.pid, second.pid}
    everyone = {
        p: [child.pid for child in psutil.Process(p.pid).children(recursive=True)]
        for p in (first, second)
    }
    assert all(len(found) >= 4 for found in everyone.values())  # router, node and rank, edge

    for example in (["sh", "examples/chat.sh"], [sys.executable, "examples/chat.py"]):
        environment = os.environ | {"EDGE": f"http://{port}", "MODEL": "tiny"}
        asked = subprocess.run(
            [*example, "one two three"], cwd=ROOT, env=environment, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        assert (asked.returncode, asked.stderr) == (0, "")
        assert asked.stdout.strip() != ""

    first.terminate()
    assert first.wait(60) == 0
    assert first.stdout is not None
    assert "stopping\n" in first.stdout.read()
    until(lambda: all(is_gone(pid) for pid in everyone[first]))
    url = worlds[second.pid].edges["ams"]
    assert httpx.get(f"{url}/readyz", trust_env=False, timeout=30).status_code == 200

    second.terminate()
    assert second.wait(60) == 0
    until(lambda: all(is_gone(pid) for pid in everyone[second]))
    assert list(running(topology_file.parent / ".skerry")) == []


def test_who_is_waited_for_is_told_until_all_are_there(topology_file: Path, tmp_path: Path) -> None:
    drawn: list[str] = []
    with run_world(topology_file, say=lambda _: None, draw=drawn.append, state=tmp_path / "state"):
        at_the_end = len(drawn)
    assert re.fullmatch(r" +\d+\.\d s  waiting for eu, eu-1, ams", drawn[0])
    assert len(set(drawn)) > 1
    assert len(drawn) == at_the_end


def test_a_process_that_cannot_start_is_named_with_its_last_words(
    spawn: Spawn, topology_file: Path
) -> None:
    text = topology_file.read_text(encoding="utf-8")
    topology_file.write_text(text.replace('source = "tiny"', 'source = "gone"'), encoding="utf-8")
    process = start_up(spawn, topology_file)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 2
    assert "eu-1 ended while starting, exit code 2" in output or "eu ended while" in output
    assert str(topology_file.parent / "gone") in output
    assert "Traceback" not in output
