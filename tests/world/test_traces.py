"""One trace of a request through all hops of a world, and one line of it at each."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field

import httpx
import pytest

from deploy.launcher import LocalWorld
from tests.otlp import Collected, Told, collecting
from tests.world.campaign import STALE_S, node, stopped_rank
from tests.world.faults import alive, crowded, until
from tests.world.scripted import MODEL, completion, scripted_world

pytestmark = pytest.mark.world

WORD = "xylophone"
LONG = f"keepers of the {WORD} count their boats. " * 40
TRACE, ABOVE = "0af7651916cd43dd8448eb211c80", "b7ad6b7169203331"
UNSAMPLED = "1af7651916cd43dd8448eb211c80"
"""What IDs of traces begin with."""


@dataclass(slots=True)
class Seen:
    """What callers got, by the case, and what was told of it when the world had ended."""

    answers: dict[str, httpx.Response] = field(default_factory=dict)
    logs: dict[str, str] = field(default_factory=dict)
    got: Collected | None = None
    sampled: str = ""
    unsampled: str = ""

    def id(self, case: str) -> str:
        return self.answers[case].headers["x-request-id"]

    def spans(self, case: str) -> list[Told]:
        """Of the case's trace, which its edge's span names."""
        assert self.got is not None
        [whole] = [s for s in self.got.spans if s.service == "skerry-edge"
                   and s.attributes.get("skerry.request.id") == self.id(case)]  # fmt: skip
        return self.got.trace(whole.trace)

    def lines(self, case: str) -> dict[str, list[str]]:
        """The request's own lines of each process, without their beginnings."""
        about = re.compile(rf" skerry\.request (\w+ id={self.id(case)} .*)")
        found = {name: about.findall(text) for name, text in self.logs.items()}
        return {name: lines for name, lines in found.items() if lines}


def asked(world: LocalWorld, prompt: str, trace: str = "", max_tokens: int = 5) -> httpx.Response:
    body = completion(prompt, max_tokens=max_tokens, stream=False, stream_options=None)
    headers = {"traceparent": trace} if trace else {}
    url = world.edges["ams"] + "/v1/completions"
    return httpx.post(url, json=body, headers=headers, timeout=60, trust_env=False)


def _split(world: LocalWorld, name: str, trace: str, flags: str) -> tuple[httpx.Response, str]:
    """The answer to a prompt that another node has read, and its trace, whose ID begins with
    `trace`."""

    def ask(number: int) -> httpx.Response:
        header = f"00-{trace}{number:04x}-{ABOVE}-{flags}"
        return asked(world, f"{name} {number}: {LONG}", header)

    answer, number = crowded(ask, lambda one: "x-skerry-prefill" in one.headers)
    return answer, f"{trace}{number:04x}"


def _struck(world: LocalWorld, name: str, victim: str) -> httpx.Response:
    """The answer to a prompt whose reading ends with the region's `victim`."""
    for number in range(8):
        prompt = f"{name} {number}: " + LONG * 7  # three seconds of reading
        region = asked(world, prompt[:2000]).headers["x-skerry-region"]
        with ThreadPoolExecutor(1) as pool:
            caller = pool.submit(asked, world, prompt)
            with ExitStack() as stopped:
                if stopped_in_reading(world, region, caller.done, stopped):
                    world.kill(victim.format(region=region))
                    return caller.result(90)
            caller.result(90)  # that one was read before anybody looked
    raise AssertionError("no prompt of eight was caught in its reading")


def stopped_in_reading(
    world: LocalWorld, region: str, over: Callable[[], bool], stopped: ExitStack
) -> bool:
    """Whether the region's reader stands still in the middle of a prompt until `stopped` is closed;
    False where the prompt was over first."""
    name = f"{region}-prefill"

    def backlog() -> int:
        return int(node(world, name, region).get("prefill_backlog_tokens", 0))

    assert until(lambda: over() or backlog() > 0), "neither read nor answered"
    if over():
        return False
    stopped.enter_context(stopped_rank(world, name, region))
    time.sleep(STALE_S)
    return backlog() > 0


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    folder = tmp_path_factory.mktemp("traces")
    seen = Seen()
    with collecting() as got:
        with scripted_world(folder, otlp=got.url) as world:
            # First what ends a router, with all that it has not told by then.
            elsewhere = _struck(world, "elsewhere", "{region}")
            assert until(lambda: all(alive(world, region) for region in world.routers))
            cold, seen.sampled = _split(world, "cold", TRACE, "01")
            unsampled, seen.unsampled = _split(world, "unsampled", UNSAMPLED, "00")
            seen.answers = {
                "elsewhere": elsewhere,
                "cold": cold,
                "unsampled": unsampled,
                "refused": asked(world, "word " * 20_000),
                "again": _struck(world, "again", "{region}-prefill"),
            }
            logs = world.logs
        # What ends has sent what it had.
        seen.logs = {path.stem: path.read_text("utf-8") for path in logs.glob("*.log")}
        seen.got = got
        yield seen


def one(spans: list[Told], service: str, name: str) -> Told:
    [found] = [s for s in spans if s.service == f"skerry-{service}" and s.name == name]
    return found


