"""Reading real streams: what each end of one is called, and that times are those of the pieces."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Timer

import pytest

from loadtest.users.running import LOCUSTFILE, ROOT, told_in
from loadtest.users.stream import Asker
from tests.loadtest.users.doubles import GAP_S, server


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with server() as found:
        yield found


@pytest.mark.parametrize(
    ("path", "error", "tokens"),
    [
        ("/v1/chat/completions", "", 5),
        ("/v1/completions", "", 5),
        ("/cut", "cut", 1),
        ("/error", "region_unavailable", 1),
        ("/busy", "429 rate_limit_exceeded", 0),
        ("/quiet", "", 5),
    ],
)
def test_how_a_stream_ended(address: str, path: str, error: str, tokens: int) -> None:
    asker = Asker(address, None, began=time.perf_counter())
    answer, _ = asker.ask("kind", path, {}, time.perf_counter())
    asker.close()
    assert answer.error == error
    assert answer.completion_tokens == tokens


def test_the_clock_of_the_first_token_runs_from_when_it_was_due(address: str) -> None:
    asker = Asker(address, "a-key", began=time.perf_counter())
    due = time.perf_counter() - 1.0
    answer, text = asker.ask("kind", "/v1/chat/completions", {}, due)
    asker.close()
    assert text == "abc"
    assert answer.ttft_s is not None
    assert answer.per_token_s is not None
    assert 1.0 + GAP_S <= answer.ttft_s < answer.total_s
    assert answer.per_token_s >= 2 * GAP_S / 4 * 0.9  # three pieces, five tokens by the usage
    assert (answer.prompt_tokens, answer.cached_tokens, answer.region) == (20, 16, "eu")


def test_comments_are_counted_while_a_request_waits(address: str) -> None:
    asker = Asker(address, None, began=time.perf_counter())
    answers = [asker.ask("kind", path, {}, time.perf_counter())[0] for path in ("/held", "/cut")]
    asker.close()
    assert [one.comments for one in answers] == [2, 0]


def test_nobody_answers() -> None:
    asker = Asker("http://127.0.0.1:9", None, began=0.0)
    answer, _ = asker.ask("kind", "/x", {}, time.perf_counter())
    assert answer.error == "ConnectionRefusedError"
    assert answer.ttft_s is None


def test_locust_plays_the_mix_and_a_trace(address: str, tmp_path: Path) -> None:
    out, trace = tmp_path / "answers.json", tmp_path / "trace.jsonl"
    rows = [{"timestamp": 50 * n, "output_length": 5, "hash_ids": [0, n]} for n in range(4)]
    trace.write_text("\n".join(map(json.dumps, rows)))
    base = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--headless", "--only-summary",
            "--host", address, "--answers", str(out)]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    page, over = tmp_path / "report.html", tmp_path / "over"
    with server() as other:
        mix = subprocess.Popen(
            [*base, "--edges", f"{address},{other}", "--chat-worker", f"{other}/w/chat/",
             "--users", "22", "--processes", "2", "--think", "0.05", "--html", str(page),
             "--until", str(over)],
            cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        assert mix.stdout is not None, "it is a pipe"
        said = ""
        for line in mix.stdout:
            said += line
            if "All users spawned" in line:
                Timer(2.0, over.touch).start()
        mix.stdout.close()
        mix.wait(60)
    assert mix.returncode == 0, said
    told = json.loads(out.read_text())["answers"]
    kinds = {"conversation", "document", "agent", "completion", "worker"}
    assert {one[0] for one in told} == kinds
    assert {one[1] for one in told} == {address, other}
    assert not any(one[3] for one in told)
    assert "from 2 processes" in said
    report = page.read_text()
    for name in (*kinds, f"edge {address}", f"edge {other}", "region eu"):
        assert f'"method": "first token", "name": "{name}"' in report, name
    assert "<td" in report[report.index("By kind, edge and region") :]
    replay = subprocess.run(
        [*base, "--run-time", "2s", "--trace", str(trace), "--speed", "2",
         "--slo-ttft", "0.000001"],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert replay.returncode == 1, "the service level cannot have been kept"
    told = json.loads(out.read_text())["answers"]
    assert [one[0] for one in told] == ["replay"] * 4


def test_a_crowd_leaves_as_quickly_as_it_came(address: str, tmp_path: Path) -> None:
    out = tmp_path / "answers.json"
    command = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--headless",
               "--only-summary", "--host", address, "--answers", str(out), "--shape", "spike",
               "--run-time", "5s", "--users", "2", "--think", "0.2",
               "--stop-timeout", "20"]  # fmt: skip
    subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True,
        check=False, timeout=60,
    )  # fmt: skip
    moments = [answer.at_s for answer in told_in(out).answers]
    crowd = sum(2.2 <= at < 3.0 for at in moments)
    after = sum(4.2 <= at < 5.0 for at in moments)  # its last streams have ended
    assert crowd > 4 * after > 0
