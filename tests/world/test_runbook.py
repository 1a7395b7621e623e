"""The six incidents of docs/runbook.md: each is brought about in a world of real processes, is seen
by the alert that the page names, and is over when the page's commands have been run."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from msgspec.structs import replace

from core import config
from core.keys import append_new, key_id, new_key
from tests.world.campaign import stopped_rank
from tests.world.faults import until
from tests.world.runbook import PAGE, Operator, rules, sections_of
from tests.world.runbook_world import (
    CROWD_LIMIT,
    LARGE,
    SHARED_LIMIT,
    SLOTS,
    STORM_LIMIT,
    TIDES,
    Scene,
    cells,
    listed,
    scene_in,
    seconds,
    table,
    with_limit,
    with_pools,
)
from tests.world.scripted import (
    Answer,
    completion,
    lines_of,
    region_status,
    streaming,
    take,
)

pytestmark = pytest.mark.world

SECTIONS = sections_of(PAGE.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with scene_in(tmp_path_factory.mktemp("runbook"), tmp_path_factory.mktemp("redis")) as made:
        yield made


def slug(title: str) -> str:
    return title.lower().replace(" ", "_")


@pytest.fixture
def operator(request: pytest.FixtureRequest, scene: Scene) -> Iterator[Operator]:
    """Of the section whose title the test has. Its alerts are quiet before, and all of its commands
    were run afterwards."""
    by_slug = {slug(title): section for title, section in SECTIONS.items()}
    section = by_slug[request.node.name.removeprefix("test_")]
    one = Operator(section, scene.home)
    assert all(scene.monitor.calms(alert) for alert in section.alerts)
    yield one
    assert one.left == []


def test_each_incident_of_the_page_has_a_test_and_its_alerts_exist() -> None:
    assert len(SECTIONS) == 6
    assert {f"test_{slug(title)}" for title in SECTIONS} <= set(globals())
    assert all(section.commands and section.alerts for section in SECTIONS.values())
    assert {alert for section in SECTIONS.values() for alert in section.alerts} <= rules()


def test_the_cache_is_cold(scene: Scene, operator: Operator) -> None:
    def prompt(turn: int) -> str:
        return f"{turn % 6}: {TIDES * 2}"

    with scene.crowd("nyc", prompt, "reader", count=SLOTS) as crowd:
        assert scene.monitor.raises("SkerryCacheCold")
        one = listed(operator.run("skerry explain"), "reader", "ok")
        assert ", 0 of them cached" in operator.run("skerry explain ID", ID=one)
        larger = scene.file_with(lambda now: with_pools(now, "us", LARGE))
        assert ": ok." in operator.run("skerry config check FILE", FILE=larger)
        operator.run("skerry deploy REGION --topology FILE", REGION="us", FILE=larger)
        # After those that are under way, and each prompt once.
        assert until(lambda: cached_share(crowd.more(12)) >= 0.9)
    assert crowd.good


def cached_share(answers: list[Answer]) -> float:
    prompts = [one.usage for one in answers if one.usage]
    cached = sum(one["prompt_tokens_details"]["cached_tokens"] for one in prompts)
    return float(cached / sum(one["prompt_tokens"] for one in prompts))


def test_a_quota_storm(scene: Scene, operator: Operator) -> None:
    began = time.monotonic()

    def granted() -> int:
        return sum(one.done for one in crowd.answers)

    def minutes() -> int:
        """In so many a busy machine had this done. They slide in steps of five seconds."""
        return int(time.monotonic() - began + 5) // 60

    with scene.crowd("nyc", lambda turn: f"now, {turn}", "storm", count=2, pause_s=0.1) as crowd:
        crowd.more(5 * STORM_LIMIT)
        assert scene.monitor.raises("SkerryQuotaStorm")
        one = listed(operator.run("skerry explain"), "storm", "rate_limit_exceeded")
        told = re.search(r"asked by storm, key (\w+)", operator.run("skerry explain ID", ID=one))
        assert told is not None
        assert told[1] == key_id(scene.keys["storm"])
        least = granted()
        used = int(cells(operator.run("skerry usage --by tenant"), "storm")[1])
        assert STORM_LIMIT <= least <= used <= granted() + 2  # written down before they are heard
        assert used <= STORM_LIMIT * (1 + minutes())
        operator.run("skerry keys revoke ID", ID=told[1])
        assert until(lambda: {one.status for one in crowd.more(20)} == {401})
    refused = [one for one in crowd.answers if one.status == 429]
    assert refused
    assert all(int(one.headers["retry-after"]) >= 1 for one in refused)
    scene.keys["storm"], record = new_key("storm", now=0)
    append_new(scene.world.world.state / scene.world.world.topology.access.keys, [record])
    anew = scene.ask("nyc", "with a new key", "storm")
    assert anew.status == 429 or minutes(), "what was used in the last minute counts for it too"
    more = scene.file_with(lambda now: with_limit(now, "storm", 100 * STORM_LIMIT))
    operator.run("skerry deploy EDGE --topology FILE", EDGE="nyc", FILE=more)
    assert scene.ask("nyc", "with a larger limit", "storm").done


def test_a_node_flaps(scene: Scene, operator: Operator) -> None:
    def pid_up() -> int:
        nodes = region_status(scene.world, "eu")["nodes"]
        (node,) = [one for one in nodes if one["name"] == "eu-2"]
        return int(node["pid"]) if node["alive"] else 0

    def ends() -> None:
        """As the kernel ends what takes too much memory."""
        before = pid_up()
        scene.world.kill("eu-2")
        assert until(lambda: pid_up() not in (0, before))

    for _ in range(6):
        ends()
        if "SkerryNodeFlaps" in scene.monitor.raised():
            break
    assert scene.monitor.raises("SkerryNodeFlaps")
    assert "eu-2 ended (killed by SIGKILL), starting again in 0.1 s" in scene.said
    processes = table(operator.run("skerry status"), "process")
    assert seconds(cells(processes, "eu-2")[5]) < seconds(cells(processes, "eu-1")[5])
    operator.run("skerry drain NODE", NODE="eu-2")
    with scene.crowd("ams", lambda turn: f"{turn} {TIDES}", "", count=4) as crowd:
        crowd.more(8)
        ends()
        crowd.more(8)
    assert "draining" in operator.run("skerry status")
    assert crowd.good
    assert "eu-2" not in {one.headers["x-skerry-decode"] for one in crowd.answers}
    huge = scene.file_with(lambda now: with_pools(now, "eu", 1 << 30))
    assert "'eu-2': kv_tokens" in operator.run("skerry config check FILE", FILE=huge)
    operator.run("skerry undrain NODE", NODE="eu-2")
    with scene.crowd("ams", lambda turn: f"{turn} {TIDES}", "", count=4) as crowd:
        assert until(lambda: "eu-2" in {one.headers["x-skerry-decode"] for one in crowd.more(4)})
    assert crowd.good


def test_one_prefix_is_hot(scene: Scene, operator: Operator) -> None:
    everybody = 4 * SLOTS  # a quarter more than there are places
    with scene.crowd(
        "ams", lambda _: f"again and again: {TIDES * 2}", "crowd", count=everybody, tokens=60
    ) as crowd:
        assert scene.monitor.raises("SkerryHotPrefix")

        def waiting() -> int:
            regions = table(operator.run("skerry status"), "from-ams")
            return sum(int(cells(regions, one)[4]) for one in ("eu", "us"))

        def all_of_it_is_its_key() -> bool:
            one = listed(operator.run("skerry explain"), "crowd")
            told = operator.run("skerry explain ID", ID=one)
            depth = re.search(r"key: (\d+) of (\d+) text", told)
            assert depth is not None, told
            return depth[1] == depth[2]

        assert until(lambda: waiting() > 0)
        assert until(all_of_it_is_its_key)
        used = operator.run("skerry usage --by tenant")
        assert int(cells(used, "crowd")[1]) >= everybody
        less = scene.file_with(lambda now: with_limit(now, "crowd", CROWD_LIMIT))
        operator.run("skerry deploy EDGE --topology FILE", EDGE="ams", FILE=less)
        assert until(lambda: {one.status for one in crowd.more(everybody)} == {429})
    assert not crowd.failures
    assert all(one.done for one in crowd.answers if one.status == 200)
    assert until(lambda: not any(region_status(scene.world, r)["queued"] for r in ("eu", "us")))
    assert scene.ask("ams", "is there room now?").done


def test_redis_is_dead(scene: Scene, operator: Operator) -> None:
    def asked(edge: str, tenant: str) -> tuple[int, str]:
        one = scene.ask(edge, "a word on the limits", tenant)
        return one.status, str((one.error or {}).get("code", ""))

    assert asked("ams", "berth") == asked("nyc", "berth") == (200, "")
    scene.redis.kill()
    refused = (503, "limits_unavailable")
    assert until(lambda: asked("ams", "berth") == asked("nyc", "berth") == refused)
    assert all("shared limits lost" in scene.log(edge) for edge in ("ams", "nyc"))
    assert asked("ams", "") == (200, "")
    with scene.crowd("nyc", lambda turn: f"{turn} times", "berth", count=1):
        assert scene.monitor.raises("SkerryErrors")
    assert listed(operator.run("skerry explain"), "berth", "limits_unavailable")

    def allowing(now: config.Topology) -> config.Topology:
        return replace(now, budgets=replace(now.budgets, when_redis_is_lost="allow"))

    file = scene.file_with(allowing)
    operator.run("skerry deploy EDGE --topology FILE", EDGE="ams", FILE=file)
    assert asked("ams", "berth") == (200, "")
    # A lease of the minute's next step, taken before Redis died, is used up first.
    assert until(lambda: asked("nyc", "berth") == refused), "it goes by what it was started with"
    scene.redis.start()
    assert until(lambda: asked("nyc", "berth") == (200, ""))
    assert "shared limits are back" in scene.log("nyc")
    told = [asked(edge, "quay")[0] for _ in range(SHARED_LIMIT) for edge in ("ams", "nyc")]
    assert SHARED_LIMIT - 2 <= told.count(200) <= SHARED_LIMIT


def test_a_region_is_lost(scene: Scene, operator: Operator) -> None:
    """The last one: it leaves a world that lacks processes."""
    edge, lost = scene.world.edges["nyc"], ("us", "us-1")
    for name in lost:
        scene.world.processes[name].revive = False  # as where each process is started by itself

    def from_us(key: str) -> bool:
        answer = scene.ask("nyc", "who is there?", prompt_cache_key=key)
        return answer.headers["x-skerry-region"] == "us"

    at_us = {"prompt_cache_key": next(str(n) for n in range(50) if from_us(str(n)))}
    words = TIDES[:100]
    with (
        ThreadPoolExecutor() as pool,
        streaming(edge, completion(words, max_tokens=len(words), **at_us)) as begun,
    ):
        lines, broken = lines_of(begun), Answer(begun.status_code, begun.headers)
        while not take(broken, next(lines)):
            pass
        with stopped_rank(scene.world, "us-1", "us"):  # so that none of them is over first
            others = [
                pool.submit(scene.ask, "nyc", f"{n}{words}", max_tokens=len(words), **at_us)
                for n in range(SLOTS)  # for the last one there is no place
            ]
            assert until(lambda: region_status(scene.world, "us")["active"] == SLOTS + 1)
            for name in lost:
                scene.world.kill(name)
        for line in lines:
            take(broken, line)
        answers = [one.result() for one in others]
    assert broken.headers["x-skerry-region"] == "us"
    assert all(one.done is (one.error is None) for one in (broken, *answers))
    assert not broken.done
    assert "failover" in {one.headers["x-skerry-route"] for one in answers if one.done}
    assert scene.monitor.raises("SkerryRegionSilent")
    assert scene.ask("nyc", "and now?", **at_us).done

    def seen_by_ams() -> str:
        return cells(table(operator.run("skerry status"), "from-ams"), "us")[1]

    assert until(lambda: seen_by_ams() == "suspect")
    assert "failover" in operator.run("skerry explain")
    told = {"FILE": scene.topology, "FOLDER": scene.world.world.state}
    with (
        operator.running(
            "skerry router --topology FILE --name REGION --state FOLDER", REGION="us", **told
        ),
        operator.running(
            "skerry node --topology FILE --name NODE --state FOLDER", NODE="us-1", **told
        ),
    ):
        assert until(lambda: from_us(at_us["prompt_cache_key"]))
        assert scene.monitor.calms("SkerryRegionSilent")