def test_a_cold_split_request_is_one_trace_of_its_callers(seen: Seen) -> None:
    answer, spans = seen.answers["cold"], seen.spans("cold")
    assert answer.status_code == 200
    region = answer.headers["x-skerry-region"]
    assert {span.trace for span in spans} == {seen.sampled}
    edge = one(spans, "edge", f"text_completion {MODEL}")
    tried = one(spans, "edge", "attempt")
    router = one(spans, "router", "region")
    placed = one(spans, "router", "attempt")
    hops = [span for span in spans if span.kind == "SERVER"]
    reader, writer = one(hops, "node", "prefill"), one(hops, "node", "answer")
    parents = [span.parent for span in (edge, tried, router, placed, reader, writer)]
    assert parents == [ABOVE, edge.id, tried.id, router.id, placed.id, placed.id]
    assert [span.instance for span in (router, reader, writer)] == [
        region, f"{region}-prefill", f"{region}-decode",
    ]  # fmt: skip
    assert len({span.id for span in spans}) == len(spans)
    known = {span.id for span in spans} | {ABOVE}
    assert [span.name for span in spans if span.parent not in known] == []
    # Each hop lies within the one above it: all on one machine, so by one clock.
    for inner, outer in ((tried, edge), (router, tried), (placed, router), (reader, placed),
                         (writer, placed)):  # fmt: skip
        assert outer.began_ns - 10**6 <= inner.began_ns
        # It is closed after its last byte was read, whenever its process has a turn.
        assert inner.ended_ns <= outer.ended_ns + 10**9
    usage = answer.json()["usage"]
    for span in (edge, router, writer):
        assert span.attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
        assert span.attributes["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
    assert reader.attributes["skerry.computed"] == usage["prompt_tokens"] - 1
    assert reader.attributes["skerry.kv_bytes"] == writer.attributes["skerry.kv_bytes"] != 0


def test_each_hop_has_one_line_of_a_request(seen: Seen) -> None:
    region = seen.answers["cold"].headers["x-skerry-region"]
    lines = seen.lines("cold")
    assert {name: [line.split(" ")[0] for line in said] for name, said in lines.items()} == {
        "ams": ["answered"],
        region: ["passed"],
        f"{region}-prefill": ["prefilled"],
        f"{region}-decode": ["answered"],
    }
    assert all(" outcome=ok " in said[0] for said in lines.values())
    assert lines["ams"][0].endswith(f" trace={seen.sampled}")
    usage = seen.answers["cold"].json()["usage"]
    assert f" prompt={usage['prompt_tokens']} " in lines[f"{region}-decode"][0]


def test_who_is_not_sampled_leaves_lines_alone(seen: Seen) -> None:
    assert seen.answers["unsampled"].status_code == 200
    assert seen.got is not None
    assert seen.got.trace(seen.unsampled) == []
    assert len(seen.lines("unsampled")) == 4


def test_a_refusal_of_the_region_is_told_by_both(seen: Seen) -> None:
    assert seen.answers["refused"].status_code == 400
    spans = seen.spans("refused")
    router = one(spans, "router", "region")
    assert router.parent == one(spans, "edge", "attempt").id
    assert router.failed == one(spans, "edge", "attempt").failed == "context_length_exceeded"
    assert [line for lines in seen.lines("refused").values() for line in lines if
            " outcome=context_length_exceeded " not in line] == []  # fmt: skip
    assert len(seen.lines("refused")) == 2


def test_a_lost_node_is_an_attempt_of_the_same_trace(seen: Seen) -> None:
    answer, spans = seen.answers["again"], seen.spans("again")
    assert answer.status_code == 200
    region = answer.headers["x-skerry-region"]
    first, second = sorted(
        (s for s in spans if s.service == "skerry-router" and s.name == "attempt"),
        key=lambda span: span.began_ns,
    )
    # Whichever is noticed first: that the node has gone, or that its KV stays away.
    assert first.failed in ("node_lost", "transfer_failed")
    assert second.failed == ""
    router = one(spans, "router", "region")
    assert first.parent == second.parent == router.id
    # The node that was killed has told nothing; the other was asked twice.
    answers = [s for s in spans if s.service == "skerry-node" and s.kind == "SERVER"]
    assert [(s.name, s.instance, s.parent) for s in answers] == [
        ("answer", f"{region}-decode", first.id),
        ("answer", f"{region}-decode", second.id),
    ]
    assert answers[0].failed in ("moved", "transfer_failed")
    assert answers[1].failed == ""
    [passed] = seen.lines("again")[region]
    assert " outcome=ok " in passed
    assert " attempts=2 " in passed
    said = seen.lines("again")[f"{region}-decode"]
    outcomes = [re.findall(r" outcome=(\w+) ", line) for line in said]
    assert outcomes == [[answers[0].failed], ["ok"]]


def test_another_region_goes_on_in_the_same_trace(seen: Seen) -> None:
    answer, spans = seen.answers["elsewhere"], seen.spans("elsewhere")
    assert answer.status_code == 200
    lost, won = sorted(
        (s for s in spans if s.service == "skerry-edge" and s.name == "attempt"),
        key=lambda span: span.began_ns,
    )
    assert lost.failed in ("incomplete_stream", "region_unavailable")
    assert won.attributes["skerry.region"] == answer.headers["x-skerry-region"]
    assert won.attributes["skerry.region"] != lost.attributes["skerry.region"]
    router = one(spans, "router", "region")  # the killed one has told nothing
    assert (router.parent, router.instance) == (won.id, won.attributes["skerry.region"])


def test_nothing_of_a_prompt_is_told(seen: Seen) -> None:
    assert seen.got is not None
    assert seen.got.spans
    assert [one for one in seen.got.requests if WORD in str(one)] == []
    assert [name for name, text in seen.logs.items() if WORD in text] == []
