"""An edge and a region come to a world that runs, leave it under streams, and come again; an edge
that comes has the Workers of the others."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from msgspec.structs import replace

from core.config import Topology
from core.errors import ConfigError
from core.orders import OrderAsk, orders_file
from core.usage import UsageReader
from deploy.launcher import LocalWorld
from deploy.orders import give, part_of
from deploy.rollout.messages import Deploy
from deploy.rollout.running import asked
from deploy.state import current_of
from deploy.topology_diff import departing
from deploy.worker import act
from deploy.worker.fleet import fleet_of
from edge.workers.python.runtime import sandbox
from tests.world.callers import Callers
from tests.world.faults import until
from tests.world.growing import ASIA, Long, grown, key_to_asia, long_in_asia, stunted, without
from tests.world.scripted import ask, completion, page, region_status, scripted_world
from tests.world.test_rollout import deploy, file_of, pids
from tests.world.workers_client import MODEL, WorkersAI

pytestmark = pytest.mark.world

SECRET = "seen-by-nobody"
WORKER = """
from workers import Response, WorkerEntrypoint

class Default(WorkerEntrypoint):
    async def fetch(self, request):
        return Response(str(len(self.env.KEY)))
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalWorld]:
    with scripted_world(tmp_path_factory.mktemp("departures"), step_ms=4.0, repeat=True) as running:
        yield running


@pytest.fixture
def whole(world: LocalWorld, tmp_path: Path) -> LocalWorld:
    """With asia and sfo."""
    for new in {"asia", "sfo"} - pids(world).keys():
        deploy(world, new, topology=str(file_of(world, tmp_path, grown)))
        break  # all that is new has come
    return world


@dataclass(frozen=True)
class Staying:
    edges: Mapping[str, str]


def rolled(world: LocalWorld, unit: str, file: str, idle_s: float) -> list[str]:
    what = Deploy(unit=unit, topology=file, idle_s=idle_s, ready_s=60)
    return list(asked(what, world.world.state))


def outcomes_of_batches(world: LocalWorld) -> list[str]:
    records = UsageReader().read(world.world.state / "usage")
    return [one.outcome for one in records if one.dialect == "batch"]


def regions_of(edge: str) -> dict[str, str]:
    return {one["name"]: one["state"] for one in page(f"{edge}/status")["regions"]}


def test_one_that_does_not_come_up_leaves_the_world_as_it_was(
    world: LocalWorld, tmp_path: Path
) -> None:
    before, edges = pids(world), dict(world.edges)
    with pytest.raises(ConfigError, match="the world is as it was"):
        deploy(world, "asia", topology=str(file_of(world, tmp_path, stunted)))
    assert (pids(world), world.edges) == (before, edges)


def test_a_region_and_an_edge_come_under_streams(world: LocalWorld, tmp_path: Path) -> None:
    before = pids(world)
    file = str(file_of(world, tmp_path, grown))
    with Callers(world, 4) as callers:
        assert until(lambda: len(callers.answers) >= 4)
        deploy(world, "asia", topology=file)
        assert ask(world.edges["sfo"], completion("hello from here", max_tokens=4)).done
        all_fresh = dict.fromkeys(("eu", "us", "asia"), "fresh")
        assert until(lambda: regions_of(world.edges["ams"]) == all_fresh)
    callers.check()
    after = pids(world)
    assert after.keys() - before.keys() == {"asia", "asia-prefill", "asia-decode", "sfo"}
    assert {name for name in before if before[name] != after[name]} == {"ams", "nyc"}
    assert deploy(world, "asia", topology=file) == ["nothing to do: asia runs this already"]
    assert deploy(world, "eu", topology=file) == ["nothing to do: eu runs this already"]
    current = current_of(world.world.state)
    assert current is not None
    assert current.edges["sfo"] == world.edges["sfo"]

    lost = world.pid("asia")
    world.kill("asia")
    assert until(lambda: world.pid("asia") != lost)
    deploy(world, "sfo", again=True)
    assert ask(world.edges["sfo"], completion("and again", max_tokens=4)).done


