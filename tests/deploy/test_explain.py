"""`skerry explain`: what is drawn of a story, and what is said when there is none."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from core.errors import ConfigError
from core.events import Placing
from core.story import Choice, Kept, Story, StoryPage, Try, Weighed
from core.types import ModelName, NodeName, RegionName, RequestId, Timings
from deploy.explain import (
    WHY,
    WHY_NODES,
    aligned,
    find,
    lines,
    newest,
    recent_lines,
    rows,
    secret_of,
)
from edge.routing.placement import Reason

EU, US = RegionName("eu"), RegionName("us")
STORY = Story(
    id=RequestId("r1"), edge="ams", worker=2, dialect="chat", at=0.0, age_s=9.0, outcome="ok",
    tenant="quay", key="0123456789ab", model=ModelName("tiny"), stream=True, admitted_s=0.001,
    prompt_tokens=100, cached_tokens=64, completion_tokens=20,
    choices=(Choice(
        at_s=0.002, reason="prefix_held", order=(US, EU), bound_s=10.0, key_depth=2, key_blocks=7,
        text_bytes=3584, hot_version="a1b2", by_affinity=False,
        weighed=(
            Weighed(region=EU, standing="weighed", round_trip_s=0.008, wait_s=0.0, read_s=2.0,
                    held_tokens=0.0, work_s=0.5, total_s=2.008, cost_s=10.008),
            Weighed(region=US, standing="taken", round_trip_s=0.092, wait_s=0.1, read_s=0.3,
                    held_tokens=64.0, work_s=0.0, total_s=0.492, cost_s=1.692),
        ),
    ),),
    tries=(Try(region=US, reason="prefix_held", began_s=0.002, accepted_s=0.102, first_s=0.502,
               ended_s=1.002, outcome="ok", prefill=NodeName("us-p"), decode=NodeName("us-d"),
               node_reason="split",
               placing=Placing(reusable_tokens=64, held_tokens=32, compute_tokens=35,
                               pulled_tokens=32, pulled_from=NodeName("us-q"), alone_s=0.9,
                               split_s=0.4)),),
    ended_s=1.002, timings=Timings(prefill_s=0.4, transfer_s=0.1, kv_bytes=2_000_000),
)  # fmt: skip


def test_a_story_as_a_page() -> None:
    page = "\n".join(lines(STORY))
    assert page == (
        """\
request r1: chat, tiny, streamed; edge ams, process 2; 9 s ago; ok
asked by quay, key 0123456789ab
100 prompt tokens, 64 of them cached; 20 generated

chosen: us, prefix_held: it holds so much of the prompt that it is the fastest
key: 2 of 7 text blocks, hot set a1b2; 3584 bytes of prompt; a region is full above 10.00 s of work
after it: eu
  region  standing  round trip    wait     read  predicted  compared      holds    work
  eu      weighed       8.0 ms  0.0 ms  2000 ms    2008 ms    10.0 s   0 tokens  0.50 s
  us      taken        92.0 ms  100 ms   300 ms     492 ms   1692 ms  64 tokens  0.00 s

tried us at 2.0 ms, prefix_held on us-p → us-d (split): ok
  split: a prefill node reads it, while the decode node's streams go on
  tokens: 32 held where it was read (64 at most anywhere), 32 from us-q, 35 computed
  lost by all who wait: 900 ms if the decode node read it, 400 ms if it is split off

where the time went: 1002 ms in all
  admit               1.0 ms  █
  route               1.0 ms  █                                 prefix_held
  travel              100 ms  ███                               us
  prefill             400 ms     █████████████                  us-p → us-d
    transfer          100 ms               ░░░                  2.0 MB of KV
  decode              500 ms                  ████████████████
worst step: decode, 500 ms, 50% of it"""
    )
    assert all(len(line) <= 100 for line in page.splitlines())


def test_the_worker_that_asked_is_named() -> None:
    told = list(lines(replace(STORY, tenant="anonymous", key="-", by="hello")))
    assert told[1] == "asked by anonymous, by its Worker hello"


def test_one_that_runs_and_one_that_was_never_parsed() -> None:
    running = replace(STORY, outcome="", ended_s=None, timings=None, tries=())
    assert "still running" in next(lines(running))
    bare = replace(running, model=None, admitted_s=None, choices=(), tenant="", key="")
    assert "not parsed" in next(lines(bare))
    assert not any("asked by" in line for line in lines(bare))
    free = replace(STORY, key="-")
    assert "asked by quay, without a key" in list(lines(free))
    [_, row] = rows([bare])
    assert row[3:7] == ("–", "–", "–", "running")


def test_every_reason_of_a_route_has_its_words() -> None:
    assert set(WHY) == {reason.value for reason in Reason}


def test_the_list_has_a_line_each_without_blanks_in_cells() -> None:
    table = list(aligned(rows([STORY, STORY]), 8))
    assert table[1].split() == [
        "r1", "9s", "ams", "quay", "us", "prefix_held", "ok", "1002ms", "decode"
    ]  # fmt: skip
    assert len(table) == 3


@contextmanager
def _edge(status: int, body: bytes) -> Iterator[tuple[str, list[tuple[str, str | None]]]]:
    asked: list[tuple[str, str | None]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append((self.path, self.headers.get("x-skerry-secret")))
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _page(*stories: Story) -> bytes:
    kept = Kept(requests=1000, seconds=900.0)
    return msgspec.json.encode(StoryPage(edge="ams", kept=kept, stories=stories))


def test_the_edge_that_had_it_is_found_and_told_the_secret(tmp_path: Path) -> None:
    (tmp_path / "region.secret").write_text("s3cret\n")
    secret = secret_of(tmp_path)
    gone = b'{"error": {"message": "No request r1 is known here. Each worker keeps its last 1000"}}'
    with _edge(404, gone) as (first, _), _edge(200, _page(STORY)) as (second, asked):
        assert find([first, second], "r1", secret) == STORY
        assert asked == [("/explain/r1", "s3cret")]
        assert newest([second], 5, None) == [STORY]
        assert asked[1] == ("/explain?newest=5", None)
        assert recent_lines(second)[1].split()[0] == "r1"
        with pytest.raises(ConfigError, match="keeps its last 1000"):
            find([first, first], "r1", None)


def test_who_cannot_be_asked_is_said() -> None:
    with pytest.raises(ConfigError, match="nothing answers at"):
        find(["http://127.0.0.1:1"], "r1", None)
    with (
        _edge(200, b"<html>") as (other, _),
        pytest.raises(ConfigError, match="is not a Skerry edge"),
    ):
        find([other], "r1", None)
    with _edge(200, _page()) as (idle, _):
        assert recent_lines(idle) == ["no request yet"]
    with pytest.raises(ConfigError, match="No such file"):
        secret_of(Path("/nowhere"))


def test_every_reason_of_a_router_is_explained() -> None:
    from regional.placement import Reason

    assert set(WHY_NODES) == set(Reason)
