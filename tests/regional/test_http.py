"""The region's HTTP face: what is behind the secret, what is refused and how, what is published."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from core.events import Fault, event_decoder
from core.status import RegionStatus, status_decoder
from tests.regional.fake_node import MODEL, attempt_of
from tests.regional.fakes import Here, ask, delta, ending, region, run

NODE = ("d1", "decode")


async def _only(here: Here, body: bytes, headers: dict[str, str] | None = None) -> Fault:
    url = f"{here.base}/internal/v1/generate"
    async with here.client.post(url, data=body, headers=headers or here.headers) as answer:
        assert answer.status == 200
        assert answer.content_type == "application/x-skerry-frames"
        [fault] = event_decoder().feed(await answer.read())
    assert isinstance(fault, Fault)
    return fault


async def _fault(here: Here, request: object) -> Fault:
    return await _only(here, msgspec.msgpack.encode(request))


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "generate"), ("POST", "cancel/r1"), ("GET", "status")]
)
@pytest.mark.parametrize("secret", [None, "", "wrong", "é"])
def test_bad_secrets(tmp_path: Path, method: str, path: str, secret: str | None) -> None:
    async def test() -> None:
        async with region(tmp_path, NODE) as here:
            url = f"{here.base}/internal/v1/{path}"
            headers = {} if secret is None else {"x-skerry-secret": secret}
            headers["x-skerry-wire"] = "1"
            async with here.client.request(method, url, headers=headers) as answer:
                assert answer.status == 403
                assert (await answer.json())["error"]["code"] == "forbidden"

    run(test())


def test_refusals_before_any_placement(tmp_path: Path) -> None:
    async def test() -> None:
        async with region(tmp_path, NODE) as here:
            node = await here.joined(*NODE)
            skewed = here.headers | {"x-skerry-wire": "2"}
            body = msgspec.msgpack.encode(ask())
            assert (await _only(here, body, skewed)).code == "version_skew"
            assert (await _only(here, b"\xc1")).code == "invalid_request"
            assert (await _only(here, msgspec.msgpack.encode({"id": 3}))).code == "invalid_request"
            assert (await _only(here, b"x" * 300_000)).code == "body_too_large"
            assert (await _fault(here, ask(""))).code == "invalid_request"
            assert (await _fault(here, ask(()))).code == "invalid_request"
            unknown = await _fault(here, ask(model="smal"))
            assert unknown.code == "model_not_found"
            assert "'small'" in unknown.message
            assert node.unread() == []

    run(test())


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "numbers"),
    [(4096, None, ("4096",)), (5000, 1, ("5000", "4096")), (4000, 97, ("4000", "97", "4096"))],
)
def test_context_exceeded_names_the_numbers(
    tmp_path: Path, prompt: int, max_tokens: int | None, numbers: tuple[str, ...]
) -> None:
    """B12: refused before anything is placed, never shortened."""

    async def test() -> None:
        async with region(tmp_path, NODE) as here:
            node = await here.joined(*NODE)
            fault = await _fault(here, ask("x" * prompt, max_tokens=max_tokens))
            assert fault.code == "context_length_exceeded"
            assert fault.param == "prompt"
            for number in numbers:
                assert number in fault.message
            assert node.unread() == []
            fits = here.asking(ask("x" * 3999, max_tokens=97))
            node.output(attempt_of(await node.got("start")), delta("a"), *ending())
            assert (await fits)[-1] == ending()[-1]

    run(test())


def test_without_nodes_the_edge_may_go_elsewhere(tmp_path: Path) -> None:
    async def test() -> None:
        async with region(tmp_path, ("p1", "prefill"), NODE) as here:
            await here.joined("p1", "prefill")
            fault = await _fault(here, ask())
            assert (fault.code, fault.retryable) == ("region_unavailable", True)

    run(test())


def test_an_alias_reaches_the_model(tmp_path: Path) -> None:
    async def test() -> None:
        async with region(tmp_path, NODE) as here:
            node = await here.joined(*NODE)
            answer = here.asking(ask(model="default"))
            node.output(attempt_of(await node.got("start")), delta("a"), *ending())
            assert (await answer)[-1] == ending()[-1]

    run(test())


def test_readiness_follows_the_nodes(tmp_path: Path) -> None:
    async def test() -> None:
        async with region(tmp_path, ("p1", "prefill"), NODE) as here:

            async def ready() -> int:
                async with here.client.get(f"{here.base}/readyz") as answer:
                    return answer.status

            async with here.client.get(f"{here.base}/healthz") as answer:
                assert answer.status == 200
            assert await ready() == 503
            await here.joined("p1", "prefill")
            assert await ready() == 503
            node = await here.joined(*NODE)
            assert await ready() == 200
            await node.die()
            await here.until(lambda: len(here.app.router.cluster.view().nodes) == 1)
            assert await ready() == 503

    run(test())


def test_status_stream(tmp_path: Path) -> None:
    """A frame on change, one at least each second, counted without gaps or repeats."""

    async def test() -> None:
        async with region(tmp_path, NODE) as here:
            decoder = status_decoder()
            frames: list[RegionStatus] = []
            url = f"{here.base}/internal/v1/status"
            async with here.client.get(url, headers=here.headers) as answer:

                async def until(enough: Callable[[RegionStatus], object]) -> RegionStatus:
                    async with asyncio.timeout(30):
                        while not (frames and enough(frames[-1])):
                            told = decoder.feed(await answer.content.readany())
                            frames.extend(one for one in told if isinstance(one, RegionStatus))
                    return frames[-1]

                empty = await until(lambda it: True)
                assert (empty.region, empty.models) == ("here", ())
                assert [(one.name, one.alive) for one in empty.nodes] == [("d1", False)]
                node = await here.joined(*NODE)
                up = await until(lambda it: it.models)
                assert up.models[0].name == MODEL
                assert up.models[0].context == 4096
                assert up.models[0].decode_tokens_per_s == 50.0
                node.beat(running=1, blocks_used=512, generated_tokens=9)
                here.background.append(here.asking(ask("x" * 2000)))
                await node.got("start")
                busy = await until(lambda it: it.active and it.kv_used)
                assert busy.prefill_work_s == pytest.approx(2000 / 1000)
                assert busy.decode_work_s == pytest.approx(8 / (50 * 4))
                assert busy.kv_used == 0.5
                assert busy.nodes[0].generated_tokens == 9
                assert busy.nodes[0].prefill_backlog_tokens == 2000
                quiet = await until(lambda it: it.sequence > busy.sequence)
            numbers = [frame.sequence for frame in frames]
            assert numbers == sorted(set(numbers))
            assert {frame.epoch for frame in frames} == {quiet.epoch}

    run(test())


def test_status_page_and_metrics(tmp_path: Path) -> None:
    async def test() -> None:
        async with region(tmp_path, NODE) as here:
            node = await here.joined(*NODE)
            node.beat(blocks_used=3)
            answer = here.asking(ask("short"))
            node.output(attempt_of(await node.got("start")), delta("a"), *ending(5, 2))
            await answer
            await _fault(here, ask(model="nope"))
            async with here.client.get(f"{here.base}/status") as page:
                status = msgspec.json.decode(await page.read(), type=RegionStatus)
            assert [(one.name, one.pid, one.alive) for one in status.nodes] == [("d1", 7, True)]
            async with here.client.get(f"{here.base}/metrics") as page:
                lines = (await page.text()).splitlines()
            for line in (
                'skerry_router_requests_total{outcome="ok"} 1.0',
                'skerry_router_requests_total{outcome="model_not_found"} 1.0',
                'skerry_router_placements_total{reason="short_remainder"} 1.0',
                'skerry_router_prompt_tokens_total{kind="all"} 5.0',
                'skerry_router_nodes{role="decode"} 1.0',
                'skerry_kv_blocks_used{node="d1",region="here"} 3.0',
            ):
                assert line in lines

    run(test())


def test_a_lost_node_stays_in_the_status_and_only_its_loss_in_the_metrics(tmp_path: Path) -> None:
    async def test() -> None:
        async with region(tmp_path, NODE) as here:
            node = await here.joined(*NODE)
            await node.die()
            await here.until(lambda: here.app.router.cluster.view().nodes == ())
            async with here.client.get(f"{here.base}/status") as page:
                status = msgspec.json.decode(await page.read(), type=RegionStatus)
            [lost] = status.nodes
            assert (lost.name, lost.role, lost.alive, lost.pid) == ("d1", NODE[1], False, 0)
            async with here.client.get(f"{here.base}/metrics") as page:
                told = [line for line in (await page.text()).splitlines() if 'node="d1"' in line]
            assert told[0] == 'skerry_router_lost_nodes_total{node="d1"} 1.0'
            assert [line for line in told if "lost_nodes" not in line] == []

    run(test())