def test_a_region_that_still_answers_when_the_patience_ends_stays(
    whole: LocalWorld, tmp_path: Path
) -> None:
    before = pids(whole)
    file = str(file_of(whole, tmp_path, without("asia")))
    long, key = long_in_asia(whole.edges["sfo"], 15_000)  # a minute
    with pytest.raises(ConfigError, match=r"asia still has 1 under way after 1 s[\s\S]*as it was"):
        rolled(whole, "asia", file, idle_s=1)
    after = pids(whole)
    assert after.keys() == before.keys()
    assert {name: after[name] for name in ASIA} == {name: before[name] for name in ASIA}
    far = len(long.answer.text)
    assert until(lambda: len(long.answer.text) > far), "it goes on"
    assert long.leave().error is None
    assert region_status(whole, "asia").get("draining", False) is False
    assert until(lambda: regions_of(whole.edges["sfo"]).get("asia") == "fresh")

    def comes_home() -> bool:
        said = ask(whole.edges["sfo"], completion("on and on", max_tokens=4, prompt_cache_key=key))
        return said.headers["x-skerry-region"] == "asia"

    assert until(comes_home), "what the long one had to say is still counted"


@pytest.mark.parametrize(
    ("unit", "gone", "words"),
    [
        ("asia", ("eu", "us", "asia"), "at least one edge, one region"),
        ("ams", ("ams", "nyc", "sfo"), "at least one edge, one region"),
        ("eu", ("asia",), "asia is not in this topology any more: take it out with"),
    ],
)
def test_what_a_world_cannot_do_without_stays(
    whole: LocalWorld, tmp_path: Path, unit: str, gone: tuple[str, ...], words: str
) -> None:
    before = pids(whole)
    with pytest.raises(ConfigError, match=words):
        deploy(whole, unit, topology=str(file_of(whole, tmp_path, without(*gone))))
    assert pids(whole) == before


def test_a_region_leaves_under_streams_and_with_nothing_queued(
    whole: LocalWorld, tmp_path: Path
) -> None:
    before, topology = pids(whole), whole.world.topology
    file = str(file_of(whole, tmp_path, without("asia")))
    planned = deploy(whole, "asia", topology=file, dry_run=True)
    assert planned[:2] == ["1. drain region asia", "2. wait until nothing is queued in region asia"]
    assert [line.partition(" ")[2] for line in planned[-3:]] == [
        "stop asia-prefill", "stop asia-decode", "stop asia",
    ]  # fmt: skip
    assert pids(whole) == before
    with WorkersAI(whole.edges["sfo"]) as ai, Callers(whole, 4) as callers:
        long, _ = long_in_asia(whole.edges["sfo"], 1600)
        give(whole.world, part_of(whole.world.topology, "asia"), OrderAsk(weight=7))
        name = ai.queue(MODEL, *({"prompt": f"{n} boats", "raw": True} for n in range(4)))
        said = deploy(whole, "asia", topology=file)
        seen_so_far = len(callers.answers)
        assert until(lambda: len(callers.answers) >= seen_so_far + 8)
    callers.check()
    answer = long.end()
    assert (answer.done, answer.error, answer.headers["x-skerry-region"]) == (True, None, "asia")
    if name.startswith("asia."):
        told = "kept answers of batches that cannot be asked for without it: 1"
        assert any(told in line for line in said)
    assert until(lambda: outcomes_of_batches(whole) == ["ok"] * 4), "all ran, and were written down"
    after = pids(whole)
    assert before.keys() - after.keys() == ASIA
    assert departing(topology, whole.world.topology) == ["asia", "asia-prefill", "asia-decode"]
    assert {name for name in after if before[name] != after[name]} == {"ams", "nyc", "sfo"}
    assert all("asia" not in regions_of(edge) for edge in whole.edges.values())
    assert "asia" not in whole.routers
    assert not orders_file(whole.world.state, "asia").exists()
    with pytest.raises(ConfigError, match="neither an edge nor a region 'asia'"):
        deploy(whole, "asia", topology=file)


def test_a_region_comes_again_without_the_orders_that_it_left_with(whole: LocalWorld) -> None:
    status = region_status(whole, "asia")
    assert (status.get("draining", False), status.get("more", {}).get("weight", 0)) == (False, 0)
    assert key_to_asia(whole.edges["sfo"])


def test_an_edge_leaves_with_its_last_answer_and_comes_again_at_its_port(
    whole: LocalWorld, tmp_path: Path
) -> None:
    before, was = pids(whole), whole.world.topology.edge("sfo")
    file = str(file_of(whole, tmp_path, without("sfo")))
    staying = Staying({name: url for name, url in whole.edges.items() if name != "sfo"})
    with Callers(staying, 2) as callers:
        long = Long(was.url, 600)
        deploy(whole, "sfo", topology=file)
    callers.check()
    assert (long.end().done, long.answer.error) == (True, None)
    after = pids(whole)
    assert before.keys() - after.keys() == {"sfo"}
    assert {name for name in after if before[name] != after[name]} == set()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{was.url}/healthz", trust_env=False)
    current = current_of(whole.world.state)
    assert current is not None
    assert "sfo" not in current.edges

    def at_its_port(topology: Topology) -> Topology:
        after = grown(topology)
        return replace(
            after, edges=(*after.edges[:-1], replace(after.edges[-1], listen=was.listen))
        )

    deploy(whole, "sfo", topology=str(file_of(whole, tmp_path, at_its_port)))
    assert whole.edges["sfo"] == was.url
    assert ask(was.url, completion("here again", max_tokens=4)).done


def test_what_an_edge_has_when_the_patience_ends_is_broken_off(
    whole: LocalWorld, tmp_path: Path
) -> None:
    long = Long(whole.edges["sfo"], 15_000)
    said = rolled(whole, "sfo", str(file_of(whole, tmp_path, without("sfo"))), idle_s=1)
    assert any("edge sfo still answers after 1 s: what it has is broken off" in s for s in said)
    assert "sfo" not in pids(whole)
    assert long.end().done is False


def test_an_edge_that_comes_serves_the_workers_of_the_others(
    whole: LocalWorld, tmp_path: Path
) -> None:
    if sandbox() is None:
        pytest.skip("bubblewrap is not installed, and Python Workers run in it")
    deploy(whole, "sfo", topology=str(file_of(whole, tmp_path, without("sfo"))))
    folder = tmp_path / "worker"
    folder.mkdir()
    (folder / "entry.py").write_text(WORKER, encoding="utf-8")
    wrangler = {
        "name": "counter", "main": "entry.py", "compatibility_date": "2025-10-08",
        "compatibility_flags": ["python_workers"],
    }  # fmt: skip
    (folder / "wrangler.json").write_text(json.dumps(wrangler), encoding="utf-8")
    act.deploy(folder, None, whole.world, "")
    act.set_secret("counter", "KEY", SECRET, whole.world)
    said = deploy(whole, "sfo", topology=str(file_of(whole, tmp_path, grown)))
    with fleet_of(whole.world) as fleet:
        versions = {edge: page.worker.version for edge, page in fleet.worker("counter")}
    assert versions.keys() == {"ams", "nyc", "sfo"}
    assert len(set(versions.values())) == 1
    assert f"  counter {versions['sfo']} is served" in said
    assert f"  counter {versions['sfo']} with its secrets (1), as edge ams has it" in said
    assert SECRET not in "\n".join(said)
    page = httpx.get(f"{whole.edges['sfo']}/w/counter/", trust_env=False, timeout=60)
    assert (page.status_code, page.text) == (200, str(len(SECRET)))
    assert all(SECRET not in log.read_text() for log in whole.logs.iterdir())
    place = whole.world.state / "workers" / "sfo"
    deploy(whole, "sfo", topology=str(file_of(whole, tmp_path, without("sfo"))))
    assert not place.exists(), "its secrets go with it"
    act.delete("counter", whole.world)
